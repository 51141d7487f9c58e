# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Options from a dataclass, with the parser's errors as lines of ours."""

import argparse

from examples.mimo.common.config_file import nearest
from examples.mimo.common.errors import UserError
from megatron.training.argument_utils import ArgumentGroupFactory


def add_options(parser: argparse.ArgumentParser, options: type) -> None:
    """Add a dataclass's fields to a parser as options, and make its errors `UserError`s."""
    ArgumentGroupFactory(options).build_group(parser, "Nemotron VLM")

    def refuse(message: str):
        marker = "unrecognized arguments: "
        unknown = message.removeprefix(marker).split()[0] if marker in message else ""
        name = unknown.partition("=")[0]
        hint = nearest(name, parser._option_string_actions) if name else ""
        raise UserError(f"{message}{hint or '; see --help'}")

    parser.error = refuse
