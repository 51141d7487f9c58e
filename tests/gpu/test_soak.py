# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Some hundred steps: memory, files, threads and the time of a step stay as they are."""

import statistics
import time

import psutil
import torch

from tests.unit_tests.examples.nemotron_vlm.loop.models import ENGINE
from tests.unit_tests.examples.nemotron_vlm.runs import trainer
from tests.unit_tests.test_utilities import requires_world_size

STEPS = 300
WARM = 60
"""Steps before the first reading: caches and pools have filled."""

EVERY = 20
"""Steps between readings."""

GROWTH = {"device": 0.02, "reserved": 0.05, "pinned": 0.0, "host": 0.03, "step time": 0.5}
"""Most relative growth from first to last reading; step times are medians, on a shared machine."""


def reading(times: list[float]) -> dict[str, float]:
    process = psutil.Process()
    return {
        "device": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "pinned": torch.cuda.host_memory_stats()["allocated_bytes.current"],
        "host": process.memory_info().rss,
        "files": process.num_fds(),
        "threads": process.num_threads(),
        "step time": statistics.median(times[-EVERY:]),
    }


@requires_world_size(1)
def test_nothing_grows(record_property):
    options = (*ENGINE, "--bf16", "--num-workers", "2", "--micro-batch-size", "8")
    readings, times = [], []
    with trainer(*options, "--train-iters", str(STEPS)) as run:
        for step in range(1, STEPS + 1):
            started = time.perf_counter()
            run.train_step()
            times.append(time.perf_counter() - started)
            if step >= WARM and step % EVERY == 0:
                readings.append(reading(times))
    first, last = readings[0], readings[-1]
    record_property("first", first)
    record_property("last", last)
    assert last["files"] <= first["files"] and last["threads"] <= first["threads"]
    for name, growth in GROWTH.items():
        assert last[name] <= first[name] * (1 + growth), f"{name}: {[r[name] for r in readings]}"
