# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Rules that runs keep: what a rule is, the check, and rules of common forms."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from examples.mimo.common.errors import UserError

ENGINE = "it needs --transformer-impl transformer_engine"
GPU = "it needs a GPU: --device cuda"
ON_ENGINE = "--device cuda --transformer-impl transformer_engine"


class Rule(NamedTuple):
    """A rule that a run must keep.

    title: the options that break it, as the refusal names them. is_broken: a condition on the run.
    why: the reason; without one, the condition returns the whole refusal. cure: what works, if it
    is more than to leave the options out. example: a command line that breaks the rule; the title
    by default, None where only another machine can break it.
    """

    title: str
    is_broken: Callable[[Any], object]
    why: str = ""
    cure: str = ""
    example: str | None = ""


def check(run: Any, rules: Iterable[Rule]) -> None:
    """Refuse a run that breaks a rule, by the first one.

    Args:
        run: has ``args``, Megatron's arguments, and what else the rules look at.

    Raises:
        UserError: one line with the options, the reason and the cure.
    """
    for rule in rules:
        if broken := rule.is_broken(run):
            cure = f"; {rule.cure}" if rule.cure else ""
            refusal = f"{rule.title} is not taken here: {rule.why}{cure}"
            raise UserError(refusal if rule.why else broken)


def value(run: Any, option: str) -> object:
    """Return the value of an option; None of one that Megatron has removed once it was read."""
    return getattr(run.args, option.removeprefix("--").replace("-", "_"), None)


def if_set(option: str, why: str) -> Rule:
    """Refuse an option wherever it is set."""
    return Rule(option, lambda r: value(r, option), why)


def if_set_to(text: str, why: str, cure: str = "") -> Rule:
    """Refuse one value of an option."""
    option, refused = text.split()
    return Rule(text, lambda r: value(r, option) == refused, why, cure)


def unless_set_to(option: str, taken: object, why: str, other: str) -> Rule:
    """Refuse all values of an option but one; ``other`` is an example of them."""
    return Rule(
        option, lambda r: value(r, option) not in (None, taken), why, "", f"{option} {other}"
    )


def on_cpu(title: str, is_set: Callable[[Any], object], why: str = GPU, example: str = "") -> Rule:
    """Refuse options on CPU ranks."""
    return Rule(title, lambda r: r.args.device == "cpu" and is_set(r), why, "", example)


def not_local(option: str, is_set: Callable[[Any], object], example: str = "") -> Rule:
    """Refuse an option without Transformer Engine's layers."""
    return Rule(
        option, lambda r: r.args.transformer_impl == "local" and is_set(r), ENGINE, "", example
    )


def with_graphs(option: str, is_set: Callable[[Any], object], why: str, example: str) -> Rule:
    """Refuse an option together with CUDA graphs."""
    title = f"--cuda-graph-impl local with {option}"
    line = f"{ON_ENGINE} --cuda-graph-impl local {example}"
    return Rule(title, lambda r: r.args.cuda_graph_impl == "local" and is_set(r), why, "", line)
