# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Upstream's own ``pretrain_mimo.py`` on an applied tree: the same in every layout.

The program is in git checkouts only: see ``upstream_world.py``. Its model is the Nemotron VLM:
RADIO, pixel shuffle, MLP projector, and Mamba-2, attention and experts. ``STAGED_BRANCH`` names a
branch of the checkout that runs in place of the applied tree.
"""

from pathlib import Path

import pytest

from tests.e2e.upstream_world import UpstreamWorld

TOLERANCE = 1e-4  # fp32 sums in another order, over a few steps of Adam
BF16_TOLERANCE = 1e-3  # found: 1.4e-4
STEPS = 4

PROGRAM = "examples/mimo/pretrain_mimo.py"
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
CHUNKWISE = "--linear-cp-mode chunkwise --linear-cp-layout contiguous"
ONE_RANK = "--encoder-tp 1 --encoder-dp 1 --llm-tp 1 --llm-dp 1"


def run(world: UpstreamWorld, ranks: int, layout: str, folder: Path) -> tuple[int, str]:
    world.start(ranks, [PROGRAM, *OPTIONS.split(), *layout.split()], folder)
    return world.wait()


APART = """
    --mimo-layout non-colocated --bf16 --encoder-tp 1 --encoder-dp 1 --llm-offset 1 --llm-dp 1
    --dist-ckpt-optim-fully-reshardable --moe-aux-loss-coeff 1e-2
"""
"""Options of non-colocated runs, in bf16 because upstream wraps modules of 16 bits only."""


def trajectory(world: UpstreamWorld, ranks: int, layout: str, folder: Path) -> list[list[float]]:
    """Run the script, and return losses and gradient norms."""
    status, log = run(world, ranks, layout, folder)
    assert status == 0, log[-4000:]
    recorded = world.scalars()
    return [[value for _, value in recorded[tag]] for tag in ("lm loss", "grad-norm")]


@pytest.fixture(scope="module")
def one_rank(applied, tmp_path_factory) -> list[list[float]]:
    return trajectory(applied, 1, ONE_RANK, tmp_path_factory.mktemp("one-rank") / "run")


@pytest.mark.parametrize(
    "ranks, layout",
    [
        (
            4,
            "--encoder-tp 2 --encoder-dp 2 --llm-dp 1 --llm-tp 1 --llm-cp 2 --llm-pp 2 --llm-ep 2 "
            + CHUNKWISE,
        ),
        (
            8,
            "--encoder-tp 2 --encoder-dp 4 --llm-dp 2 --llm-tp 1 --llm-cp 2 --llm-pp 2 --llm-ep 2 "
            + CHUNKWISE,
        ),
        (4, "--encoder-tp 1 --encoder-dp 4 --llm-dp 2 --llm-tp 2 --llm-ep 2"),
    ],
    ids=["4-ranks", "8-ranks", "4-ranks-no-pipeline"],
)
def test_shared_ranks_train_as_one_does(applied, one_rank, ranks, layout, tmp_path):
    losses, norms = trajectory(applied, ranks, layout, tmp_path / "run")
    assert losses == pytest.approx(one_rank[0], rel=TOLERANCE)
    assert norms == pytest.approx(one_rank[1], rel=TOLERANCE)
    assert len(set(losses)) == STEPS  # it trains


def test_an_encoder_on_ranks_of_its_own_trains_alike_with_experts_in_two_layouts(applied, tmp_path):
    """Upstream draws other initial weights in each layout, so both runs load the same.

    On the pristine tree the first step with experts ends as it is logged.
    """
    saved = tmp_path / "saved"
    saving = f"{APART} --llm-tp 1 --save {saved} --save-interval 1 --train-iters 1"
    trajectory(applied, 2, saving, tmp_path / "saving")
    loading = f"{APART} --load {saved} --no-load-rng --override-opt_param-scheduler"
    expected = trajectory(applied, 2, f"{loading} --llm-tp 1", tmp_path / "one-rank")
    spread = "--llm-tp 2 --llm-ep 2 --llm-pp 2 --sequence-parallel"
    found = trajectory(applied, 5, f"{loading} {spread}", tmp_path / "five-ranks")
    assert found[0] == pytest.approx(expected[0], rel=BF16_TOLERANCE)
    assert found[1] == pytest.approx(expected[1], rel=BF16_TOLERANCE)
    assert len(set(found[0])) == STEPS - 1


def test_experts_of_a_frozen_language_model_balance_nothing(applied, tmp_path):
    """Neither their losses, which would train the projector, nor their biases have an effect."""
    found = []
    for number, (coefficient, rate) in enumerate([(0, 0), (1, 0.5)]):
        options = f"{ONE_RANK} --freeze-lm --moe-router-bias-update-rate {rate}"
        losses = f"--moe-aux-loss-coeff {coefficient} --moe-z-loss-coeff {coefficient}"
        found.append(trajectory(applied, 1, f"{options} {losses}", tmp_path / str(number)))
    assert found[0] == found[1]
    assert len(set(found[0][0])) == STEPS


@pytest.mark.parametrize(
    "options, message",
    [
        ("--llm-cp 2", "tp·cp·dp·pp = 1·2·1·1 = 2 must equal the 1 rank"),
        ("--llm-offset 4", "--mimo-layout colocated needs --llm-offset 0, not 4"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(applied, options, message, tmp_path):
    status, log = run(applied, 1, f"{ONE_RANK} {options}", tmp_path / "run")
    assert status != 0
    assert message in log
