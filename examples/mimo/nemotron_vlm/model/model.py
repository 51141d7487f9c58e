# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The Nemotron VLM as a MimoModel: its configurations from Megatron's arguments, and its parts."""

from argparse import Namespace
from collections.abc import Collection
from dataclasses import dataclass

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import Layout, Layouts
from examples.mimo.nemotron_vlm.model.adapters import AdaptedModel, Adapters
from examples.mimo.nemotron_vlm.model.encoders.entry import Configs
from examples.mimo.nemotron_vlm.model.language_loss import (
    HybridModelWithLossKernel,
    leave_out_padding,
)
from examples.mimo.nemotron_vlm.model.layer_specs import LayerSpecs, layer_specs
from examples.mimo.nemotron_vlm.model.part_settings import LANGUAGE as LANGUAGE_PART
from examples.mimo.nemotron_vlm.model.part_settings import ModelPart, parts_named
from examples.mimo.nemotron_vlm.model.presets import VLMPreset
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.models.mimo.config.base_configs import MimoModelConfig
from megatron.core.models.mimo.config.encoder_schedule import EncoderSchedule
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.setup.initialization import Draw
from megatron.core.models.mimo.setup.module_groups import Modules
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.optimizer_param_scheduler import ParamGroupOverride
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import CudaGraphModule, ModelType
from megatron.core.transformer.moe.device_counts import counts_stay_on_device
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.argument_utils import core_transformer_config_from_args

SHARED = """
    params_dtype pipeline_dtype bf16 fp16 calculate_per_token_loss gradient_accumulation_fusion
    masked_softmax_fusion bias_dropout_fusion persist_layer_norm attention_backend transformer_impl
    use_cpu_initialization variable_seq_lengths moe_token_dispatcher_type cuda_graph_impl""".split()
"""Fields that configurations of encoders and projectors copy from the language model's."""

FP8 = """
    fp8 fp8_recipe fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad
    fp8_quantizer_factory tp_only_amax_red""".split()
"""Fields that an encoder in FP8 copies as well."""

OF_LANGUAGE = """
    hybrid_layer_pattern fp16_lm_cross_entropy position_embedding_type rotary_percent
    rotary_base""".split()
"""Megatron's arguments that are the language model's parameters of the same names."""


@dataclass(frozen=True)
class VLMConfigs:
    """Configurations of the model's parts: those of each encoder, in the preset's order."""

    encoders: tuple[Configs, ...]
    language: TransformerConfig


def make_configs(
    args: Namespace, preset: VLMPreset, layouts: Layouts, captured: Collection[str]
) -> VLMConfigs:
    """Make the configurations from validated arguments.

    Args:
        args: Megatron's arguments, which describe the language model.
        captured: encoders that have CUDA graphs if options ask for them; the language model may.

    Raises:
        ValueError, AssertionError: options do not go together, most by Megatron's own checks.
    """
    in_fp8 = parts_in_fp8(args, preset)
    given = language = _language_config(args)
    if in_fp8 and LANGUAGE_PART not in in_fp8:
        language = _language_config(Namespace(**vars(args) | {"fp8": None}))
    language.perform_initialization = False  # weights are initialized by name
    # Non-colocated stages exchange tensors of their own shapes.
    language.variable_seq_lengths = args.placement == "non-colocated"
    # A graph reuses its output tensors in the next step.
    language.deallocate_pipeline_outputs &= args.cuda_graph_impl == "none"
    # Graphs of several microbatches share a flag that tells Transformer Engine to keep quantized
    # weights, and each sets it once. If eager layers keep none, the first always makes new ones.
    has_graphs_of_each = args.cuda_graph_impl == "local" and layouts.language.pp > 1
    language.disable_parameter_transpose_cache |= has_graphs_of_each
    shared = {name: getattr(language, name) for name in SHARED} | {
        "perform_initialization": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # Otherwise the backward of a step's first microbatch overwrites main gradients (Transformer
        # Engine's is_first_microbatch), and Megatron counts the language model's microbatches.
        "disable_parameter_transpose_cache": True,
    }

    encoders = []
    for each, layout in zip(preset.encoders, layouts.encoders, strict=True):
        own = {
            "tensor_model_parallel_size": layout.tp,
            "pipeline_model_parallel_size": layout.pp,
        }
        if (each.name, "encoder") in in_fp8:
            own |= {name: getattr(given, name) for name in FP8}
        if each.name not in captured:
            own["cuda_graph_impl"] = "none"
        encoders.append(each.configs(shared | own, args.hidden_size))
    return VLMConfigs(tuple(encoders), language)


def parts_in_fp8(args: Namespace, preset: VLMPreset) -> frozenset[ModelPart]:
    """Return the parts whose matrix products are in FP8, with ``--fp8-format``.

    Raises:
        UserError: ``--fp8-parts`` names a part that cannot be, or does nothing.
    """
    every = [(each.name, "encoder") for each in preset.encoders if each.takes_fp8]
    every.append(LANGUAGE_PART)
    if args.fp8_parts and not args.fp8:
        raise UserError("--fp8-parts does nothing without --fp8-format; give both")
    if not args.fp8:
        return frozenset()
    named = parts_named("--fp8-parts", args.fp8_parts, every)
    return named or frozenset(every)


def _language_config(args: Namespace) -> TransformerConfig:
    """Make the language model's configuration.

    Megatron refuses CUDA graphs of whole MoE layers, because its own wait for token counts, and
    grouped GEMMs on CPU ranks, which PyTorch has. Both are decided here.
    """
    modules, whole = args.cuda_graph_modules, CudaGraphModule.moe
    is_whole = whole in modules and CudaGraphModule.moe_router not in modules
    others = [module for module in modules if not (is_whole and module is whole)]
    config = core_transformer_config_from_args(
        Namespace(**vars(args) | {"cuda_graph_modules": others})
    )
    if is_whole:
        config.cuda_graph_modules = [*config.cuda_graph_modules, whole]
    if args.device == "cpu":
        config.use_cpu_initialization = True  # yarn would ask PyTorch for a GPU's device
        config.moe_grouped_gemm = True
        config.moe_grouped_gemm = counts_stay_on_device(config)
    is_recomputed = config.recompute_granularity and "moe" in config.recompute_modules
    if is_whole and (is_recomputed or not (counts_stay_on_device(config) and config.bf16)):
        raise ValueError(
            "--cuda-graph-modules moe needs token counts that stay on the device: --bf16 "
            "--moe-token-dispatcher-type allgather --moe-grouped-gemm, a Hopper GPU, and experts "
            "without biases, gated units and recompute"
        )
    return config


def _language_spec(
    args: Namespace,
    config: TransformerConfig,
    specs: LayerSpecs,
    groups: ProcessGroupCollection | None,
    vp_stage: int | None,
) -> ModuleSpec:
    module = HybridModelWithLossKernel if args.loss_kernel else HybridModel
    if groups is None:
        return ModuleSpec(module=module, params={"config": config})
    stage, stages = groups.pp.rank(), groups.pp.size()
    last = (config.virtual_pipeline_model_parallel_size or 1) - 1
    params = {name: getattr(args, name) for name in OF_LANGUAGE} | dict(
        config=config,
        hybrid_stack_spec=specs.hybrid_stack,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=stage == 0 and not vp_stage,
        post_process=stage == stages - 1 and (vp_stage or 0) == last,
        vp_stage=vp_stage,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        scatter_embedding_sequence_parallel=False,
        pg_collection=groups,
    )
    return ModuleSpec(module=module, params=params)


def placed(preset: VLMPreset, layouts: Layouts) -> dict[str, tuple[Layout, int]]:
    """Return the layout and first rank of each module, for ``make_modules``."""
    names = [*preset.names, LANGUAGE]
    return dict(zip(names, zip(layouts.modules, layouts.offsets, strict=True), strict=True))


def initial_draws(preset: VLMPreset) -> dict[str, Draw]:
    """Return the encoders' own draws of initial weights, by patterns of the model's names."""
    return {
        f"modality_submodules.{each.name}.{pattern}": draw
        for each in preset.encoders
        for pattern, draw in each.initial.items()
    }


def build_vlm(
    args: Namespace,
    preset: VLMPreset,
    configs: VLMConfigs,
    modules: Modules,
    schedule: EncoderSchedule | None = None,
    overrides: dict[str, dict[ParamKey, ParamGroupOverride]] | None = None,
    adapters: Adapters | None = None,
) -> list[MimoModel]:
    """Build the bare model on this rank; its weights are not initialized.

    Args:
        schedule: when colocated modules encode; the default is that of no options.
        overrides: settings of single parameters of each module, for the optimizer.
        adapters: LoRA's, if any.

    Returns:
        One MimoModel for each virtual pipeline stage, an AdaptedModel if it has adapters; the first
        holds the encoders.
    """
    flash4 = args.encoder_attention == "flash4"
    specs = layer_specs(args.transformer_impl, flash4, has_own_experts=adapters is not None)
    language = modules[LANGUAGE].groups
    encoders = {
        each.name: each.spec(own, specs, modules[each.name].groups)
        for each, own in zip(preset.encoders, configs.encoders, strict=True)
    }
    vpp = configs.language.virtual_pipeline_model_parallel_size
    stages = []
    for vp_stage in range(vpp) if vpp else [None]:
        held = {LANGUAGE: modules[LANGUAGE]} if vp_stage else modules
        config = MimoModelConfig(
            language_model_spec=_language_spec(args, configs.language, specs, language, vp_stage),
            modality_submodules_spec={} if vp_stage else encoders,
            special_token_ids=args.token_ids,
            module_to_grid_map={name: module.grid for name, module in held.items()},
            encoder_schedule=schedule or EncoderSchedule(),
            optimizer_overrides=overrides,
        )
        stage = AdaptedModel(config, adapters) if adapters else MimoModel(config)
        leave_out_padding(stage.language_model, args.vocab_size)
        stage.model_type = ModelType.encoder_or_decoder
        stage.vp_stage = vp_stage
        stages.append(stage)
    return stages
