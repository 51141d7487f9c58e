# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Shares of a GPU's time, from the events of a profiler's trace."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.trace_shares import covered, shares


def event(name: str, first: float, end: float, category: str = "kernel") -> dict:
    return {"ph": "X", "name": name, "cat": category, "ts": first, "dur": end - first}


STEPS = [
    event("ProfilerStep#10", 0, 60, "user_annotation"),
    event("ProfilerStep#11", 60, 100, "user_annotation"),
]


def test_communication_is_exposed_where_nothing_else_runs():
    found = shares(
        [
            *STEPS,
            event("gemm", 10, 40),
            event("gemm", 30, 50),
            event("ncclDevKernel_AllReduce", 40, 70),
            event("Memcpy HtoD", 80, 90, "gpu_memcpy"),
            event("mimo bridge", 40, 45, "gpu_user_annotation"),
            event("Optimizer.step#Adam.step", 78, 90, "gpu_user_annotation"),
            {"ph": "i", "name": "an instant", "ts": 3},
        ]
    )
    kernels = {"gemm": 0.5, "ncclDevKernel_AllReduce": 0.3, "Memcpy HtoD": 0.1}
    wanted = {"total": 100, "idle": 0.3, "exposed": 0.2, "bridge": 0.05, "optimizer": 0.12}
    assert found.pop("kernels") == kernels
    assert found.pop("gaps") == {"gemm": 0.1, "Memcpy HtoD": 0.1}
    assert found == pytest.approx(wanted)


def test_a_trace_without_a_gpu_has_none():
    assert shares([*STEPS, event("aten::mm", 10, 40, "cpu_op")]) == {}


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted), max_size=8))
def test_every_moment_inside_counts_once(intervals):
    moments = {m for first, end in intervals for m in range(first, end) if 5 <= m < 25}
    assert covered(intervals, (5, 25)) == len(moments)
