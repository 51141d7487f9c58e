# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The command line, read once by one parser: Megatron's with this program's options."""

import argparse
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

from examples.mimo.common.config_file import as_yaml, with_config
from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import option_of
from examples.mimo.common.megatron_rules import idle_options
from examples.mimo.nemotron_vlm.data.reading_options import add_options, preset_of
from examples.mimo.nemotron_vlm.model.presets import VLMPreset
from examples.mimo.nemotron_vlm.options.defaults import defaults
from examples.mimo.nemotron_vlm.options.own_options import OwnOptions
from megatron.core.models.mimo.schedule.replaced import replaced
from megatron.training.arguments import parse_args


@dataclass(frozen=True)
class CommandLine:
    """A command line, not yet checked.

    words: with the options of its files in front. args: the values of all options. preset: the
    model, with the sizes that options give. config: the same as the text of a file.
    """

    words: tuple[str, ...]
    args: argparse.Namespace
    preset: VLMPreset
    config: str

    @property
    def given(self) -> frozenset[str]:
        """Names of the options that the line has."""
        return frozenset(word.partition("=")[0] for word in self.words)

    @property
    def only_asks(self) -> bool:
        """Whether the line asks about a run, and starts none."""
        return not self.given.isdisjoint({"--dry-run", "--plan"})


def read(argv: Sequence[str], preset: VLMPreset | None = None) -> CommandLine:
    """Read a command line and its files.

    Args:
        preset: the model; ``--model``'s by default.

    Raises:
        UserError: an option is unknown or does nothing here, or a value is none.
    """
    words: list[str] = []

    def extend(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        nonlocal preset
        add_options(parser, OwnOptions)
        plain = with_config(argv, parser)
        idle = idle_options(parser)
        for name in idle.keys() & {word.partition("=")[0] for word in plain}:
            raise UserError(f"{name} is not taken here: {idle[name]}")
        # The model and the device decide defaults, and which flags have an opposite.
        first = parser.parse_known_args([word for word in plain if word != "--help"])[0]
        preset = preset or preset_of(first)
        set_defaults(parser, defaults(preset, first.device, first.pack))
        words[:] = with_config(argv, parser, is_whole=True)
        parsers.append(parser)
        sys.argv = [sys.argv[0], *words]
        return parser

    parsers: list[argparse.ArgumentParser] = []
    with replaced(sys, argv=sys.argv), as_user_errors():
        args = parse_args(extend)  # reads sys.argv
    sizes = {field.name: getattr(args, field.name) for field in fields(preset.language)}
    preset = replace(preset, language=replace(preset.language, **sizes))
    return CommandLine(tuple(words), args, preset, as_yaml(words, parsers[0], args))


def set_defaults(parser: argparse.ArgumentParser, values: Mapping[str, object]) -> None:
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
    for action in parser._actions:  # one help text of Megatron's has a bare per cent sign
        action.help = re.sub(r"(?<!%)%(?![%(])", "%%", action.help or "")


@contextmanager
def as_user_errors() -> Iterator[None]:
    """Raise the errors of Megatron's checks as `UserError`s of one line."""
    kinds = AssertionError, ValueError, RuntimeError, TypeError, LookupError, ImportError, OSError
    try:
        yield
    except (*kinds, ArithmeticError, AttributeError) as error:
        reason = " ".join(str(error).split())
        if isinstance(error, KeyError):
            reason = f"{reason} is none of the values that its option takes; see --help-all"
        if not reason:
            asked = traceback.extract_tb(error.__traceback__)[-1].line.removeprefix("assert ")
            reason = re.sub(r"args\.(\w+)", lambda found: option_of(found[1]), asked)
            reason = f"Megatron asks for: {reason}"
        raise UserError(reason) from error
