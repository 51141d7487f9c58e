# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Step an optimizer whose state has 16 or 8 bits some parameters at a time.

Transformer Engine's FusedAdam makes fp32 copies of such state for all parameters of a group before
it steps the first: of two 16-bit moments 8 bytes a parameter, more than fp32 moments would add.
"""

from collections.abc import Iterator

import torch

from megatron.core.optimizer.optimizer import MegatronOptimizer

MOST = 2**27
"""Elements of a part: 1 GiB of copies of two moments."""


def step_in_parts(leaf: MegatronOptimizer, most: int = MOST) -> None:
    """Let an optimizer step parts of each group one after the other, if its state is not all fp32.

    A part has at most so many elements, or one parameter. All parts of a group have the group's
    settings and number of steps.
    """
    config, inner = leaf.config, leaf.optimizer
    types = {config.main_params_dtype, config.exp_avg_dtype, config.exp_avg_sq_dtype}
    if types == {torch.float32} or config.optimizer_cpu_offload:
        return
    step_all = inner.step

    def step() -> None:
        groups = inner.param_groups
        try:
            for group in groups:
                part = group
                for parameters in _parts(group["params"], most):
                    part = {**group, "params": parameters}
                    inner.param_groups = [part]
                    step_all()
                group |= {**part, "params": group["params"]}
        finally:
            inner.param_groups = groups

    inner.step = step


def _parts(parameters: list[torch.Tensor], most: int) -> Iterator[list[torch.Tensor]]:
    part, size = [], 0
    for parameter in parameters:
        if part and size + parameter.numel() > most:
            yield part
            part, size = [], 0
        part.append(parameter)
        size += parameter.numel()
    if part:
        yield part
