# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Let Triton's kernels choose between two configurations: imported as a process of the GPU cases
starts.

How fast a kernel is does not matter to them, and to compile and time all configurations of all
kernels takes minutes. The cheapest two fit any GPU; what else tuning does is as in training.
"""

import math

from triton.runtime.autotuner import Autotuner

CHOICES = 2

_make = Autotuner.__init__


def _cost(config) -> int:
    """Grows with the shared memory and registers that a configuration takes."""
    sizes = [value for value in config.kwargs.values() if isinstance(value, int) and value > 0]
    return math.prod(sizes) * config.num_stages * config.num_warps


def _make_with_few(self, fn, arg_names, configs, *rest, **named) -> None:
    cheapest = sorted(configs, key=_cost)[:CHOICES] if configs else configs
    _make(self, fn, arg_names, cheapest, *rest, **named)


Autotuner.__init__ = _make_with_few
