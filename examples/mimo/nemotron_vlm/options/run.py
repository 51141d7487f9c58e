# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""One run: everything that its command line decides, made once and checked once.

Bad input is refused here, before any process group is made, with the same message on every rank.
"""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import SIZES, Batch, Layout, Layouts, asked_layout
from examples.mimo.common.layout_rules import staged_pattern
from examples.mimo.common.rules import check
from examples.mimo.nemotron_vlm.data import SampleSource, fingerprint, have_equal_images
from examples.mimo.nemotron_vlm.model.adapters import Adapters
from examples.mimo.nemotron_vlm.model.model import VLMConfigs, make_configs
from examples.mimo.nemotron_vlm.model.part_settings import PartSettings, by_encoder, part_settings
from examples.mimo.nemotron_vlm.model.presets import VLMPreset
from examples.mimo.nemotron_vlm.options import derived
from examples.mimo.nemotron_vlm.options.command_line import CommandLine, as_user_errors, read
from examples.mimo.nemotron_vlm.options.layout_rules import derive
from examples.mimo.nemotron_vlm.options.rules import RULES
from megatron.core.models.mimo.config.encoder_schedule import EncoderSchedule
from megatron.core.models.mimo.schedule.replaced import replaced
from megatron.training.arguments import validate_args
from megatron.training.training import get_megatron_optimizer_config
from megatron.training.vocab_utils import calculate_padded_vocab_size


@dataclass(frozen=True)
class Run:
    """A run that keeps all rules.

    line: the command line. asked: the values of its options before Megatron has derived others.
    args: Megatron's validated arguments, to which nobody but Megatron writes. wanted: the layouts
    of the encoders and of the language model as the line has them. layouts: the complete ones.
    batches: the global batches of the run, the first one last. adapters: LoRA's, or None.
    configs: configurations of the model's parts. failed: why Megatron refuses the options, of a run
    that breaks a rule.
    """

    line: CommandLine
    preset: VLMPreset
    asked: Namespace
    args: Namespace
    wanted: tuple[list[Layout], Layout]
    layouts: Layouts
    batches: list[Batch]
    parts: PartSettings
    adapters: Adapters | None
    configs: VLMConfigs | None = None
    failed: UserError | None = None

    @classmethod
    def of(
        cls,
        line: CommandLine | Sequence[str],
        world_size: int | None = None,
        preset: VLMPreset | None = None,
    ) -> "Run":
        """Make the run of a command line.

        Args:
            world_size: ranks of the run; torchrun's by default.
            preset: the model; that of the options by default.

        Raises:
            UserError: the options cannot work; the message names the fact and the cure.
        """
        line = line if isinstance(line, CommandLine) else read(line, preset)
        args, preset = Namespace(**vars(line.args)), line.preset
        args.world_size = world_size or args.world_size
        parts = part_settings(args, preset.names)
        derived.complete(args, preset)
        wanted = _asked_encoders(args, preset.names), asked_layout(args, "language")
        sizes = reversed(derived.batch_sizes(args))
        batches = [Batch(size, args.micro_batch_size, args.seq_length) for size in sizes]
        layouts = derive(*wanted, batches[-1], args.world_size, args.placement)
        asked, configs, failed = Namespace(**vars(args)), None, None
        try:
            with as_user_errors():
                derived.set_macro_batch(args, layouts)
                _set_layout(args, preset, layouts)
                derived.set_experts(args, preset, layouts)
                _validate(args, layouts.language.size)
                trained = [name for name in preset.names if (name, "encoder") not in parts.frozen]
                captured = trained if have_equal_images(args) else ()
                configs = make_configs(args, preset, layouts, captured)
                if not (
                    line.only_asks and args.use_precision_aware_optimizer
                ):  # looks for a package
                    get_megatron_optimizer_config(args)
        except UserError as error:
            failed = error
        lora = Adapters.of(args, preset.names)
        run = cls(line, preset, asked, args, wanted, layouts, batches, parts, lora, configs, failed)
        check(run, RULES)
        return run

    @property
    def schedule(self) -> EncoderSchedule:
        """Return when a colocated encoder encodes."""
        return EncoderSchedule(self.args.encoder_macro_batch, self.args.recompute_encoder or None)

    def with_data(self, source: SampleSource) -> "Run":
        """Return the run with the facts of its data: token ids, template, fingerprint, start."""
        facts = {
            "token_ids": self.args.token_ids | source.token_ids,
            "chat_template_kwargs": dict(source.asked),
            "data_fingerprint": fingerprint(source, self.args),
            "window_start": (0, 0),
        }
        return replace(self, args=Namespace(**vars(self.args) | facts))


def _asked_encoders(args: Namespace, names: list[str]) -> list[Layout]:
    asked = by_encoder("--encoder", args.encoder, names)
    if asked and (missing := [name for name in names if name not in asked]):
        raise UserError(f"--encoder: {missing[0]} is missing; add --encoder {missing[0]}:AXIS=SIZE")
    return [asked_layout(args, "encoder", asked.get(name, "")) for name in names]


def _set_layout(args: Namespace, preset: VLMPreset, layouts: Layouts) -> None:
    """Give Megatron's arguments the sizes of the layouts."""
    args.language = str(layouts.language)
    args.encoder = " ".join(layouts.named_encoders(preset.names))
    modules = {"language": layouts.language}
    if len(layouts.encoders) == 1:
        modules["encoder"] = layouts.encoder
    for module, layout in modules.items():
        for axis, option in SIZES[module].items():
            setattr(args, option, getattr(layout, axis))
    args.sequence_parallel = layouts.language.sequence_parallel
    uneven = args.decoder_first_pipeline_num_layers or args.decoder_last_pipeline_num_layers
    if "|" not in args.hybrid_layer_pattern and not uneven:
        args.hybrid_layer_pattern = staged_pattern(args.hybrid_layer_pattern, layouts.language)


def _validate(args: Namespace, language_ranks: int) -> None:
    """Run Megatron's own checks, with the language model's ranks as the world."""
    with replaced(args, world_size=language_ranks):
        validate_args(args, {"dataloader_type": "external"})
    if args.padded_vocab_size is None:
        args.padded_vocab_size = calculate_padded_vocab_size(
            args.vocab_size,
            args.make_vocab_size_divisible_by,
            args.tensor_model_parallel_size,
            logging_enabled=False,
        )
