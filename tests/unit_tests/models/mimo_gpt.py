# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A MimoModel small enough to read: an MLP over image patches, and a GPT with rotary positions.

Built from Megatron's own layers and from grids alone; what colocated training needs is all here.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.mimo.config.base_configs import MimoModelConfig
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.models.mimo.grad_finalization import (
    finalize_mimo_grads,
    global_token_count,
    no_grad_sync,
)
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.optimizer import get_mimo_optimizer
from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules
from megatron.core.models.vision.multimodal_projector import MultimodalProjector
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.context_parallel_attention import ContextParallelAttention
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.unit_tests.models.group_threads import free_groups
from tests.unit_tests.models.weights import local_shards, window
from tests.unit_tests.test_utilities import Utils

IMAGES, IMAGE = "images", 31
VOCAB, HIDDEN, HEADS, LAYERS = 32, 32, 8, 2
PATCHES, PIXELS = 3, 6
TOKENS = 13
"""Of a sample. No CP size divides it."""

ADAM = dict(lr=3e-3, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0)


@dataclass(frozen=True)
class Module:
    """The grid and the process groups of one module."""

    grid: HyperCommGrid
    groups: ProcessGroupCollection

    @classmethod
    def make(cls, tp: int = 1, cp: int = 1, dp: int = 1) -> Module:
        """Lay a module out over the first tp·cp·dp ranks; collective over the world."""
        grid = HyperCommGrid([tp, cp, 1, dp], ["tp", "cp", "pp", "dp"])
        return cls(grid, ProcessGroupCollection.from_hyper_comm_grid(grid))

    def config(self) -> TransformerConfig:
        """The same sizes for both modules, split as this one's groups are."""
        return TransformerConfig(
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            ffn_hidden_size=2 * HIDDEN,
            tensor_model_parallel_size=self.groups.tp.size(),
            context_parallel_size=self.groups.cp.size(),
            hidden_dropout=0.0,
            attention_dropout=0.0,
            perform_initialization=False,
            calculate_per_token_loss=True,
            gradient_accumulation_fusion=False,
        )


def build(encoder: Module, language: Module) -> MimoModel:
    """The model on this rank; its weights depend on the parameters' names only."""
    layer = get_gpt_layer_local_spec()
    layer.submodules.self_attention.submodules.core_attention = ContextParallelAttention
    patches = ModuleSpec(
        module=MultimodalProjector,
        params={
            "config": encoder.config(),
            "submodules": MLPSubmodules(
                linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear
            ),
            "projector_type": "mlp",
            "input_size": PIXELS,
            "pg_collection": encoder.groups,
        },
    )
    gpt = ModuleSpec(
        module=GPTModel,
        params={
            "config": language.config(),
            "transformer_layer_spec": layer,
            "vocab_size": VOCAB,
            "max_sequence_length": TOKENS,
            "position_embedding_type": "rope",
            "scatter_embedding_sequence_parallel": False,
            "pg_collection": language.groups,
        },
    )
    model = MimoModel(
        MimoModelConfig(
            language_model_spec=gpt,
            modality_submodules_spec={
                IMAGES: ModuleSpec(
                    module=VisionModalitySubmodules,
                    params={"pg_collection": encoder.groups},
                    submodules={"encoders": {"patches": patches}},
                )
            },
            special_token_ids={IMAGES: IMAGE},
            module_to_grid_map={IMAGES: encoder.grid, LANGUAGE: language.grid},
        )
    ).to(Utils.device)
    model.model_type = ModelType.encoder_or_decoder
    _initialize(model)
    return model


@torch.no_grad()
def _initialize(model: MimoModel) -> None:
    for part in local_shards(model):
        rng = torch.Generator().manual_seed(zlib.crc32(part.key.encode()))
        whole = torch.randn(part.global_shape, generator=rng) / part.global_shape[-1] ** 0.5
        is_norm = "norm.weight" in part.key
        part.data.copy_(whole[window(part)] + is_norm)


@dataclass(frozen=True)
class Samples:
    """A run of samples: ids, labels and loss mask [n, TOKENS], patches [n, PATCHES, PIXELS]."""

    ids: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    patches: torch.Tensor

    @classmethod
    def draw(cls, count: int, seed: int) -> Samples:
        rng = torch.Generator().manual_seed(seed)
        text = torch.randint(IMAGE, (count, TOKENS + 1), generator=rng)
        ids = text[:, :-1].clone()
        for sample in ids:  # images stand at other places in each sample, on other CP ranks
            first = int(torch.randint(TOKENS - PATCHES, (), generator=rng))
            sample[first : first + PATCHES] = IMAGE
        return cls(
            ids=ids,
            labels=text[:, 1:],
            loss_mask=(torch.rand(count, TOKENS, generator=rng) < 0.6).float(),
            patches=torch.randn(count, PATCHES, PIXELS, generator=rng),
        )

    def batch(self, encoder: slice, language: slice, packed: bool = False) -> dict:
        """MimoModel's arguments, where its modules take the samples of these slices."""
        count = len(self.ids[language])
        shape = (1, -1) if packed else (count, TOKENS)
        bounds = TOKENS * torch.arange(count + 1, device=Utils.device)
        packing = {
            "cu_seqlens_q": bounds,
            "cu_seqlens_kv": bounds,
            "max_seqlen_q": TOKENS,
            "max_seqlen_kv": TOKENS,
        }
        place = partial(torch.Tensor.to, device=Utils.device)
        return {
            "input_ids": place(self.ids[language]).view(shape),
            "position_ids": torch.arange(TOKENS, device=Utils.device).repeat(count).view(shape),
            "labels": place(self.labels[language]).reshape(shape),
            "loss_mask": place(self.loss_mask[language]).view(shape),
            "modality_inputs": {
                IMAGES: {"patches": {"hidden_states": place(self.patches[encoder]).flatten(0, 1)}}
            },
            "packing_kwargs": packing if packed else None,
        }


def part_of(module: Module, count: int) -> slice:
    """The samples of ``count`` that fall to this rank's DP index."""
    size = count // module.groups.dp.size()
    first = module.groups.dp.rank() * size
    return slice(first, first + size)


def _loss(output: torch.Tensor, loss_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
    total, tokens = (output * loss_mask).sum(), loss_mask.sum()
    return total, tokens.int(), torch.stack([total.detach(), tokens])


def _forward_step(batches, model: MimoModel):
    output, loss_mask = model(**next(batches))
    return output, partial(_loss, loss_mask=loss_mask)


def train(
    encoder: Module, language: Module, microbatches: list[Samples], steps: int, packed: bool
) -> Iterator[tuple[float, float]]:
    """Train with Megatron's schedule, DDP and distributed optimizer; yields loss and gradient norm.

    Every step takes the same microbatches, so the loss has to fall.
    """
    model = build(encoder, language)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True
    )
    images = DistributedDataParallel(
        encoder.config(),
        ddp_config,
        model.modality_submodules[IMAGES],
        pg_collection=encoder.groups,
    )
    model.modality_submodules[IMAGES] = images
    model.language_model = DistributedDataParallel(
        model.config, ddp_config, model.language_model, pg_collection=language.groups
    )
    model.config.finalize_model_grads_func = finalize_mimo_grads
    model.config.no_sync_func = partial(no_grad_sync, [model])
    optimizer = get_mimo_optimizer(
        model,
        OptimizerConfig(
            optimizer="adam",
            lr=ADAM["lr"],
            adam_beta1=ADAM["betas"][0],
            adam_beta2=ADAM["betas"][1],
            adam_eps=ADAM["eps"],
            weight_decay=ADAM["weight_decay"],
            clip_grad=0.0,
            use_distributed_optimizer=True,
        ),
    )
    count = len(microbatches[0].ids)
    parts = part_of(encoder, count), part_of(language, count)
    for _ in range(steps):
        for module in (images, model.language_model):
            module.zero_grad_buffer()
        optimizer.zero_grad()
        reports = get_forward_backward_func(pp_size=1, vp_size=None)(
            forward_step_func=_forward_step,
            data_iterator=iter([samples.batch(*parts, packed) for samples in microbatches]),
            model=[model],
            num_microbatches=len(microbatches),
            seq_length=TOKENS,
            micro_batch_size=count,
            forward_only=False,
            pg_collection=language.groups,
        )
        _, grad_norm, _ = optimizer.step()
        total, tokens = global_token_count(sum(reports), language.groups).tolist()
        yield total / tokens, grad_norm
    model.destroy()
    free_groups(model)


def train_plainly(
    encoder: Module, language: Module, microbatches: list[Samples], steps: int
) -> Iterator[tuple[float, float]]:
    """The same in plain PyTorch on one rank: mean loss of all tokens, backward, Adam."""
    model = build(encoder, language)
    optimizer = torch.optim.Adam(model.parameters(), **ADAM)
    everything = slice(None)
    for _ in range(steps):
        optimizer.zero_grad()
        outputs = [model(**samples.batch(everything, everything)) for samples in microbatches]
        tokens = sum(loss_mask.sum() for _, loss_mask in outputs)
        loss = sum((output * loss_mask).sum() for output, loss_mask in outputs) / tokens
        loss.backward()
        norms = [parameter.grad.norm() for parameter in model.parameters()]
        optimizer.step()
        yield loss.item(), torch.stack(norms).norm().item()
    free_groups(model)
