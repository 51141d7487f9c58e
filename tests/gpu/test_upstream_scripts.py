# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Upstream's ``pretrain_mimo.py`` on the applied tree, with experts and the engine's layers.

The script is in git checkouts only: set ``MEGATRON_GIT_CHECKOUT`` to one. ``STAGED_BRANCH`` names a
branch of it that runs in place of the applied tree. The model is the Nemotron VLM: RADIO, pixel
shuffle, MLP projector, and Mamba-2, attention and experts.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

REPOSITORY = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-4
BF16_TOLERANCE = 1e-3
LIMIT_S = 400
RANKS = int(os.environ.get("RANKS", "2"))

needs_two = pytest.mark.skipif(RANKS < 2, reason="needs 2 ranks, this run has 1")

OPTIONS = """
    --mimo-layout colocated --llm-offset 0 --vision-projection-type mlp
    --hybrid-layer-pattern MEM* --num-layers 4 --hidden-size 64 --ffn-hidden-size 64
    --num-attention-heads 8 --group-query-attention --num-query-groups 4 --kv-channels 8
    --squared-relu --disable-bias-linear --normalization RMSNorm --position-embedding-type none
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64
    --moe-shared-expert-intermediate-size 64 --moe-router-score-function sigmoid
    --moe-router-dtype fp32 --moe-router-topk-scaling-factor 2.5 --moe-router-enable-expert-bias
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    --moe-token-dispatcher-type alltoall
    --mamba-num-heads 32 --mamba-head-dim 4 --mamba-num-groups 4 --mamba-state-dim 16
    --img-h 32 --img-w 32 --patch-dim 8 --pixel-shuffle --disable-vision-class-token
    --image-token-id 63 --vocab-size 64 --make-vocab-size-divisible-by 1
    --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8
    --train-iters 4 --lr 2e-3 --lr-decay-style constant --adam-eps 1e-5 --seed 1
    --attention-dropout 0 --hidden-dropout 0 --calculate-per-token-loss
    --use-distributed-optimizer --eval-iters 0 --eval-interval 100 --log-interval 1
    --tensorboard-log-interval 1 --distributed-timeout-minutes 5 --rerun-mode disabled
    --no-persist-layer-norm --no-masked-softmax-fusion --no-gradient-accumulation-fusion
    --no-bias-gelu-fusion --no-bias-dropout-fusion
"""
APART = """
    --mimo-layout non-colocated --bf16 --encoder-tp 1 --encoder-dp 1 --llm-offset 1 --llm-dp 1
    --dist-ckpt-optim-fully-reshardable --moe-aux-loss-coeff 1e-2
"""
"""Options of non-colocated runs, in bf16 because upstream wraps modules of 16 bits only."""
CHUNKWISE = "--linear-cp-mode chunkwise --linear-cp-layout contiguous"
MIMO = f"examples/mimo/pretrain_mimo.py {OPTIONS} {CHUNKWISE}"
ONE_RANK = "--encoder-tp 1 --encoder-dp 1 --llm-tp 1 --llm-dp 1"
TWO_GPUS = "--encoder-tp 1 --encoder-dp 2 --llm-tp 2 --llm-dp 1 --llm-ep 2"


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A clone of the checkout with the overlay, or of the staged branch."""
    made = tmp_path_factory.mktemp("trees") / "applied"
    checkout, branch = os.environ.get("MEGATRON_GIT_CHECKOUT"), os.environ.get("STAGED_BRANCH")
    if not checkout:
        pytest.fail("no git checkout of Megatron-LM at hand: set MEGATRON_GIT_CHECKOUT to one")
    which = ["--branch", branch] if branch else []
    subprocess.run(["git", "clone", "--quiet", *which, "--", checkout, made], check=True)
    if not branch:
        subprocess.run([REPOSITORY / "tools/apply_overlay.sh", made], check=True)
    return made


class Script:
    """The script, on so many GPUs."""

    def __init__(self, tree: Path, ranks: int, command: str, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        program = [str(Path(__file__).with_name("upstream_script.py")), *command.split()]
        recorded = ["--tensorboard-dir", str(folder / "tensorboard")]
        with (folder / "log.txt").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, *launch, *program, *recorded],
                cwd=tree,
                env=os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONPATH": _paths(tree)},
                stdout=log,
                stderr=log,
            )

    def curves(self) -> list[list[float]]:
        """Wait until it has ended well, and return losses and gradient norms."""
        try:
            status = self._process.wait(LIMIT_S)
        finally:
            self._process.kill()
        assert status == 0, (self._folder / "log.txt").read_text(errors="replace")[-4000:]
        recorded = EventAccumulator(str(self._folder / "tensorboard"))
        recorded.Reload()
        tags = ("lm loss", "grad-norm")
        return [[event.value for event in recorded.Scalars(tag)] for tag in tags]


def _paths(tree: Path) -> str:
    """Python's search path with the tree in the checkout's place."""
    own, rest = os.environ["CHECKOUT"], os.environ["PYTHONPATH"].split(os.pathsep)
    return os.pathsep.join(str(tree) if path == own else path for path in rest)


def check(
    tree, runs: list[tuple[int, str]], folder: Path, record_property, tolerance: float = TOLERANCE
) -> None:
    """Start two runs at once, and assert that losses and gradient norms are the same."""
    started = [
        Script(tree, ranks, command, folder / str(number))
        for number, (ranks, command) in enumerate(runs)
    ]
    one, other = (script.curves() for script in started)
    found = {
        name: max(abs(a / b - 1) for a, b in zip(these, those, strict=True))
        for name, these, those in zip(("loss", "grad_norm"), one, other, strict=True)
    }
    record_property("found", found)
    assert len(one[0]) == 4 and max(found.values()) <= tolerance, (found, one, other)


@needs_two
def test_pretrain_mimo_colocated_trains_on_two_gpus_as_on_one(tree, tmp_path, record_property):
    runs = [(1, f"{MIMO} {ONE_RANK}"), (2, f"{MIMO} {TWO_GPUS}")]
    check(tree, runs, tmp_path, record_property)


@needs_two
def test_pretrain_mimo_on_a_gpu_for_each_module(tree, tmp_path, record_property):
    """Two sizes of microbatches are compared: no one-GPU run has the same initial weights."""
    alike = f"{MIMO} {APART} --llm-tp 1"
    runs = [(2, alike), (2, f"{alike} --micro-batch-size 4")]
    check(tree, runs, tmp_path, record_property, BF16_TOLERANCE)
