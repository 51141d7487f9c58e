# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""One rank's model, batch and schedules of tools/bench/colocated_pipeline.py."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist
from sleeping import Sleeper
from timeline import CUDA, Recorder, Span

from examples.mimo.common.layout import parse_layout
from examples.mimo.nemotron_vlm.data.sample import IMAGE, IMAGES
from examples.mimo.nemotron_vlm.model.model import build_vlm
from examples.mimo.nemotron_vlm.model.presets import PRESETS, VLMPreset, nano_vl_30b_a3b, tiny
from examples.mimo.nemotron_vlm.options.arguments import parse
from megatron.core.models.mimo import colocated_schedule
from megatron.core.models.mimo.bridge.batch_plan import BatchPlan
from megatron.core.models.mimo.bridge.plan import AtomRows
from megatron.core.models.mimo.config.encoder_schedule import EncoderSchedule
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.models.mimo.forward import macro_batches
from megatron.core.models.mimo.forward.encoding import encode
from megatron.core.models.mimo.forward.macro_batches import MacroBatch
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.schedule.encoder_in_bubbles import EncoderInBubbles, prepare_bubbles
from megatron.core.models.mimo.setup.module_groups import make_modules, prepare_process
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.utils import unwrap_model


def preset() -> VLMPreset:
    """Return sizes of ViT-H's width and a dense language model; on CPUs the tiny ones."""
    if not CUDA:
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
        device: this rank's device.
        args: the command line's arguments.
    """

    def __init__(self, language: str, device: torch.device, args: argparse.Namespace) -> None:
        world, wanted = dist.get_world_size(), parse_layout(language, "language")
        self.device, self.tiles = device, args.tiles
        micro, length = args.samples, 4096 if CUDA else 32
        dp = world // (wanted.tp * wanted.cp * wanted.pp)
        self.microbatches = args.microbatches_a_stage * wanted.pp
        samples = micro * dp * self.microbatches
        PRESETS["bench"] = preset
        options = parse(
            [
                *("--model", "bench", "--device", "cuda" if CUDA else "cpu"),
                *("--encoder", f"dp={world}", "--language", language),
                *("--global-batch-size", str(samples), "--micro-batch-size", str(micro)),
                *("--seq-length", str(length), "--transformer-impl", "local"),
                *(("--bf16", "--no-gradient-accumulation-fusion") if CUDA else ()),
            ],
            world,
        )
        self.layouts = options.layouts
        places = {IMAGES: (self.layouts.encoder, 0), LANGUAGE: (self.layouts.language, 0)}
        self.modules = make_modules(places, "nccl" if CUDA else "gloo")
        prepare_process(self.modules, options.args)
        stages = build_vlm(options.args, options.preset, options.configs, self.modules)
        self.model: MimoModel = stages[0].to(self.device).train()
        for parameter in self.model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        # The schedules set it, but stage_alone runs before them.
        MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1, device=self.device))
        self.groups = self.modules[LANGUAGE].groups
        self.inputs = self._inputs(samples // world)
        self.tokens = self._tokens()
        self.recorder: Recorder | None = None
        self.sleeper, self.sleep_s = Sleeper(), args.sleep / 1e3
        # Sleep for a tile: divided by the tiles of a microbatch on each rank.
        self.tile_sleep_s = self.sleep_s * args.share / (1 - args.share)
        self.tile_sleep_s /= micro * dp * self.tiles / world
        if wanted.cp == 1:  # with CP, microbatches would have to tell who owns which row
            prepare_bubbles([self.model])

    def _inputs(self, samples: int) -> dict[str, object]:
        size = preset().images.tile
        tiles = 255 * torch.rand(samples * self.tiles, 3, size, size, device=self.device)
        return {IMAGES: {"radio": {"tiles": tiles.to(next(self.model.parameters()).dtype)}}}

    def _tokens(self) -> dict[str, torch.Tensor]:
        batch = self.layouts.batch
        ids = torch.full((batch.micro_size, batch.seq_length), 20, device=self.device)
        ids[:, : self.tiles * preset().images.tokens_per_tile] = IMAGE
        return {
            "input_ids": ids,
            "labels": torch.full_like(ids, 20),
            "loss_mask": torch.ones(ids.shape, device=self.device),
            "position_ids": torch.arange(batch.seq_length, device=self.device).expand_as(ids),
        }

    def encoder_alone(self) -> None:
        """Run E: the encoder's forward and backward over this rank's samples."""
        rows = self._encode(self.model, [self.inputs])[IMAGES]
        rows.backward(torch.ones_like(rows))

    def stage_alone(self) -> None:
        """Run L: this rank's stage over all microbatches, without waiting for other stages."""
        shape = self._hidden_shape()
        dtype = next(self.model.parameters()).dtype
        for _ in range(self.microbatches):
            with self.sleeper.lasting(3 * self.sleep_s):
                self.model.set_input_tensor(
                    [torch.ones(shape, device=self.device, dtype=dtype, requires_grad=True)]
                )
                output, _ = self.model(**self.tokens, encoder_embeddings=self._leaf_embeddings())
                output.backward(torch.ones_like(output))

    def _hidden_shape(self) -> tuple[int, ...]:
        lay, batch = self.layouts.language, self.layouts.batch
        split = lay.cp * (lay.tp if lay.sequence_parallel else 1)
        return batch.seq_length // split, batch.micro_size, preset().language.hidden_size

    def _leaf_embeddings(self) -> dict[str, torch.Tensor]:
        dtype = next(self.model.parameters()).dtype
        rows = int((self.tokens["input_ids"] == IMAGE).sum())
        shape = rows, preset().language.hidden_size
        return {IMAGES: torch.ones(shape, device=self.device, dtype=dtype, requires_grad=True)}

    def three_phases(self) -> None:
        """Run the schedule in three phases."""
        self.model.mimo_config.encoder_schedule = EncoderSchedule()
        self._colocated()

    def bubbles(self, share: float) -> None:
        """Run the encoder where the pipeline's stages would wait, one microbatch at a time."""
        self.model.mimo_config.encoder_schedule = EncoderSchedule(in_bubbles=True, share=share)
        self._colocated()

    def _colocated(self) -> None:
        share = self.inputs[IMAGES]["radio"]["tiles"].tensor_split(self.microbatches)
        inputs = [{IMAGES: {"radio": {"tiles": tiles}}} if len(tiles) else None for tiles in share]
        plan = self._plan(len(share[0]))
        colocated_schedule.colocated_forward_backward(
            data_iterator=iter([self.tokens | plan | {"modality_inputs": i} for i in inputs]),
            forward_step_func=self._forward_step,
            model=self.model,
            **self._common(),
        )

    def _plan(self, tiles: int) -> dict[str, BatchPlan]:
        """Return a microbatch's plan for the bridge, ``tiles`` encoded here; empty with CP."""
        if self.layouts.language.cp > 1:
            return {}
        rows = tiles * preset().images.tokens_per_tile
        atoms = self.layouts.encoder.dp // self.layouts.language.dp
        encoded, consumed = AtomRows([rows]), AtomRows([rows] * atoms)
        return {"batch_plan": BatchPlan({IMAGES: encoded}, {IMAGES: consumed})}

    def encoder_in_first_stage(self) -> None:
        """Run the usual alternative: the first stage's ranks encode the images that they read."""
        schedules.forward_backward_pipelining_without_interleaving(
            data_iterator=iter([dict(self.tokens) for _ in range(self.microbatches)]),
            forward_step_func=self._encoding_forward_step,
            model=[self.model],
            p2p_communicator=P2PCommunicator(self.groups.pp, self.model.config),
            **self._common(),
        )

    def _common(self) -> dict[str, object]:
        return {
            "num_microbatches": self.microbatches,
            "seq_length": self.layouts.batch.seq_length,
            "micro_batch_size": self.layouts.batch.micro_size,
            "pg_collection": self.groups,
            "forward_only": False,
        }

    def _encoding_forward_step(self, batches, model):
        microbatch = dict(next(batches))
        if model.role.is_first_stage(LANGUAGE):
            samples = self.layouts.batch.micro_size
            tiles = self.inputs[IMAGES]["radio"]["tiles"]
            inputs = {IMAGES: {"radio": {"tiles": _repeated(tiles, samples * self.tiles)}}}
            microbatch["encoder_embeddings"] = self._encode(model, [inputs])
        return self._forward_step(iter([microbatch]), model)

    def _forward_step(self, batches, model):
        microbatch = next(batches)
        with self._span("language forward"), self.sleeper.lasting(self.sleep_s):
            output, loss_mask = model(**microbatch)
        return output, lambda out: (out.float().sum(), loss_mask.sum().int(), {})

    def _span(self, name: str):
        return self.recorder.span(name) if self.recorder else contextlib.nullcontext()

    def _watched(self, rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Record when the rows' gradient arrives, which begins the encoder's backward."""
        for tensor in rows.values():
            if self.recorder and tensor.requires_grad:
                tensor.register_hook(lambda _: setattr(self, "begin", self.recorder.now()))
        return rows

    def spans(self, run: Callable[[], None]) -> list[list[Span]]:
        """Run a schedule once more, and return every rank's spans."""
        self.recorder, self.begin = Recorder(), None
        run()
        self._end_encoder_backward()
        by_rank = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, self.recorder.spans())
        self.recorder = None
        return by_rank

    def _end_encoder_backward(self) -> None:
        if self.recorder and self.begin is not None:
            self.recorder.add("encoder backward", self.begin)
            self.begin = None

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Make the schedules' operations sleep inside the block, and record them if asked to."""
        backward_step, receive = schedules.backward_step, MacroBatch.receive
        piece = EncoderInBubbles._backward

        def backward(*args, **kwargs):
            begin = self.recorder and self.recorder.now()
            with self.sleeper.lasting(2 * self.sleep_s):
                result = backward_step(*args, **kwargs)
            if self.recorder:
                self.recorder.add("language backward", begin, end=self.begin)
                self._end_encoder_backward()
            return result

        def exchange(*args, **kwargs):
            with self._span("bridge"):
                return receive(*args, **kwargs)

        def backward_piece(*args):
            piece(*args)
            self._end_encoder_backward()

        with (
            mock.patch.object(schedules, "backward_step", backward),
            mock.patch.object(macro_batches, "encode", self._encode),
            mock.patch.object(MacroBatch, "receive", exchange),
            mock.patch.object(EncoderInBubbles, "_backward", backward_piece),
        ):
            yield

    def _encode(self, model, shares, recompute=None) -> dict[str, torch.Tensor]:
        """Run the encoder; with sleeping operations, as long as its tiles take."""
        tiles = sum(len(share[IMAGES]["radio"]["tiles"]) for share in shares if share)
        seconds = self.tile_sleep_s * tiles
        with self._span("encoder forward"), self.sleeper.lasting(seconds):
            rows = self._watched(encode(model, shares, recompute))
        if seconds:
            rows[IMAGES].register_hook(lambda _: self.sleeper.sleep(2 * seconds))
        return rows

    def destroy(self) -> None:
        """Destroy the process groups."""
        dist.barrier()
        unwrap_model(self.model).destroy()
        for module in self.modules.values():
            module.grid.destroy()


def _repeated(tiles: torch.Tensor, count: int) -> torch.Tensor:
    return tiles[torch.arange(count, device=tiles.device) % len(tiles)]
