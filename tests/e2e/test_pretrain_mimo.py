# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Upstream's own ``pretrain_mimo.py`` with ``--mimo-layout colocated``: as on one rank.

The program is in git checkouts only. One is copied from ``MEGATRON_GIT_CHECKOUT``, or made of the
pin's package and an archive of what upstream has beside it, in ``../shared/upstream``.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("small_pretrain_mimo.py")
SECONDS = 400
TOLERANCE = 1e-4  # of fp32 sums in another order, over a few steps of Adam
PRINTED = 1e-3  # of the gradient norm, which Megatron prints with three decimals

OPTIONS = """
    --mimo-layout colocated --transformer-impl local
    --hybrid-layer-pattern MEM* --num-layers 4 --hidden-size 64 --ffn-hidden-size 64
    --num-attention-heads 8 --group-query-attention --num-query-groups 4 --kv-channels 8
    --squared-relu --disable-bias-linear --normalization RMSNorm --position-embedding-type none
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64
    --moe-shared-expert-intermediate-size 64 --moe-router-score-function sigmoid
    --moe-router-dtype fp32 --moe-router-topk-scaling-factor 2.5 --moe-router-enable-expert-bias
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    --moe-token-dispatcher-type alltoall
    --mamba-num-heads 32 --mamba-head-dim 4 --mamba-num-groups 4 --mamba-state-dim 16
    --linear-context-parallel state-passing --hybrid-token-layout contiguous
    --img-h 32 --img-w 32 --patch-dim 8 --pixel-shuffle --disable-vision-class-token
    --image-token-id 63 --vocab-size 64 --make-vocab-size-divisible-by 1
    --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8
    --train-iters 4 --lr 2e-3 --lr-decay-style constant --adam-eps 1e-5 --seed 1
    --attention-dropout 0 --hidden-dropout 0 --calculate-per-token-loss
    --use-distributed-optimizer --eval-iters 0 --eval-interval 100 --log-interval 1
    --no-persist-layer-norm --no-masked-softmax-fusion --no-gradient-accumulation-fusion
    --no-bias-gelu-fusion --no-bias-dropout-fusion --rerun-mode disabled
"""
ONE_RANK = "--encoder-tp 1 --encoder-dp 1 --llm-tp 1 --llm-dp 1"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A git checkout's files with the overlay applied."""
    tree = tmp_path_factory.mktemp("git") / "checkout"
    given = os.environ.get("MEGATRON_GIT_CHECKOUT")
    archives = sorted((REPOSITORY.parent / "shared/upstream").glob("*-beside-the-package.tgz"))
    if given:
        shutil.copytree(given, tree, symlinks=True)
    elif archives:
        subprocess.run([REPOSITORY / "tools/fetch_upstream.sh", tree], check=True)
        with tarfile.open(archives[-1]) as archive:
            archive.extractall(tree, filter="data")
    else:
        pytest.skip("no git checkout of Megatron-LM at hand: set MEGATRON_GIT_CHECKOUT to one")
    subprocess.run([REPOSITORY / "tools/apply_overlay.sh", tree], check=True)
    return tree


def run(checkout: Path, ranks: int, layout: str) -> subprocess.CompletedProcess:
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    program = ["-m", "megatron.core.cpu_runtime", str(PROGRAM)]
    return subprocess.run(
        [sys.executable, "-m", *torchrun, *program, *shlex.split(OPTIONS), *layout.split()],
        cwd=checkout,
        env=os.environ
        | {
            "PYTHONPATH": str(checkout),
            "OMP_NUM_THREADS": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "PYTHONWARNINGS": "ignore",
        },
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def trajectory(checkout: Path, ranks: int, layout: str) -> dict[str, list[float]]:
    """Losses and gradient norms of a run, as Megatron printed them."""
    done = run(checkout, ranks, layout)
    assert done.returncode == 0, done.stderr
    names = {"loss": "lm loss", "norm": "grad norm"}
    found = {k: re.findall(rf"\| {name}: (\S+)", done.stdout) for k, name in names.items()}
    numbers = {key: list(map(float, values)) for key, values in found.items()}
    assert [len(values) for values in numbers.values()] == [4, 4], done.stdout
    return numbers


@pytest.fixture(scope="module")
def one_rank(checkout) -> dict[str, list[float]]:
    return trajectory(checkout, 1, ONE_RANK)


@pytest.mark.parametrize(
    "ranks, layout",
    [
        (8, "--encoder-tp 2 --encoder-dp 4 --llm-dp 2 --llm-tp 1 --llm-cp 2 --llm-pp 2 --llm-ep 2"),
        (4, "--encoder-tp 2 --encoder-dp 2 --llm-dp 1 --llm-tp 1 --llm-cp 2 --llm-pp 2 --llm-ep 2"),
        (4, "--encoder-tp 1 --encoder-dp 4 --llm-dp 2 --llm-tp 2 --llm-ep 2"),
    ],
    ids=["8-ranks", "4-ranks", "4-ranks-no-pipeline"],
)
def test_shared_ranks_train_as_one_does(checkout, one_rank, ranks, layout):
    found = trajectory(checkout, ranks, layout)
    assert found["loss"] == pytest.approx(one_rank["loss"], rel=TOLERANCE)
    assert found["norm"] == pytest.approx(one_rank["norm"], rel=PRINTED)
    assert len(set(found["loss"])) == 4  # it trains


def test_sizes_that_do_not_fit_are_refused(checkout):
    done = run(checkout, 1, ONE_RANK + " --llm-cp 2")
    assert done.returncode != 0
    assert "tp·cp·dp·pp = 1·2·1·1 = 2 must equal the 1 rank" in done.stderr
