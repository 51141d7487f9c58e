# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Time the colocated schedules: three phases, the encoder in bubbles, and the usual alternative.

Three phases are compared with T = E + L(1 + (p-1)/m); bubbles with three phases, beside the time
that their plan predicts and the bound L + max(E, L(p-1)/m). The alternative encodes each microbatch
on the first stage's ranks, inside the pipeline. E is the encoder's forward and backward over a
rank's samples, and L a stage's over all microbatches, each measured alone in the same run. The
schedules take turns, step by step; ratios of two are medians over the turns. No gradients are
reduced, and the optimizer does not run.

Usage, under torchrun with the checkout on PYTHONPATH, on GPUs:
    torchrun --nproc-per-node 4 tools/bench/colocated_pipeline.py pp=4
On CPU ranks the model is tiny, and the ratios say little.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace

from examples.mimo.nemotron_vlm.options.environment import at_start

os.environ.update(at_start(["--encoder-schedule", "bubbles", "--language", *sys.argv[1:2]]))

import torch
import torch.distributed as dist
from ranks import ON_GPUS, start, take_turns
from torch import Tensor

from examples.mimo.common.layout import parse_layout
from examples.mimo.nemotron_vlm.data.sample import IMAGE
from examples.mimo.nemotron_vlm.model.model import IMAGES, build_vlm, placed
from examples.mimo.nemotron_vlm.model.presets import PRESETS, VLMPreset, nano_vl_30b_a3b, tiny
from examples.mimo.nemotron_vlm.options.arguments import parse
from megatron.core.models.mimo.bridge.batch_plan import BatchPlan
from megatron.core.models.mimo.bridge.plan import AtomRows
from megatron.core.models.mimo.colocated_schedule import colocated_forward_backward
from megatron.core.models.mimo.config.encoder_schedule import EncoderSchedule
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.models.mimo.forward.encoding import encode
from megatron.core.models.mimo.schedule.bubble_plan import Costs, bubble_plan
from megatron.core.models.mimo.schedule.encoder_work import prepare_bubbles
from megatron.core.models.mimo.setup.module_groups import make_modules, prepare_process
from megatron.core.models.mimo.setup.teardown import destroy
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

ALONE_TURNS, TURNS = 3, 10
SAMPLES, MICROBATCHES = 2, 2
"""Samples of a microbatch, and microbatches of a stage."""
SEQ_LENGTH = 4096 if ON_GPUS else 32
WORD = 20
"""The token that is no image."""


def preset() -> VLMPreset:
    """Return sizes of ViT-H's width and a dense language model; on CPUs the tiny ones."""
    if not ON_GPUS:
        return tiny()
    published = nano_vl_30b_a3b()
    language = replace(
        published.language,
        hybrid_layer_pattern="*-" * 8,
        num_query_groups=8,
        num_experts=8,
        moe_router_topk=2,
        moe_ffn_hidden_size=10752,
        moe_shared_expert_intermediate_size=1,
        vocab_size=1024,
    )
    encoder = replace(published.images, layers=16, max_tile=512, projector_ffn=10752)
    return replace(published, encoders=(encoder,), language=language)


class Bench:
    """The model of one layout on this rank, one batch, and the schedules to run.

    Args:
        language: the language model's layout, as in the training program; the encoder's DP is all
            ranks.
        tiles: tiles of a sample.
    """

    def __init__(self, language: str, tiles: int) -> None:

        world, wanted = dist.get_world_size(), parse_layout(language, "language")
        dp = world // (wanted.tp * wanted.cp * wanted.pp)
        self.microbatches = MICROBATCHES * wanted.pp
        samples = SAMPLES * dp * self.microbatches
        PRESETS["bench"] = preset
        line = f"--model bench --encoder dp={world} --language {language} --transformer-impl local "
        line += f"--global-batch-size {samples} --micro-batch-size {SAMPLES} "
        line += f"--seq-length {SEQ_LENGTH} --device "
        line += "cuda --bf16 --no-gradient-accumulation-fusion" if ON_GPUS else "cpu"
        options = parse(line.split(), world)
        self.layouts = options.layouts
        self.modules = make_modules(placed(self.layouts), "nccl")
        prepare_process(self.modules, options.args)
        (model,) = build_vlm(options.args, options.preset, options.configs, self.modules)
        self.model = model.cuda().train()
        for parameter in self.model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        # The schedules set it, but stage_alone runs before them.
        MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1, device="cuda"))
        self.groups = self.modules[LANGUAGE].groups
        self.dtype, encoder = next(self.model.parameters()).dtype, preset().images
        shape = samples // world * tiles, 3, encoder.tile, encoder.tile
        self.tiles = (255 * torch.rand(shape, device="cuda")).to(self.dtype)
        self.tiles_of_microbatch = SAMPLES * tiles
        ids = torch.full((SAMPLES, SEQ_LENGTH), WORD, device="cuda")
        ids[:, : tiles * encoder.tokens_per_tile] = IMAGE
        self.rows = int((ids == IMAGE).sum())
        self.tokens = {
            "input_ids": ids,
            "labels": torch.full_like(ids, WORD),
            "loss_mask": torch.ones(ids.shape, device="cuda"),
            "position_ids": torch.arange(SEQ_LENGTH, device="cuda").expand_as(ids),
        }
        if wanted.cp == 1:  # with CP, microbatches would have to tell who owns which row
            prepare_bubbles([self.model])

    def encoder_alone(self) -> None:
        """Run E: the encoder's forward and backward over this rank's samples."""
        (rows,) = self._encoded(self.tiles).values()
        rows.backward(torch.ones_like(rows))

    def _encoded(self, tiles: Tensor) -> dict[str, Tensor]:

        return encode(self.model, [_inputs(tiles)])

    def stage_alone(self) -> None:
        """Run L: this rank's stage over all microbatches, without waiting for other stages."""
        lay, hidden = self.layouts.language, preset().language.hidden_size
        split = lay.cp * (lay.tp if lay.sequence_parallel else 1)
        for _ in range(self.microbatches):
            received = self._leaf(SEQ_LENGTH // split, SAMPLES, hidden)
            self.model.set_input_tensor([received])
            rows = {IMAGES: self._leaf(self.rows, hidden)}
            output, _ = self.model(**self.tokens, encoder_embeddings=rows)
            output.backward(torch.ones_like(output))

    def _leaf(self, *shape: int) -> Tensor:
        return torch.ones(shape, device="cuda", dtype=self.dtype, requires_grad=True)

    def three_phases(self) -> None:
        """Run the schedule in three phases."""
        self._colocated()

    def bubbles(self, share: float) -> None:
        """Run the encoder where the pipeline's stages would wait, one microbatch at a time."""
        self._colocated(in_bubbles=True, share=share)

    def _colocated(self, **schedule: object) -> None:

        self.model.mimo_config.encoder_schedule = EncoderSchedule(**schedule)
        parts = self.tiles.tensor_split(self.microbatches)
        plan = self._plan(len(parts[0]))
        batches = [
            self.tokens | plan | {"modality_inputs": _inputs(tiles) if len(tiles) else None}
            for tiles in parts
        ]
        self._run(colocated_forward_backward, batches, self._forward_step)

    def _plan(self, tiles: int) -> dict[str, object]:
        """Return a microbatch's plan for the bridge, ``tiles`` encoded here; empty with CP."""

        if self.layouts.language.cp > 1:
            return {}
        rows = tiles * preset().images.tokens_per_tile
        atoms = self.layouts.encoder.dp // self.layouts.language.dp
        encoded, consumed = AtomRows([rows]), AtomRows([rows] * atoms)
        return {"batch_plan": BatchPlan({IMAGES: encoded}, {IMAGES: consumed})}

    def encoder_in_first_stage(self) -> None:
        """Run the usual alternative: the first stage's ranks encode the images that they read."""

        communicator = P2PCommunicator(self.groups.pp, self.model.config)
        schedule = schedules.forward_backward_pipelining_without_interleaving
        batches = [dict(self.tokens) for _ in range(self.microbatches)]
        more = {"p2p_communicator": communicator}
        self._run(schedule, batches, self._encoding_forward_step, **more)

    def _run(self, schedule: Callable, batches: list[dict], step: Callable, **more) -> None:
        schedule(
            forward_step_func=step,
            data_iterator=iter(batches),
            model=self.model,
            num_microbatches=self.microbatches,
            seq_length=SEQ_LENGTH,
            micro_batch_size=SAMPLES,
            pg_collection=self.groups,
            forward_only=False,
            **more,
        )

    def _encoding_forward_step(self, batches, model):
        microbatch = next(batches)
        if self.groups.pp.rank() == 0:
            again = -(-self.tiles_of_microbatch // len(self.tiles))
            tiles = self.tiles.repeat(again, 1, 1, 1)[: self.tiles_of_microbatch]
            microbatch["encoder_embeddings"] = self._encoded(tiles)
        return self._forward_step(iter([microbatch]), model)

    def _forward_step(self, batches, model):
        output, loss_mask = model(**next(batches))
        return output, lambda out: (out.float().sum(), loss_mask.sum().int(), {})

    def seconds(self, runs: list[Callable[[], None]], turns: int) -> list[list[float]]:
        """Return each run's seconds in every turn."""

        def cleared(run: Callable[[], None]) -> Callable[[], None]:
            return lambda: (self.model.zero_grad(set_to_none=True), run())

        return take_turns([cleared(run) for run in runs], turns)


def _inputs(tiles: Tensor) -> dict[str, dict]:
    return {IMAGES: {"radio": {"tiles": tiles}}}


def measure(bench: Bench, language: str) -> None:
    """Print a layout's row of the table."""

    e, length = map(min, bench.seconds([bench.encoder_alone, bench.stage_alone], ALONE_TURNS))
    stages, number = bench.layouts.language.pp, bench.microbatches
    wait, share = length * (stages - 1) / number, e / (e + length)
    model, bound = e + length + wait, length + max(e, wait)
    runs = [bench.three_phases, bench.encoder_in_first_stage]
    if bench.layouts.language.cp == 1:
        runs.append(lambda: bench.bubbles(share))
    step, *others = bench.seconds(runs, TURNS)
    ratios = [
        f"{statistics.median(a / b for a, b in zip(other, step, strict=True)):.3f}"
        for other in others
    ]
    # The plan's unit is a stage's forward of a microbatch.
    plan = bubble_plan(stages, number, 1, costs=Costs.of_share(share))
    planned = plan.seconds * length / (3 * number)
    if dist.get_rank() == 0:
        print(
            f"| {language} | {number} | {1e3 * e:.1f} | {1e3 * length:.1f} "
            f"| {1e3 * statistics.median(step):.1f} | {statistics.median(step) / model:.3f} "
            f"| {' | '.join([*ratios, '–'][:2])} | {planned / model:.3f} | {bound / model:.3f} |",
            flush=True,
        )


def main() -> None:
    """Print the table of a layout."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("language", nargs="?", default="pp=2", help="layout of the language model")
    parser.add_argument("--tiles", type=int, default=4 if ON_GPUS else 2, help="of a sample")
    args = parser.parse_args()
    start()
    if dist.get_rank() == 0:
        print(
            "| language | microbatches | E, ms | L, ms | step, ms | step / T | "
            "encoder in first stage / step | in bubbles / step | planned / T | bound / T |\n"
            "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
        )
    bench = Bench(args.language, args.tiles)
    measure(bench, args.language)
    destroy([bench.model], bench.modules)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
