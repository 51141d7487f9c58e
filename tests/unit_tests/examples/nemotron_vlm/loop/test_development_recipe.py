# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The command of upstream's 20-layer development recipe for a Nemotron VLM, with small widths."""

import pytest

from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.options.arguments import parse
from tests.unit_tests.examples.nemotron_vlm.runs import one_rank_trajectory, trajectory
from tests.unit_tests.test_utilities import requires_world_size

MODEL = """
    --num-layers 20 --hybrid-layer-pattern MEMEM*EMEMEM*EMEMEM* --num-experts 128
    --hidden-size 32 --num-attention-heads 8 --num-query-groups 2 --kv-channels 4
    --ffn-hidden-size 16 --moe-ffn-hidden-size 16 --moe-shared-expert-intermediate-size 32
    --mamba-num-heads 8 --mamba-head-dim 4 --mamba-num-groups 4 --mamba-state-dim 16
    --group-query-attention --squared-relu --disable-bias-linear --normalization RMSNorm
    --init-method-std 0.0173 --linear-conv-kernel-dim 4 --position-embedding-type none
    --moe-router-topk 6 --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5
    --moe-router-enable-expert-bias --moe-router-dtype fp32 --moe-aux-loss-coeff 1e-4
    --moe-router-load-balancing-type seq_aux_loss --moe-token-dispatcher-type alltoall
    --attention-backend flash --cross-entropy-loss-fusion --use-fused-weighted-squared-relu
    --seq-length 64 --max-position-embeddings 64 --vocab-size 512
""".split()

TRAINING = """
    --bf16 --micro-batch-size 1 --global-batch-size 4 --calculate-per-token-loss
    --lr 2e-4 --min-lr 2e-6 --lr-decay-style cosine --lr-warmup-iters 0 --lr-decay-iters 10
    --override-opt-param-scheduler --weight-decay 0.05 --adam-beta1 0.9 --adam-beta2 0.95
    --clip-grad 1.0 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --eval-interval 1 --eval-iters 0 --log-interval 1 --rerun-mode disabled
""".split()

NEED_A_GPU = """
    --moe-grouped-gemm --moe-router-fusion --moe-permute-fusion --moe-shared-expert-overlap
""".split()

LAYOUT = ("--encoder", "tp=2,dp=2", "--language", "cp=2,pp=2,dp=1,ep=2")

STEPS = 2

ROUNDING = 3e-2
"""Relative tolerance of losses in bf16: a rounded weight sends some tokens to another expert."""


@pytest.mark.parametrize("option", NEED_A_GPU)
def test_a_cpu_refuses_kernels_by_name(option):
    with pytest.raises(UserError, match=f"^{option} is not taken here: it needs a GPU"):
        parse([*MODEL, *TRAINING, option], world_size=1)


@requires_world_size(4)
def test_trains_colocated_as_on_one_rank():
    found = trajectory(*LAYOUT, *MODEL, *TRAINING, steps=STEPS)
    expected = one_rank_trajectory(*MODEL, *TRAINING, steps=STEPS)
    losses = [record["loss"] for record in expected]
    assert [record["loss"] for record in found] == pytest.approx(losses, rel=ROUNDING)
    assert not any(record["skipped"] for record in found)
