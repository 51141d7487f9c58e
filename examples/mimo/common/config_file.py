# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Options from a YAML file (``--config``), and the file that every run writes of its own.

A file becomes words of the command line, in front of the given ones, so that one parser reads both.
"""

import argparse
import difflib
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from examples.mimo.common.errors import UserError, one_line

CONFIG = "--config"
FLAGS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
VARIABLE = re.compile(r"\$?\$\{(\w+)\}")
"""A variable of the environment; with two dollar signs, a text that has one of them."""

NOT_THERE = {
    "video-pruning-rate": "training keeps all rows of a clip, because the host must know their "
    "number before the device has encoded them"
}
"""Names that published models have, and why they are no options."""

ELSEWHERE = {"learning-rate": "lr", "max-lr": "lr", "batch-size": "global-batch-size"}
ELSEWHERE |= {"max-steps": "train-iters", "warmup-steps": "lr-warmup-iters", "output-dir": "save"}
ELSEWHERE |= {"max-grad-norm": "clip-grad", "lora-rank": "lora-dim", "lora-r": "lora-dim"}
"""Names here of options of other programs."""


def nearest(name: str, known: Mapping[str, argparse.Action]) -> str:
    """Return why a name is none, or a hint at the taken ones that are most like it, or nothing.

    Args:
        known: options by their names, with dashes; refused ones have no help.
    """
    plain = name.lstrip("-").replace("_", "-")
    if reason := NOT_THERE.get(plain):
        return f": {reason}"
    taken = {each[2:]: each[2:] for each, a in known.items() if a.help != argparse.SUPPRESS}
    taken |= {other: here for other, here in ELSEWHERE.items() if here in taken}
    likely = [plain] if plain in taken else difflib.get_close_matches(plain, taken, cutoff=0.6)
    found = dict.fromkeys(taken[each] for each in likely)
    found = [f"--{each}" if name[0] == "-" else each for each in found]
    return f"; did you mean {' or '.join(found)}?" if found else ""


def with_config(
    argv: Sequence[str], parser: argparse.ArgumentParser, is_whole: bool = False
) -> list[str]:
    """Return the command line with the words of its ``--config`` files in front.

    An option of the command line replaces the file's, also one that may be repeated.

    Args:
        parser: knows the options; keys that it lacks are left out.
        is_whole: the parser has all options, so that a key that it lacks is refused.

    Raises:
        UserError: a file cannot be read, or a key or its value cannot be an option.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument(CONFIG, action="append", nargs="?", default=[])
    found, given = finder.parse_known_args(argv)
    known = parser._option_string_actions
    chosen = {known[name].dest for word in given if (name := word.partition("=")[0]) in known}
    names = {name[2:].replace("_", "-"): name for name in known if name.startswith("--")}
    words: list[str] = []
    for path in found.config:
        if not path:
            raise UserError(f"{CONFIG} takes a FILE")
        for key, value in _read(path).items():
            name = names.get(key.replace("_", "-"))
            if name is None and is_whole:
                raise UserError(f"{CONFIG} {path}: no option {key}{nearest(key, known)}")
            if name and name != CONFIG and known[name].dest not in chosen:
                words += _words(f"{CONFIG} {path}: {key}", name, known, value)
    return [*words, *given]


def _read(path: str) -> dict[str, str | list[str]]:
    """Read a file's keys; every scalar stays the text that it is written as."""
    import yaml  # not needed where nobody asks for a file

    try:
        read = yaml.load(Path(path).read_text(), yaml.BaseLoader) or {}
    except OSError as error:
        raise UserError(f"{CONFIG} {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{CONFIG} {path}: no YAML: {one_line(error)}") from error
    if not isinstance(read, dict):
        raise UserError(f"{CONFIG} {path}: want lines of OPTION: VALUE")
    return read


def _words(where: str, name: str, known: dict, value: object) -> list[str]:
    """Return a key of a file as words of the command line."""
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(each, str) for each in values):
        raise UserError(f"{where}: want a value or a list of values, not keys of its own")
    texts = [_with_variables(where, each) for each in values]
    action = known[name]
    if action.nargs == 0:
        if len(texts) != 1 or texts[0].lower() not in FLAGS:
            raise UserError(f"{where}: it is a flag: want true or false, not {value}")
        return [name] if FLAGS[texts[0].lower()] else _turned_off(where, name, known)
    if not isinstance(value, list):
        is_bare = action.nargs == "?" and texts[0].lower() == "true"
        texts = [name if is_bare else f"{name}={texts[0]}"]
    elif isinstance(action, argparse._AppendAction):
        texts = [f"{name}={text}" for text in texts]
    elif action.nargs in (None, "?"):
        raise UserError(f"{where}: it takes one value, not a list")
    else:
        texts = [name, *texts]
    return texts


def _turned_off(where: str, name: str, known: dict) -> list[str]:
    """Return the words that switch a flag off: its opposite, or none if it is off by default."""
    action = known[name]
    if isinstance(action, argparse.BooleanOptionalAction):
        return [next(each for each in action.option_strings if each.startswith("--no-"))]
    if action.default != action.const:
        return []
    others = (other for other, each in known.items() if each.dest == action.dest)
    opposite = next((other for other in others if known[other].const != action.const), None)
    if opposite is None:
        raise UserError(f"{where}: it cannot be switched off")
    return [opposite]


def _with_variables(where: str, text: str) -> str:
    """Replace ``${NAME}`` by the variable of the environment, and ``$${`` by ``${``."""

    def value(match: re.Match) -> str:
        if match[0].startswith("$$"):
            return match[0][1:]
        if match[1] not in os.environ:
            raise UserError(f"{where}: set the environment variable {match[1]}")
        return os.environ[match[1]]

    return VARIABLE.sub(value, text)


def as_yaml(argv: Sequence[str], parser: argparse.ArgumentParser, read: argparse.Namespace) -> str:
    """Return the file that starts a run again.

    Args:
        argv: all options of the run, as `with_config` returns them.
        parser: has parsed them.
        read: what it has read; what was not given is noted in comments.
    """
    import yaml

    class Plain(yaml.SafeDumper):
        """Writes texts as they are: reading takes no type from their look."""

        yaml_implicit_resolvers: dict = {}

    known, given = parser._option_string_actions, {}
    for word in (VARIABLE.sub(r"$\g<0>", word) for word in argv):
        name, is_set, value = word.partition("=")
        if word.startswith("--") and name in known:
            key, last = name[2:], known[name].dest
            repeats = isinstance(known[name], argparse._AppendAction)
            given = {k: v for k, v in given.items() if repeats or known[f"--{k}"].dest != last}
            given.setdefault(key, [])
            given[key] += [value] if is_set else []
        else:
            given[key].append(word)
    options = {k: v if len(v) > 1 else v[0] if v else "true" for k, v in given.items()}
    dumped = yaml.dump(options, Dumper=Plain, sort_keys=False, width=1000) if options else ""
    chosen = {known[f"--{key}"].dest for key in given}
    rest = {name: value for name, value in vars(read).items() if name not in chosen}
    defaults = "".join(f"# {name}: {value}\n" for name, value in sorted(rest.items()))
    return f"{dumped}# defaults\n{defaults}"


def write_config(path: Path, text: str) -> None:
    """Write the file with the versions of this run, whole or not at all."""
    import torch

    from megatron.core import __version__ as upstream

    here = Path(__file__).resolve().parent
    asked = ["git", "-C", str(here), "describe", "--always", "--dirty"]
    commit = subprocess.run(asked, capture_output=True, text=True).stdout.strip() or "unknown"
    versions = f"# overlay {commit}, Megatron-LM {upstream}, torch {torch.__version__}\n"
    partial = path.with_name(path.name + ".partial")
    partial.write_text(versions + text)
    partial.replace(path)
