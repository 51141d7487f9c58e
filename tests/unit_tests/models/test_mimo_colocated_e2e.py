# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Colocated training of an encoder and a GPT whose layouts differ, against plain PyTorch."""

import contextlib
import functools

import pytest
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from tests.unit_tests.models.mimo_gpt import Module, Samples, train, train_plainly
from tests.unit_tests.test_utilities import Utils, requires_world_size

STEPS = 5
MICROBATCHES = [Samples.draw(count=8, seed=seed) for seed in (0, 1)]

TOLERANCE = 1e-5
"""Relative, of fp32 losses and gradient norms: sums in another order."""


@contextlib.contextmanager
def modules(encoder: dict[str, int], language: dict[str, int]):
    """Both modules over the ranks; their groups end with the block."""
    Utils.initialize_distributed()
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    made = [Module.make(**encoder), Module.make(**language)]
    model_parallel_cuda_manual_seed(0, tp_rank=0, ep_rank=0, etp_rank=0, force_reset_rng=True)
    yield made
    for module in made:
        module.grid.destroy()


@functools.cache
def one_rank_trajectory() -> list[tuple[float, float]]:
    """Loss and gradient norm of each step on rank 0 alone; the others wait for them."""
    with modules({}, {}) as (encoder, language):
        found = [None]
        if Utils.rank == 0:
            found = [list(train_plainly(encoder, language, MICROBATCHES, STEPS))]
        dist.broadcast_object_list(found)
    return found[0]


def check(encoder: dict[str, int], language: dict[str, int], packed: bool = False) -> None:
    """The loss goes down, step by step as on one rank."""
    expected = one_rank_trajectory()
    with modules(encoder, language) as made:
        found = list(train(*made, MICROBATCHES, STEPS, packed))
    losses, norms = zip(*found, strict=True)
    expected_losses, expected_norms = zip(*expected, strict=True)
    assert losses == pytest.approx(expected_losses, rel=TOLERANCE)
    assert norms == pytest.approx(expected_norms, rel=TOLERANCE)
    assert losses[-1] < 0.9 * losses[0]


class TestOneRank:
    @requires_world_size(1)
    @pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
    def test_the_loss_falls_as_in_plain_pytorch(self, packed):
        check({}, {}, packed)


class TestEightRanks:
    @requires_world_size(8)
    @pytest.mark.parametrize(
        ("encoder", "language", "packed"),
        [
            pytest.param(dict(dp=8), dict(tp=2, dp=4), False, id="fan-in"),
            pytest.param(dict(tp=8), dict(tp=2, dp=4), False, id="fan-out"),
            pytest.param(dict(dp=8), dict(cp=2, dp=4), False, id="fan-in-cp-2"),
            pytest.param(dict(dp=8), dict(tp=2, cp=2, dp=2), True, id="fan-in-cp-2-tp-2-packed"),
            pytest.param(dict(tp=4, dp=2), dict(cp=2, dp=4), False, id="fan-out-cp-2"),
            pytest.param(dict(tp=8), dict(cp=4, dp=2), True, id="fan-out-cp-4-packed"),
        ],
    )
    def test_the_loss_falls_as_on_one_rank(self, encoder, language, packed):
        check(encoder, language, packed)
