# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The command line: Megatron's parser, a few options of ours, and defaults from presets.

Bad input is refused here, before any process group is made, with the same message on every rank.
"""

import argparse
import logging
import os
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import (
    COLOCATED,
    SIZES,
    TOKEN_MULTIPLE,
    Batch,
    Layout,
    Layouts,
    asked_layout,
    option_of,
)
from examples.mimo.common.layout_rules import staged_pattern
from examples.mimo.common.refusals import REFUSALS, refuse
from examples.mimo.common.steps import batches_of_first_size, growing_batch
from examples.mimo.nemotron_vlm.data import have_equal_images
from examples.mimo.nemotron_vlm.loop.encoder_schedule import set_macro_batch
from examples.mimo.nemotron_vlm.model.language_loss import has_loss_kernel
from examples.mimo.nemotron_vlm.model.model import VLMConfigs, make_configs, parts_in_fp8
from examples.mimo.nemotron_vlm.model.part_settings import LANGUAGE as LANGUAGE_PART
from examples.mimo.nemotron_vlm.model.part_settings import PartSettings, by_encoder, part_settings
from examples.mimo.nemotron_vlm.model.presets import VLMPreset
from examples.mimo.nemotron_vlm.options.attention_rules import set_encoder_attention
from examples.mimo.nemotron_vlm.options.config_file import as_yaml, with_config
from examples.mimo.nemotron_vlm.options.defaults import defaults, saves_asynchronously
from examples.mimo.nemotron_vlm.options.environment import at_start
from examples.mimo.nemotron_vlm.options.fp8_rules import check_fp8
from examples.mimo.nemotron_vlm.options.layout_rules import resolve
from examples.mimo.nemotron_vlm.options.own_options import add_own_options, own_options, preset_of
from examples.mimo.nemotron_vlm.options.refusals import OF_OWN_OPTIONS, TURNED_BACK, idle_options
from examples.mimo.nemotron_vlm.options.value_rules import check_values
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.moe.device_counts import counts_stay_on_device
from megatron.training.arguments import parse_args, validate_args
from megatron.training.vocab_utils import calculate_padded_vocab_size


@dataclass(frozen=True)
class Options:
    """Megatron's validated arguments, what is derived from them, and where they come from.

    words: the command line, with the options of its files. config: the same as a file.
    """

    args: argparse.Namespace
    preset: VLMPreset
    layouts: Layouts
    configs: VLMConfigs
    parts: PartSettings
    words: list[str]
    config: str


def parse(
    argv: list[str], world_size: int | None = None, preset: VLMPreset | None = None
) -> Options:
    """Read and check the command line.

    Args:
        world_size: ranks of the run; torchrun's by default.
        preset: the model; that of the options by default.

    Raises:
        UserError: the options cannot work; the message names the fact and the fix.
    """
    os.environ.update(at_start(argv))  # where the program has not, before imports
    own = own_options(argv)
    preset = preset or preset_of(own)
    config, words = "", []

    def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        extend(parser, preset, own.device, own.pack)
        idle = idle_options(parser)
        read = parser.parse_args

        def parse_args() -> argparse.Namespace:
            nonlocal config, words
            words = with_config(argv, parser, is_whole=True)
            for name in idle.keys() & {word.partition("=")[0] for word in words}:
                raise UserError(f"{name} is not taken here: {idle[name]}")
            found = read(words)
            config = as_yaml(words, parser, found)
            # Refuse before Megatron acts on the arguments: --yaml-cfg would replace them all.
            refuse(found, [*REFUSALS, *OF_OWN_OPTIONS, *TURNED_BACK])
            return found

        parser.parse_args = parse_args  # Megatron's parse_args reads sys.argv
        return parser

    with _one_line():
        args = parse_args(provider)
    args.world_size = world_size or args.world_size
    sizes = {field.name: getattr(args, field.name) for field in fields(preset.language)}
    preset = replace(preset, language=replace(preset.language, **sizes))
    parts = part_settings(args, preset.names)
    check_values(args)
    _complete(args, preset)
    layouts = _layouts(args, preset)
    _set_layout(args, preset, layouts)
    with _one_line():
        _validate(args, layouts.language.size)
        refuse(args)  # what Megatron set by deprecated options
        _check_evaluation(args, preset, layouts)
        configs = make_configs(args, preset, layouts)
        check_fp8(args, preset, layouts, configs)
    return Options(args, preset, layouts, configs, parts, words, config)


def extend(parser: argparse.ArgumentParser, preset: VLMPreset, device: str, packs: bool) -> None:
    """Add this program's options to Megatron's parser, and set this program's defaults in it."""
    add_own_options(parser)
    _set_defaults(parser, defaults(preset, device, packs))
    for action in parser._actions:  # one help text of Megatron's has a bare per cent sign
        action.help = re.sub(r"(?<!%)%(?![%(])", "%%", action.help or "")


def _set_defaults(parser: argparse.ArgumentParser, values: Mapping[str, object]) -> None:
    """Set defaults, and add an opposite option for each flag that a default switches or, where it
    is None, may switch later."""
    parser.set_defaults(**values)
    flags = [a for a in parser._actions if a.nargs == 0 and a.dest in values and a.option_strings]
    for flag in flags:
        name, value = flag.option_strings[0], values[flag.dest]
        plain = re.sub("^--(no|disable)-", "--", name)
        opposite = plain if plain != name else f"--no-{name[2:]}"
        if value in (flag.const, None) and opposite not in parser._option_string_actions:
            action = "store_false" if flag.const else "store_true"
            options = {"dest": flag.dest, "default": value, "help": f"not {name}"}
            parser.add_argument(opposite, action=action, **options)


@contextmanager
def _one_line() -> Iterator[None]:
    """Raise the errors of Megatron's checks as `UserError`s of one line."""
    kinds = AssertionError, ValueError, RuntimeError, TypeError, KeyError, ImportError, OSError
    try:
        yield
    except kinds as error:
        reason = " ".join(str(error).split())
        if isinstance(error, KeyError):
            reason = f"{reason} is none of the values that its option takes; see --help-all"
        if not reason:
            asked = traceback.extract_tb(error.__traceback__)[-1].line.removeprefix("assert ")
            reason = re.sub(r"args\.(\w+)", lambda found: option_of(found[1]), asked)
            reason = f"Megatron asks for: {reason}"
        raise UserError(reason) from error


def _complete(args: argparse.Namespace, preset: VLMPreset) -> None:
    """Fill in the defaults that depend on other options."""

    def default(name: str, value: object) -> None:
        if getattr(args, name) is None:
            setattr(args, name, value)

    if args.use_checkpoint_opt_param_scheduler:
        args.override_opt_param_scheduler = False  # Megatron refuses both together
    args.store_param_remainders = False  # any run can load whole master weights
    args.token_ids = {each.name: each.token for each in preset.encoders}  # data may have others
    args.encoder_sizes = {each.name: asdict(each) for each in preset.encoders}  # for checkpoints
    args.language_std = args.init_method_std  # None: each matrix's follows from its inputs
    default("init_method_std", 0.02)
    if args.train_samples is None:
        default("train_iters", 20)
    if args.step_batch_size_schedule is None:
        default("global_batch_size", 32)
    else:
        # Megatron's own defaults would depend on the layout.
        default("global_batch_size", _batch_sizes(args)[0])
        if args.train_iters:
            default("lr_decay_iters", batches_of_first_size(args))
    if args.train_samples is not None and args.train_samples < args.global_batch_size:
        raise UserError(
            f"--train-samples {args.train_samples} must be {args.global_batch_size} or more, "
            "the samples of a step"
        )
    steps = args.lr_decay_iters or args.train_iters
    if steps and args.lr_warmup_iters >= steps:
        raise UserError(f"--lr-warmup-iters {args.lr_warmup_iters} must be less than {steps} steps")
    default("max_position_embeddings", args.seq_length)
    if args.log_straggler:
        default("logging_level", logging.INFO)  # that of its lines
    default("async_save", saves_asynchronously(args))
    is_open = args.cross_entropy_loss_fusion is None and args.cross_entropy_fusion_impl == "native"
    args.loss_kernel = is_open and has_loss_kernel()
    default("cross_entropy_loss_fusion", args.bf16 and not args.loss_kernel)
    has_one_size = have_equal_images(args) and args.step_batch_size_schedule is None
    if args.device == "cuda" and has_one_size:
        # cuDNN's norms are faster, but each number of tokens has its own kernel, made at first use.
        for way in ("FWD", "BWD"):
            os.environ.setdefault(f"NVTE_NORM_{way}_USE_CUDNN", "1")
    set_encoder_attention(args)
    default("overlap_param_gather", args.use_distributed_optimizer and args.overlap_grad_reduce)
    args.use_persistent_ckpt_worker |= args.async_save  # Megatron has no other worker
    default("eval_interval", args.train_iters or 1000)
    # Recurrent layers would move zigzag tokens of several lengths, which only packed rows have.
    default("linear_cp_layout", "contiguous" if args.pack else "zigzag")


def _layouts(args: argparse.Namespace, preset: VLMPreset) -> Layouts:
    asked = _asked_encoders(args, preset.names), asked_layout(args, "language")
    rest = args.world_size, preset, args.placement
    for size in reversed(_batch_sizes(args)):
        layouts = resolve(*asked, Batch(size, args.micro_batch_size, args.seq_length), *rest)
    language = layouts.language
    if layouts.non_colocated and args.recompute_encoder:
        raise UserError(f"--recompute-encoder needs --placement {COLOCATED}")
    set_macro_batch(args, layouts)
    instances = args.num_distributed_optimizer_instances
    for layout in layouts.modules:
        if layout.dp % instances or layout.expt_dp % instances:
            raise UserError(
                f"--num-distributed-optimizer-instances {instances} must divide dp={layout.dp} and "
                f"expt_dp={layout.expt_dp}, the replicas of experts, of {layout}"
            )
    if args.pack and args.sample_multiple % language.token_multiple:
        raise UserError(
            f"--sample-multiple {args.sample_multiple}: --language {language} needs a multiple of "
            f"{language.token_multiple} ({TOKEN_MULTIPLE})"
        )
    return layouts


def _asked_encoders(args: argparse.Namespace, names: list[str]) -> list[Layout]:
    asked = by_encoder("--encoder", args.encoder, names)
    if asked and (missing := [name for name in names if name not in asked]):
        raise UserError(f"--encoder: {missing[0]} is missing; add --encoder {missing[0]}:AXIS=SIZE")
    return [asked_layout(args, "encoder", asked.get(name, "")) for name in names]


def _batch_sizes(args: argparse.Namespace) -> list[int]:
    """Global batch sizes of the run, in the order in which they are used."""
    if args.step_batch_size_schedule is None:
        return [args.global_batch_size]
    return [size for _, size in growing_batch(args).schedule]


def _check_evaluation(args: argparse.Namespace, preset: VLMPreset, layouts: Layouts) -> None:
    """Hold evaluation's batches to the rules that training's batches keep."""
    if not args.eval_iters:
        return
    sizes = args.eval_global_batch_size, args.eval_micro_batch_size
    if args.pack and sizes[1] != 1:
        raise UserError("--pack makes one row a microbatch: --eval-micro-batch-size must be 1")
    if args.cuda_graph_impl == "local" and sizes[1] > args.micro_batch_size:
        raise UserError(
            f"--cuda-graph-impl local: --eval-micro-batch-size {sizes[1]} must be "
            f"{args.micro_batch_size} or less, the size for which graphs have buffers"
        )
    batch, rest = Batch(*sizes, args.seq_length), (args.world_size, preset, args.placement)
    try:
        resolve(layouts.encoders, layouts.language, batch, *rest)
    except UserError as error:
        options = "--eval-global-batch-size {}, --eval-micro-batch-size {}".format(*sizes)
        raise UserError(f"{options}: {error}") from error


def _set_layout(args: argparse.Namespace, preset: VLMPreset, layouts: Layouts) -> None:
    args.language = str(layouts.language)
    args.encoder = " ".join(layouts.named_encoders(preset.names))
    modules = {"language": layouts.language}
    if len(layouts.encoders) == 1:
        modules["encoder"] = layouts.encoder
    for module, layout in modules.items():
        for axis, option in SIZES[module].items():
            setattr(args, option, getattr(layout, axis))
    args.sequence_parallel = layouts.language.sequence_parallel
    _set_experts(args, preset, layouts)
    uneven = args.decoder_first_pipeline_num_layers or args.decoder_last_pipeline_num_layers
    if "|" not in args.hybrid_layer_pattern and not uneven:
        args.hybrid_layer_pattern = staged_pattern(args.hybrid_layer_pattern, layouts.language)


def _set_experts(args: argparse.Namespace, preset: VLMPreset, layouts: Layouts) -> None:
    """Choose how tokens reach their experts and what CUDA graphs have of MoE layers, if not given.

    Where it was measured to be faster, token counts stay on the device, and graphs have whole MoE
    layers. Elsewhere the host asks for the counts, and graphs have the routers alone.
    """
    has_graphs, asked = args.cuda_graph_impl == "local", args.cuda_graph_modules
    # Modules on ranks of their own exchange rows of any length, for which Megatron takes alltoall.
    # With ep, each rank gathers the tokens of all EP ranks: measured with graphs and ep=2 alone.
    language = layouts.language
    is_near = not layouts.non_colocated and language.etp == 1 and language.ep <= 1 + has_graphs
    is_fast = args.device == "cuda" and args.bf16 and is_near
    is_fast = is_fast and LANGUAGE_PART not in parts_in_fp8(args, preset)
    chosen = {  # what the configuration will have under these names
        "moe_token_dispatcher_type": "allgather",
        "gated_linear_unit": args.swiglu or args.quick_geglu,
        "quant_recipe": args.te_precision_config_file,
        "recompute_modules": args.recompute_modules or (),
    }
    is_fast = is_fast and counts_stay_on_device(argparse.Namespace(**vars(args) | chosen))
    is_fast = is_fast and not args.moe_shared_expert_overlap  # which is alltoall's
    if has_graphs:
        others = args.recompute_granularity or CudaGraphModule.moe_router in (asked or ())
        is_fast = is_fast and not others
    if args.moe_token_dispatcher_type is None:
        args.moe_token_dispatcher_type = "allgather" if is_fast else "alltoall"
    if has_graphs and not asked:
        is_whole = is_fast and args.moe_token_dispatcher_type == "allgather"
        experts = CudaGraphModule.moe if is_whole else CudaGraphModule.moe_router
        args.cuda_graph_modules = [CudaGraphModule.attn, CudaGraphModule.mamba]
        args.cuda_graph_modules += [experts] if args.num_experts else []


def _validate(args: argparse.Namespace, language_ranks: int) -> None:
    """Run Megatron's own checks, with the language model's ranks as the world."""
    world_size, args.world_size = args.world_size, language_ranks
    try:
        validate_args(args, {"dataloader_type": "external"})
    finally:
        args.world_size = world_size
    if args.padded_vocab_size is None:
        args.padded_vocab_size = calculate_padded_vocab_size(
            args.vocab_size,
            args.make_vocab_size_divisible_by,
            args.tensor_model_parallel_size,
            logging_enabled=False,
        )
