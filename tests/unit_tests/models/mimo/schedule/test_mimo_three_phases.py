# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Steps of one optimizer over two modules: in every layout as in plain data parallelism, also where
the encoder is on all ranks of a language model's pipeline."""

import pytest
import torch
import torch.distributed as dist

from megatron.core.models.mimo.colocated_schedule import colocated_forward_backward
from megatron.core.models.mimo.forward.encoding import run_microbatch
from megatron.core.models.mimo.optimizer import get_mimo_optimizer
from megatron.core.models.mimo.setup.module_groups import schedule_collection
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from tests.unit_tests.models.mimo.small_model import LENGTH, SAMPLES, trained
from tests.unit_tests.test_utilities import Utils, requires_world_size

STEPS = 3
SETTINGS = OptimizerConfig(optimizer="adam", lr=0.01, clip_grad=0.1, weight_decay=0.0)


def forward_step(microbatches, model):
    output, mask = run_microbatch(model, next(microbatches))

    def loss(output):
        total, count = (output * mask).sum(), mask.sum().int()
        return total, count, dict(sums=torch.stack([total.detach(), count]))

    return output, loss


def steps(encoder: dict[str, int], language: dict[str, int], count: int) -> list[float]:
    """Losses and gradient norms of some steps on one batch of `count` microbatches."""
    found = []
    with trained(encoder, language) as run:
        run.optimizer = get_mimo_optimizer([run.model], SETTINGS)
        dp = language.get("dp", 1)
        for _ in range(STEPS):
            run.model.zero_grad_buffer()
            run.optimizer.zero_grad()
            reports = colocated_forward_backward(
                forward_step_func=forward_step,
                data_iterator=iter(run.microbatches(count)),
                model=run.model,
                num_microbatches=count,
                seq_length=LENGTH,
                micro_batch_size=SAMPLES // dp // count,
                pg_collection=schedule_collection(run.modules),
            )
            stepped, norm, _ = run.optimizer.step()
            assert stepped
            sums = torch.zeros(2, device=Utils.device)
            for report in reports:
                sums += report["sums"]
            # Ranks of a TP group report the same samples, which cancels out.
            dist.all_reduce(sums)
            found += [float(sums[0] / sums[1]), float(norm)]
    return found


@requires_world_size(2)
def test_steps_are_those_of_plain_data_parallelism():
    expected = steps(dict(dp=2), dict(dp=2), 1)
    assert expected[0] != pytest.approx(expected[2], rel=1e-3), "weights move"
    for encoder, language, count in (
        (dict(dp=2), dict(tp=2), 1),
        (dict(tp=2), dict(dp=2), 1),
        (dict(dp=2), dict(pp=2), 2),
        (dict(tp=2), dict(pp=2), 4),
    ):
        assert steps(encoder, language, count) == pytest.approx(expected, rel=1e-5)
