# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Print the overhead of the CPU runtime: ns per call without it and with it, in one run.

Usage, with the checkout on PYTHONPATH: python tools/bench/cpu_runtime_overhead.py
"""

import time
import timeit
import warnings
from collections.abc import Callable

import torch

ROUNDS, CALLS = 15, 4000


def cases() -> dict[str, Callable[[], object]]:
    """Return the calls to time: ops that the runtime leaves alone, then ops that it wraps."""
    x = torch.ones(4)
    double = torch.float64
    return {
        "x + x": lambda: x + x,
        "torch.relu(x)": lambda: torch.relu(x),
        "torch.empty(4)": lambda: torch.empty(4),
        "torch.empty(4, device='cpu')": lambda: torch.empty(4, device="cpu"),
        "torch.zeros_like(x)": lambda: torch.zeros_like(x),
        "torch.tensor(1.0)": lambda: torch.tensor(1.0),
        "x.new_empty(4)": lambda: x.new_empty(4),
        "x.to(torch.float64)": lambda: x.to(double),
        "x.to('cpu')": lambda: x.to("cpu"),
        "x.type()": lambda: x.type(),
    }


def nanoseconds(call: Callable[[], object]) -> float:
    """Return this thread's CPU time per call in the fastest, least disturbed of `ROUNDS` rounds."""
    rounds = timeit.repeat(call, timer=time.thread_time, number=CALLS, repeat=ROUNDS)
    return min(rounds) / CALLS * 1e9


def main() -> None:
    """Time all cases before and after installing the runtime, with the same callables."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    calls = cases()
    before = {name: nanoseconds(call) for name, call in calls.items()}

    from megatron.core.cpu_runtime import install

    install()
    after = {name: nanoseconds(call) for name, call in calls.items()}
    print("| call | without (ns) | with (ns) | added (ns) | ratio |\n|---|---:|---:|---:|---:|")
    for (name, base), now in zip(before.items(), after.values(), strict=True):
        print(f"| `{name}` | {base:.0f} | {now:.0f} | {now - base:+.0f} | {now / base:.2f} |")


if __name__ == "__main__":
    main()
