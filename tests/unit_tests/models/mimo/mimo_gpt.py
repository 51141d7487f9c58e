# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A MimoModel small enough to read: MLPs over patches, and a GPT with rotary positions.

It is built from Megatron's own layers and from grids alone; all that colocated training needs is
here.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch

from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.mimo.config.base_configs import MimoModelConfig
from megatron.core.models.mimo.config.encoder_schedule import EncoderSchedule
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules
from megatron.core.models.vision.multimodal_projector import MultimodalProjector
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.context_parallel_attention import ContextParallelAttention
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.unit_tests.models.mimo.weights import local_shards, window
from tests.unit_tests.test_utilities import Utils

IMAGES, SOUNDS = "images", "sounds"
TOKEN_IDS = {IMAGES: 31, SOUNDS: 30}
"""Token ids of the modalities; text has the ids below."""

VOCAB, HIDDEN, HEADS, LAYERS = 32, 32, 8, 4
PIXELS = 6
"""Features of a patch."""

TOKENS = 13
"""Tokens of the longest sample. No CP size divides it."""


@dataclass(frozen=True)
class Module:
    """The grid and the process groups of one module."""

    grid: HyperCommGrid
    groups: ProcessGroupCollection
    vpp: int = 1
    variable_lengths: bool = True
    dtype: torch.dtype = torch.float32

    @classmethod
    def make(
        cls,
        tp: int = 1,
        cp: int | None = 1,
        pp: int = 1,
        dp: int = 1,
        vpp: int = 1,
        variable_lengths: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> Module:
        """Lay a module out over the first tp·cp·dp·pp ranks; collective over the world.

        The grid has no ``cp`` where it is None.
        """
        sizes = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
        sizes = {dim: size for dim, size in sizes.items() if size is not None}
        grid = HyperCommGrid(list(sizes.values()), list(sizes))
        groups = ProcessGroupCollection.from_hyper_comm_grid(grid)
        return cls(grid, groups, vpp, variable_lengths, dtype)

    def config(self) -> TransformerConfig:
        """The same sizes for all modules, split as this one's groups are."""
        return TransformerConfig(
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            ffn_hidden_size=2 * HIDDEN,
            tensor_model_parallel_size=self.groups.tp.size(),
            context_parallel_size=self.groups.cp.size(),
            pipeline_model_parallel_size=self.groups.pp.size(),
            virtual_pipeline_model_parallel_size=self.vpp if self.vpp > 1 else None,
            params_dtype=self.dtype,
            pipeline_dtype=self.dtype,
            variable_seq_lengths=self.variable_lengths,
            moe_token_dispatcher_type="alltoall",  # variable lengths need it
            overlap_p2p_comm=self.vpp > 1,
            batch_p2p_comm=self.vpp == 1,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            perform_initialization=False,
            calculate_per_token_loss=True,
            gradient_accumulation_fusion=False,
        )


def _encoder(module: Module) -> ModuleSpec:
    patches = ModuleSpec(
        module=MultimodalProjector,
        params={
            "config": module.config(),
            "submodules": MLPSubmodules(
                linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear
            ),
            "projector_type": "mlp",
            "input_size": PIXELS,
            "pg_collection": module.groups,
        },
    )
    return ModuleSpec(
        module=VisionModalitySubmodules,
        params={"pg_collection": module.groups},
        submodules={"encoders": {"patches": patches}},
    )


def _gpt(module: Module, vp_stage: int | None) -> ModuleSpec:
    layer = get_gpt_layer_local_spec()
    layer.submodules.self_attention.submodules.core_attention = ContextParallelAttention
    stage, stages = module.groups.pp.rank(), module.groups.pp.size()
    return ModuleSpec(
        module=GPTModel,
        params={
            "config": module.config(),
            "transformer_layer_spec": layer,
            "vocab_size": VOCAB,
            "max_sequence_length": TOKENS,
            "pre_process": stage == 0 and not vp_stage,
            "post_process": stage == stages - 1 and vp_stage in (None, module.vpp - 1),
            "vp_stage": vp_stage,
            "position_embedding_type": "rope",
            "scatter_embedding_sequence_parallel": False,
            "pg_collection": module.groups,
        },
    )


def build(modules: dict[str, Module], schedule: EncoderSchedule) -> list[MimoModel]:
    """The model's virtual stages on this rank; weights depend on the parameters' names only.

    Args:
        modules: the language model's, and one for each modality.
        schedule: when the encoders run.
    """
    language = modules[LANGUAGE]
    stages = []
    for number in range(language.vpp):
        vp_stage = number if language.vpp > 1 else None
        held = modules if number == 0 else {LANGUAGE: language}
        stage = MimoModel(
            MimoModelConfig(
                language_model_spec=_gpt(language, vp_stage),
                modality_submodules_spec={
                    name: _encoder(module) for name, module in held.items() if name != LANGUAGE
                },
                special_token_ids={name: TOKEN_IDS[name] for name in modules if name != LANGUAGE},
                module_to_grid_map={name: module.grid for name, module in held.items()},
                encoder_schedule=schedule,
            )
        ).to(Utils.device)
        if stage.language_model is not None:  # Megatron makes the weights of its norms in fp32
            stage.language_model.to(language.dtype)
        stage.model_type = ModelType.encoder_or_decoder
        stage.vp_stage = vp_stage
        stages.append(stage)
    _initialize(stages)
    return stages


@torch.no_grad()
def _initialize(stages: list[MimoModel]) -> None:
    for part in local_shards(stages):
        rng = torch.Generator().manual_seed(zlib.crc32(part.key.encode()))
        whole = torch.randn(part.global_shape, generator=rng) / part.global_shape[-1] ** 0.5
        is_norm = "norm.weight" in part.key
        part.data.copy_(whole[window(part)] + is_norm)
