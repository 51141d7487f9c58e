# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Rules that runs keep: what a rule is, the check, and rules of common forms."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from examples.mimo.common.errors import UserError

GPU = "it needs a GPU: --device cuda"
ON_ENGINE = "--device cuda --transformer-impl transformer_engine"
ENGINE = f"it needs {ON_ENGINE}"
OTHER = "other than "
NAMES = {"--fp8-format": "fp8", "--fp4-format": "fp4", "--use-nccl-ub": "nccl_ub"}
NAMES |= {"--apply-layernorm-1p": "layernorm_zero_centered_gamma"}
"""Arguments that are not named as their options."""


class Rule(NamedTuple):
    """A rule that a run must keep.

    title: the options that break it, as the refusal names them; empty if the condition returns the
    whole refusal. is_broken: a condition on the run. why: the reason, with the values of arguments
    whose names it has in braces. cure: what works, if it is more than to leave the options out.
    example: a command line that breaks the rule; the title by default.
    """

    title: str
    is_broken: Callable[[Any], object]
    why: str = ""
    cure: str = ""
    example: str = ""


def check(run: Any, rules: Iterable[Rule]) -> None:
    """Raise a `UserError` if a run breaks a rule: the options, the reason and the cure.

    Args:
        run: has ``args``, Megatron's arguments, and what else the rules look at.
    """
    for rule in rules:
        if broken := rule.is_broken(run):
            cure = f"; {rule.cure}" if rule.cure else ""
            why = rule.why.format_map(vars(run.args))
            text = f"{rule.title} is not taken here: {why}{cure}"
            raise UserError(text if rule.title else str(broken))


def has(run: Any, options: str) -> bool:
    """Return whether a run has options, joined by ``with``.

    Each is set, or has the value after it, or after "other than" another value than that. An option
    that Megatron has removed once it was read is None, which is no value.
    """

    def is_met(option: str) -> bool:
        name, _, wanted = option.partition(" ")
        argument = NAMES.get(name, name.removeprefix("--").replace("-", "_"))
        value = getattr(run.args, argument, None)
        if wanted.startswith(OTHER):
            return value is not None and str(value) != wanted.removeprefix(OTHER)
        return str(value) == wanted if wanted else bool(value)

    return all(map(is_met, options.split(" with ")))


def refused(options: str, why: str, cure: str = "", example: str = "") -> Rule:
    """Refuse options where `has` finds them."""
    return Rule(options, lambda r: has(r, options), why, cure, example)


def on_cpu(options: str, why: str = GPU, example: str = "") -> Rule:
    """Refuse options on CPU ranks."""
    return Rule(options, lambda r: r.args.device == "cpu" and has(r, options), why, "", example)


def not_local(options: str, example: str = "") -> Rule:
    """Refuse options without Transformer Engine's layers."""
    is_local = "--transformer-impl local"
    return Rule(options, lambda r: has(r, f"{is_local} with {options}"), ENGINE, "", example)


def with_graphs(options: str, why: str, example: str, is_set: Callable | None = None) -> Rule:
    """Refuse options together with CUDA graphs, where `has` or a condition finds them."""
    graphs, line = "--cuda-graph-impl local", f"{ON_ENGINE} --cuda-graph-impl local {example}"
    is_set = is_set or (lambda r: has(r, options))
    return Rule(f"{graphs} with {options}", lambda r: has(r, graphs) and is_set(r), why, "", line)
