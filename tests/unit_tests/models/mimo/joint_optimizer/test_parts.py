# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""An optimizer that steps parts of its groups takes the same steps."""

import torch

from megatron.core.models.mimo.joint_optimizer.steps_in_parts import StepsInParts


class CountingAdam(torch.optim.AdamW):
    """Counts steps in each group, as Transformer Engine's does, and decays the rate by them; notes
    how many elements it steps at once."""

    def step(self) -> None:
        sizes = [p.numel() for group in self.param_groups for p in group["params"]]
        self.at_once.append(sum(sizes))
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["lr"] = 0.1 / group["step"]
        super().step()


def weights_after_steps(most: int | None) -> tuple[list[torch.Tensor], ...]:
    """Return weights after three steps, the groups' counts, and the elements stepped at once."""
    random = torch.Generator().manual_seed(1)
    weights = [torch.randn(size, generator=random).requires_grad_() for size in (3, 5, 9, 1, 2)]
    groups = [{"params": weights[:4], "weight_decay": 0.5}, {"params": weights[4:]}]
    adam = CountingAdam(groups)
    adam.at_once = []
    stepping = StepsInParts(adam, most) if most else adam
    for _ in range(3):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=random)
        stepping.step()
    return weights, [group["step"] for group in adam.param_groups], adam.at_once


def test_steps_are_those_of_whole_groups():
    expected, counts, at_once = weights_after_steps(None)
    assert at_once == [20] * 3
    weights, own_counts, at_once = weights_after_steps(8)
    assert at_once == [8, 8, 2, 2] * 3 and own_counts == counts == [3, 3]
    assert all(torch.equal(own, other) for own, other in zip(weights, expected, strict=True))
