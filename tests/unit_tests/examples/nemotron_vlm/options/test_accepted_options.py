# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Every option of Megatron's either keeps the given value once all is checked, or is refused.

Those that the program's tables name are refused by name. An option that is taken and then overruled
would do nothing, and nobody would know.
"""

import argparse
import os
import re
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import SIZES
from examples.mimo.common.megatron_rules import NEEDS_GPU, WHEREVER_SET, idle_options
from examples.mimo.nemotron_vlm.data.reading_options import add_options
from examples.mimo.nemotron_vlm.model.presets import tiny
from examples.mimo.nemotron_vlm.options.command_line import set_defaults
from examples.mimo.nemotron_vlm.options.defaults import defaults
from examples.mimo.nemotron_vlm.options.own_options import OwnOptions
from examples.mimo.nemotron_vlm.options.run import Run
from megatron.training.arguments import add_megatron_arguments
from tests.unit_tests.examples.nemotron_vlm import preloaded  # noqa: F401 (its parser is quick)

RANKS, LAYOUT = 8, "tp=2,cp=2,pp=2,ep=2,etp=1"
STAGES = "MEM*|MEM*"

VALUES = {
    "--attention-backend": "flash",
    "--batch-invariant-mode": "--attention-backend flash --flash-attention-version 3 --bf16 "
    "--language tp=2",
    "--bias-gelu-fusion": "--bias-linear --no-squared-relu",
    "--bias-linear": "--no-bias-gelu-fusion",
    "--cuda-graph-modules": "attn",
    "--cuda-graph-scope": "attn",
    "--distribute-saved-activations": "--recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1 --language tp=2,pp=2",
    "--end-weight-decay": "0.1 --start-weight-decay 0 --weight-decay-incr-style linear",
    "--exit-signal": "SIGINT",
    "--fp16-lm-cross-entropy": "--fp16",
    "--fp32-residual-connection": "--bf16",
    "--hybrid-layer-pattern": STAGES,
    "--inference-cuda-graph-scope": "none",
    "--log-memory-interval": "100",
    "--lr-decay-samples": "64 --train-samples 64",
    "--lr-warmup-samples": "32 --train-samples 64",
    "--min-lr": "0.0001",
    "--moe-enable-deepep": "--moe-token-dispatcher-type flex",
    "--moe-router-group-topk": "2 --moe-router-num-groups 4",
    "--moe-router-padding-for-fp8": "--fp8-format hybrid --fp8-recipe tensorwise",
    "--moe-router-score-function": "softmax --no-moe-router-enable-expert-bias",
    "--mtp-num-layers": "1 --hybrid-layer-pattern MEM*|MEM*/E*",
    "--optimizer-cpu-offload": "--use-precision-aware-optimizer --bf16",
    "--overlap-p2p-communication-warmup-flush": f"--language {LAYOUT},vpp=2",
    "--quick-geglu": "--no-squared-relu",
    "--recompute-granularity": "full --recompute-method uniform",
    "--rope-fusion": "--position-embedding-type rope",
    "--start-weight-decay": "0 --end-weight-decay 0.1 --weight-decay-incr-style linear",
    "--step-batch-size-schedule": "0:32",
    "--swiglu": "--no-squared-relu",
    "--te-precision-config-file": "recipe.yaml",
    "--use-rotary-position-embeddings": "--no-rope-fusion",
    "--weight-decay-incr-style": "linear --start-weight-decay 0 --end-weight-decay 0.1",
}
"""Values of options for which no rule finds one, and the options that they need beside them."""

OVERRULED = {
    "--no-weight-decay-cond-type": "deprecated: it has become --apply-wd-to-qk-layernorm",
    "--recompute-activations": "deprecated: it has become --recompute-granularity selective",
    "--cuda-graph-scope": "deprecated: it has become --cuda-graph-modules",
    "--async-strategy": "without --async-save, Megatron leaves nothing to choose",
}
"""Options that lose their value, and why that is right."""

NOT_HERE = r"(?i)transformer.engine|\bTE\b|compute capability"
"""Words of a refusal for want of what this machine lacks."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}


def _plain(value):
    """Bring a value to one form; Megatron has it as text, as its meaning, or in a list."""
    if isinstance(value, list) and len(value) == 1:
        return _plain(value[0])
    return DTYPES.get(value, value) if isinstance(value, str) else getattr(value, "name", value)


def _line(action, now):
    """Words for an option with another value than ``now``, or with the same size of a layout."""
    option = action.option_strings[0]
    if option in VALUES:
        return [option, *VALUES[option].split()]
    if isinstance(action, argparse.BooleanOptionalAction):
        return [action.option_strings[1 if now else 0]]
    if action.nargs == 0:
        return [option]
    if action.dest in SIZES["language"].values():
        return [option, str(now)]
    if action.choices:
        value = next(str(choice) for choice in action.choices if _plain(choice) != _plain(now))
    elif action.type in (int, float):
        value = str(action.type(now / 2 if action.type is float else now * 2) if now else 2)
    else:
        value = "2" if action.type else "x"
    return [option] + [value] * (action.nargs if isinstance(action.nargs, int) else 1)


def _wrong(parser, action, line, base, refused):
    """Say what is wrong with an option; None if nothing is."""
    option, known = line[0], parser._option_string_actions
    # An option that this device has not turned on cannot be turned off.
    line = [word for word in line if word in known or not word.startswith("--no-")]
    given = getattr(parser.parse_args(line), action.dest)
    try:
        args = Run.of([*base, *line], RANKS).args
    except UserError as refusal:
        named = [word for word in line if word.startswith("--")] + [action.dest, option[2:]]
        is_named = any(name in str(refusal) for name in named)
        is_right = is_named or re.search(NOT_HERE, str(refusal))
        if option in refused:
            is_right = is_named and " is not taken here: " in str(refusal)
        return None if is_right else f"{option}: {refusal}"
    if option in refused:
        return f"{option} is taken"
    found = getattr(args, action.dest, None)
    kept = _plain(found) == _plain(given)
    return None if kept is (option not in OVERRULED) else f"{option}: {given!r} became {found!r}"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_an_option_that_is_taken_keeps_its_value(device, monkeypatch, tmp_path):
    (tmp_path / "recipe.yaml").write_text("configs: {}\nmatchers: {}\n")
    monkeypatch.chdir(tmp_path)
    base = ["--device", device, "--language", LAYOUT]
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    theirs = {action.dest for action in parser._actions if action.dest != "help"}
    known = list(parser._option_string_actions)
    add_options(parser, OwnOptions)
    set_defaults(parser, defaults(tiny(), device, packs=False))
    before = vars(Run.of(base, RANKS).args)
    on_cpu = NEEDS_GPU.split() if device == "cpu" else []
    refused, wrong = [*" ".join(WHEREVER_SET.values()).split(), *on_cpu], []
    for action in parser._actions:
        if action.dest in theirs and {*action.option_strings} & {*(on_cpu or known)}:
            with monkeypatch.context() as patch, redirect_stdout(StringIO()):
                patch.setattr(os, "environ", dict(os.environ))
                line = _line(action, before.get(action.dest))
                wrong.append(_wrong(parser, action, line, base, refused))
    assert len(wrong) > (10 if on_cpu else 700)
    assert not "\n".join(filter(None, wrong))


ELSEWHERE = r"""/(inference|rl|datasets|tokenizers|legacy|post_training|export|megatron_fsdp)/|
    models/(gpt|bert|T5|vision)/|training/(arguments|yaml_arguments|argument_utils|config/.*)\.py"""
"""Loaded modules of Megatron's that this program does not run, or that only pass options on."""

RENAMED = """--no-weight-decay-cond-type --recompute-activations --no-bias-swiglu-fusion
    --use-flash-attn --use-mcore-models --use-dist-ckpt --dist-ckpt-format
    --ckpt-fully-parallel-save --grad-reduce-in-bf16 --cuda-graph-scope --disable-msc"""
"""Options that Megatron passes on by another name, or whose deprecation it says itself."""


def test_an_option_that_is_taken_is_read_by_code_that_runs():
    elsewhere, read = re.compile(re.sub(r"\s", "", ELSEWHERE)), set()
    for name, module in list(sys.modules.items()):
        file, ours = getattr(module, "__file__", None), ("megatron.", "examples.mimo.")
        if file and name.startswith(ours) and not elsewhere.search(file):
            read |= set(re.findall(r"\w+", Path(file).read_text()))
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    idle = idle_options(parser)
    taken = [a for a in parser._actions if a.option_strings and a.option_strings[0] not in idle]
    assert len(taken) > 400
    unread = {a.option_strings[0] for a in taken if a.dest not in read}
    assert unread <= {*RENAMED.split(), "-h"}
