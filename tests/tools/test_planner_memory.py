# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The planner's memory, against models on the meta device, Megatron's buffers and a real run."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import mini  # noqa: F401  (makes tools importable)

pytest.importorskip("megatron.core.models.mimo.comm", reason="needs the applied checkout")

from calibration import measure  # noqa: E402
from calibration.measure import options_of  # noqa: E402
from examples.mimo.common.layout import Layout  # noqa: E402
from examples.mimo.nemotron_vlm.loop.dry_run import count_by_module, stages_on_meta  # noqa: E402
from examples.mimo.nemotron_vlm.options.arguments import parse  # noqa: E402
from examples.mimo.nemotron_vlm.planner.machine import find_machine  # noqa: E402
from examples.mimo.nemotron_vlm.planner.memory import memory_of, most_in_flight, peak  # noqa: E402
from examples.mimo.nemotron_vlm.planner.parameters import Sizes, stages_of  # noqa: E402
from examples.mimo.nemotron_vlm.planner.plan import plan_of  # noqa: E402
from megatron.core import cpu_runtime  # noqa: E402
from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402

TOLERANCE = 0.1
"""Relative tolerance of peak memory: the memory that layers need only briefly is estimated."""


class TestParameters:
    @pytest.mark.parametrize(
        "model, world, encoder, language, placement, rank",
        [
            ("nano-vl-30b-a3b", 64, "tp=8", "tp=2,pp=4,ep=8,etp=1", "colocated", 63),
            ("nano-vl-30b-a3b-gdn", 4096, "tp=4", "tp=2,cp=4,pp=4,ep=16", "colocated", 1500),
            ("tiny-gdn", 8, "tp=2,pp=2", "tp=2,pp=2,ep=2,etp=1", "non-colocated", 7),
            ("tiny", 8, "tp=2", "pp=2,vpp=2,ep=4", "colocated", 0),
        ],
    )
    def test_are_those_of_the_model_on_the_meta_device(
        self, model, world, encoder, language, placement, rank, monkeypatch
    ):
        monkeypatch.setenv("WORLD_SIZE", str(world))
        cpu_runtime.install()
        layouts = ["--encoder", encoder, "--language", language, "--placement", placement]
        batch = ["--global-batch-size", str(2 * world), "--micro-batch-size", "1"]
        options = parse(["--model", model, *layouts, *batch], world)
        with stages_on_meta(options, rank) as stages:
            counted = count_by_module(stages)
        lay = options.layouts
        stage = rank // (lay.language.size // lay.language.pp)
        if lay.non_colocated:
            inside = (rank - lay.language_offset) // (lay.language.size // lay.language.pp)
            stage = lay.encoder.pp + inside
        assert stages_of(options.preset, lay)[stage].by_module == counted

    @pytest.mark.parametrize("replicas", [1, 3, 8])
    def test_are_padded_as_in_megatrons_buffers(self, replicas):
        sizes = [1, 63, 64, 65, 1000, 4096]
        with torch.device("meta"):
            parameters = [torch.nn.Parameter(torch.empty(size)) for size in sizes]
        buffer = DistributedOptimizer._compute_per_buffer_param_layout(
            parameters, None, replicas, DistributedDataParallelConfig()
        )
        from examples.mimo.nemotron_vlm.planner.memory import padded

        assert padded(Sizes.of(sizes).aligned, replicas) == buffer.bucket_indices[-1][1]


class TestActivations:
    @pytest.mark.parametrize(
        "stage, pp, vpp, microbatches, most",
        [(0, 4, 1, 8, 4), (3, 4, 1, 8, 1), (0, 4, 1, 2, 2), (0, 1, 1, 8, 1), (0, 2, 2, 8, 5)],
    )
    def test_of_a_pipeline_are_of_the_microbatches_in_flight(
        self, stage, pp, vpp, microbatches, most
    ):
        """With virtual stages they are the warm-up's 2·(pp - 1) + (vpp - 1)·pp, and one more."""
        layout = Layout(dp=1, etp=1, pp=pp, vpp=vpp)
        assert most_in_flight(stage, layout, microbatches, (1.0,) * vpp) == most

    def test_and_all_the_rest_are_what_a_run_on_one_rank_has(self, tmp_path, monkeypatch):
        model = "--model tiny-gdn --seq-length 128 --global-batch-size 4 --micro-batch-size"
        full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        encoder = "--encoder-macro-batch 4 --recompute-encoder 1"
        cases = [f"{model} 4", f"{model} 2 {full}", f"{model} 1 {encoder}"]
        listed, found = tmp_path / "cases.json", tmp_path / "found.json"
        listed.write_text(json.dumps([case.split() for case in cases]))
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        alone |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
        for name, value in alone.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(measure, "STEPS", 4)
        measure.main(str(listed), str(found))
        cpu = replace(find_machine("h200"), precision=4, fused=False, reserved_bytes=0.0)
        for case, (rank,) in zip(cases, json.loads(found.read_text()), strict=True):
            predicted = peak(memory_of(plan_of(options_of(case.split(), 1)), cpu))
            assert predicted == pytest.approx(rank["peak_bytes"], rel=TOLERANCE), case
