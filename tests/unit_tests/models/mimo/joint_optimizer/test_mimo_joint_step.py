# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Steps of one optimizer over two modules, without a schedule: the same in every layout."""

import pytest
import torch
import torch.distributed as dist

from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.models.mimo.optimizer import get_mimo_optimizer
from megatron.core.models.mimo.schedule.grad_finalization import finalize_mimo_grads
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from tests.unit_tests.models.mimo.small_model import trained
from tests.unit_tests.test_utilities import requires_world_size

STEPS = 3
SETTINGS = OptimizerConfig(optimizer="adam", lr=0.01, clip_grad=0.1, weight_decay=0.0)


def steps(encoder: dict[str, int], language: dict[str, int]) -> list[float]:
    """Losses and gradient norms of some steps on one batch."""
    found = []
    with trained(encoder, language) as run:
        run.optimizer = get_mimo_optimizer([run.model], SETTINGS)
        groups = run.modules[LANGUAGE].groups
        (batch,) = run.microbatches(1)
        for _ in range(STEPS):
            run.model.zero_grad_buffer()
            run.optimizer.zero_grad()
            losses, mask = run.model(**batch)
            total = (losses * mask).sum()
            total.backward()
            finalize_mimo_grads([run.model], mask.sum().int(), groups)
            stepped, norm, _ = run.optimizer.step()
            assert stepped
            sums = torch.stack([total.detach(), mask.sum()])
            dist.all_reduce(sums, group=groups.dp)
            found += [float(sums[0] / sums[1]), float(norm)]
    return found


@requires_world_size(2)
def test_steps_are_those_of_plain_data_parallelism():
    expected = steps(dict(dp=2), dict(dp=2))
    assert expected[0] != pytest.approx(expected[2], rel=1e-3), "weights move"
    assert steps(dict(dp=2), dict(tp=2)) == pytest.approx(expected, rel=1e-5)
    assert steps(dict(tp=2), dict(dp=2)) == pytest.approx(expected, rel=1e-5)
