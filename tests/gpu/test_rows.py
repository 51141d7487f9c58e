# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The rows of GPUs: the program with production layers over NCCL has one GPU's losses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.mimo.nemotron_vlm.loop.metrics import read_metrics
from tests.unit_tests.examples.nemotron_vlm.energon.digits_data import shared_digits
from tests.unit_tests.examples.nemotron_vlm.loop.models import MODELS, ON_GPUS
from tests.unit_tests.examples.nemotron_vlm.loop.rows import Row
from tests.unit_tests.examples.nemotron_vlm.loop.rows_on_gpus import (
    AHEAD,
    ON_ONE_GPU,
    ON_TWO_GPUS,
)
from tests.unit_tests.examples.nemotron_vlm.loop.trajectories import (
    MICROBATCHES,
    check,
    is_of_this_process,
    judged,
    reference_of,
    tolerance,
)
from tests.unit_tests.examples.nemotron_vlm.runs import DEVICE, SHORT_RUN
from tests.unit_tests.test_utilities import requires_world_size

REFERENCES = [Row(1, name) for name in ON_GPUS if name != "shards"]
REFERENCES += dict.fromkeys(
    Row(1, row.model, common=row.common) for row in ON_TWO_GPUS if row.common
)
"""The runs that others are compared with; a stage of two GPUs starts a process for each that is not
there yet."""

RESUMED = [row for row in ON_TWO_GPUS if row.then]


def each(rows: list[Row], is_16_bit: bool = False) -> pytest.MarkDecorator:
    """Run a test with each of the rows in 32 bits, or in 16."""
    chosen = [row for row in rows if MODELS[row.model].is_16_bit == is_16_bit]
    return pytest.mark.parametrize("row", chosen, ids=str)


@pytest.fixture(scope="module")
def digits():
    """Digits in shards, once a row asks for them."""
    with shared_digits(samples=240) as made:
        yield made


@requires_world_size(1)
@each(REFERENCES)
def test_one_gpu_is_recorded(row, record_property):
    record(row, record_property)


def record(row: Row, record_property) -> None:
    """Carry out the run that others are compared with; in 16 bits three, whose spread is noted."""
    model = MODELS[row.model]
    reference_of(model, (*model.options, *row.common))
    record_property("allowed", tolerance(model))


@requires_world_size(1)
@pytest.mark.parametrize("name", ["packed local", "gated delta nets"])
def test_one_gpu_is_as_a_cpu(name, record_property, tmp_path):
    """All other runs are compared with a GPU's own: what is wrong on every GPU shows here alone."""
    model = MODELS[name]

    def compare(*_) -> dict[str, object]:
        options = *model.options, *model.batch(MICROBATCHES[0], 1)
        return judged(model, on_a_cpu(options, tmp_path), reference_of(model, model.options))

    check(Row(1, name), record_property, compare=compare)


def on_a_cpu(options: tuple[str, ...], folder: Path) -> list[dict]:
    """Run the program on a CPU, as a user starts it, and return its records."""
    metrics = folder / "metrics.jsonl"
    search = os.environ["PYTHONPATH"].split(os.pathsep)
    environment = {key: text for key, text in os.environ.items() if not is_of_this_process(key)}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in search if Path(p).name != "untuned")
    line = ["--device", "cpu", *SHORT_RUN[len(DEVICE) :], *options, "--metrics-out", str(metrics)]
    subprocess.run(
        [sys.executable, "examples/mimo/pretrain_nemotron_vlm.py", *line],
        cwd=os.environ["CHECKOUT"],
        env=environment,
        check=True,
    )
    return read_metrics(metrics)


@requires_world_size(1)
@each(ON_ONE_GPU)
def test_one_gpu(row, record_property, shared_path):
    check(row, record_property, saved=shared_path)


@requires_world_size(2)
@each([row for row in ON_TWO_GPUS if row not in RESUMED])
def test_two_gpus(row, record_property):
    check(row, record_property)


class TestResumed:
    """Rows that go on from a checkpoint, which a stage takes alone."""

    @requires_world_size(2)
    @each(RESUMED)
    def test_two_gpus(self, row, request, record_property, shared_path):
        shards = request.getfixturevalue("digits") if row.model == "shards" else None
        check(row, record_property, shards, shared_path)


class TestIn16Bits:
    """Rows in 16 bits, which stages take alone."""

    @requires_world_size(1)
    @each(REFERENCES, is_16_bit=True)
    def test_one_gpu_is_recorded(self, row, record_property):
        record(row, record_property)

    @requires_world_size(1)
    @each(ON_ONE_GPU, is_16_bit=True)
    def test_one_gpu(self, row, record_property):
        check(row, record_property)

    @requires_world_size(2)
    @each(ON_TWO_GPUS, is_16_bit=True)
    def test_two_gpus(self, row, record_property):
        check(row, record_property)


@requires_world_size(2)
@pytest.mark.parametrize("row", AHEAD, ids=str)
def test_two_gpus_run_ahead(row, record_property):
    """Graphs, with and without a pipeline, with the environment that the program gives them."""
    check(row, record_property)
