# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Give Triton's kernels their cheapest configuration, and let ranks share a GPU. Processes of the
GPU cases import this file as they start.

The speed of a kernel does not matter to these cases, and compiling and timing all configurations of
all kernels takes minutes. The cheapest one fits any GPU.

NCCL refuses two ranks on a GPU of one host. With hosts of their own they reach each other by
sockets.
"""

import math
import os

from triton.runtime.autotuner import Autotuner

_make = Autotuner.__init__


def _cost(config) -> int:
    """Return a number that grows with the shared memory and registers of a configuration."""
    sizes = [value for value in config.kwargs.values() if isinstance(value, int) and value > 0]
    return math.prod(sizes) * config.num_stages * config.num_warps


def _make_untuned(self, fn, arg_names, configs, *rest, **named) -> None:
    cheapest = [min(configs, key=_cost)] if configs else configs
    _make(self, fn, arg_names, cheapest, *rest, **named)


Autotuner.__init__ = _make_untuned

if os.environ.get("SHARED_GPU") == "1" and "RANK" in os.environ:
    os.environ |= {"LOCAL_RANK": "0", "NCCL_HOSTID": f"rank {os.environ['RANK']}"}
