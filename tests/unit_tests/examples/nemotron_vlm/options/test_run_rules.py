# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Each rule refuses its own example, before all other rules."""

import argparse
import re
import shlex

import pytest

from examples.mimo.common.errors import UserError
from examples.mimo.common.megatron_rules import FAMILIES, IN_OTHERS, OF_MEGATRON
from examples.mimo.common.rules import check
from examples.mimo.nemotron_vlm.options import run
from examples.mimo.nemotron_vlm.options.rules import RULES
from examples.mimo.nemotron_vlm.options.run import Run
from megatron.training.arguments import add_megatron_arguments
from tests.unit_tests.examples.nemotron_vlm import preloaded  # noqa: F401 (its parser is quick)

ONLY_ON_MAIN = ("--mtp-hsm", "--save-tokenizer-assets", "--tp-only-amax-red")
"""Refused options that upstream's main has, and its releases do not."""
WALKED = [rule for rule in RULES if rule not in FAMILIES]


@pytest.mark.parametrize("rule", WALKED, ids=lambda rule: rule.example or rule.title)
def test_a_rule_refuses_its_example(rule, monkeypatch, hopper):
    """It is the first rule that the example breaks, so no other rule hides it."""

    def checked(made, rules):
        assert next(each for each in rules if each is rule or each.is_broken(made)) is rule
        check(made, [rule])

    monkeypatch.setattr(run, "check", checked)
    with pytest.raises(UserError) as refusal:
        Run.of(shlex.split(rule.example or rule.title), 2)
    text = str(refusal.value)
    assert text and text.startswith(rule.title) and not re.search(r"[\n{}]", text)


def parsed(line: str, world: int = 2) -> Run:
    return Run.of(shlex.split(line), world)


ENGINE = "--device cuda --transformer-impl transformer_engine"
GRAPHS = f"{ENGINE} --cuda-graph-impl local"
FP8 = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise"
PACK = "--pack --micro-batch-size 1 --seq-length 64"
COUNTS = f"{GRAPHS} --data mock --moe-grouped-gemm --cuda-graph-modules attn moe"
CLIPS = "--model tiny-omni --dynamic-resolution"
LINES = [
    ("--hidden-dropout 2", "^--hidden-dropout must be below 1$"),
    ("--moe-router-topk 9", "^--moe-router-topk 9 must be at most --num-experts 8$"),
    (f"{ENGINE} --bf16 --pack --tensor-model-parallel-size 0", "-size must be 1 or more$"),
    ("--dry-run 0", "^--plan N and --dry-run RANKS .* take 1 or more"),
    ("--keep-best eval_loss --save s", "^--keep-best without --save and --eval-iters"),
    ("--dynamic-resolution-max-patches 8", "-min-patches and -max-patches need --dynamic-res"),
    (f"{CLIPS} --video-target-num-patches 3", "--video-target-num-patches must be 4 or more, not"),
    (f"{CLIPS} --video-fps 0", "^--video-fps must be above 0"),
    ("--dynamic-resolution --dynamic-resolution-min-patches 97", "97 must be from 4 to .* 96"),
    ("--tokenizer-type SentencePieceTokenizer", "^--tokenizer-type is not taken here: nothing"),
    ("--pack --eval-iters 1 --eval-micro-batch-size 2", "one row a microbatch"),
    ("--mtp-num-layers 1", "^--num-layers or --mtp-num-layers of another number"),
    (
        f"{GRAPHS} --bf16 --data mock --hybrid-layer-pattern MEM*/E*",
        "multi-token prediction is not",
    ),
    (f"{GRAPHS} --bf16 {PACK} --cuda-graph-modules full", "a graph has one shape"),
    (f"{GRAPHS} --bf16 {PACK} --language cp=2 --global-batch-size 4", "a graph has one shape"),
    (f"{COUNTS} {FP8}", "^--cuda-graph-modules moe needs token counts that"),
    (f"{COUNTS} --bf16 --moe-token-dispatcher-type alltoall", "moe needs token counts that"),
    (f"{COUNTS} --moe-token-dispatcher-type allgather", "moe needs token counts that"),
    (f"{COUNTS} --fp16", "moe needs token counts that"),
    (f"{ENGINE} --pack --micro-batch-size 1", "in fp32 with --pack.* add --bf16, or choose local"),
    (f"{ENGINE} --dynamic-resolution", "in fp32 with --pack, --dynamic-resolution or"),
    (f"{ENGINE} --dynamic-resolution --bf16 --encoder-attention flash4", "is not installed"),
    ("--hybrid-layer-pattern MEX", "'X'"),
    ("--hybrid-layer-pattern ME*/E/M", "(?i)mtp"),
    ("--use-precision-aware-optimizer --device cuda", "(?i)transformer ?engine"),
    ("--exp-avg-dtype bf16", "exp_avg_dtype can only be fp32 when not using precision-aware"),
    ("--language vpp=2", "vpp=2 needs pp of 2 or more"),
    ("--language cp=2 --context-parallel-size 1", "says cp=2, .*--context-parallel-size says 1"),
    ("--step-batch-size-schedule '0:8 1K:9'", "global batch 9"),
    ("--step-batch-size-schedule '0:8 1:16'", "^--step-batch-size-schedule"),
    ("--step-batch-size-schedule 0:x", "^--step-batch-size-schedule"),
    ("--exit-signal SIGNAL", "^'SIGNAL' is none of the values that its option takes"),
    ("--config", "^--config takes a FILE$"),
    ("--freeze encoder --encoder-lr 1e-4", "^--encoder-lr does nothing with --freeze encoder$"),
    ("--freeze encoder,projector,language", "nothing to train"),
    ("--fp8-parts encoder", "--fp8-parts does nothing without --fp8-format"),
    (
        f"{ENGINE} --bf16 --model tiny-omni --fp8-format hybrid --fp8-parts sound:encoder",
        "no such part; choose from encoder, language$",
    ),
]
"""Lines that no table of rules refuses, and more ways to break a rule."""


def test_lines_are_refused(hopper):
    for line, text in LINES:
        with pytest.raises(UserError) as refusal:
            parsed(line)
        assert re.search(text, str(refusal.value)) and "\n" not in str(refusal.value), line


def test_rules_of_other_programs_need_no_run_of_this_one():
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    others = [*FAMILIES, *OF_MEGATRON, *IN_OTHERS]
    known = {*parser._option_string_actions, *ONLY_ON_MAIN}
    assert not [rule.title for rule in others if rule.title.split()[0] not in known]
    line = "--cuda-graph-impl local --log-straggler --num-experts 8 --mtp-num-layers 1"
    made = argparse.Namespace(args=parser.parse_args(line.split()))
    made.args.device = "cuda"
    assert [rule for rule in others if rule.is_broken(made)][-3:] == IN_OTHERS


@pytest.mark.parametrize(
    "line",
    [
        "--no-dist-ckpt-optim-fully-reshardable --no-use-distributed-optimizer",
        "--linear-num-key-heads 0",  # no layer of the pattern has any
        "--encoder dp=4 --language tp=4 --placement non-colocated --eval-micro-batch-size 1 "
        "--eval-global-batch-size 4",
    ],
)
def test_a_line_is_taken(line):
    parsed(line, 8 if "dp=4" in line else 1)
    if "dp=4" in line:
        with pytest.raises(UserError, match="^--eval-global-batch-size 4.*the 1 samples"):
            parsed(f"{line} --eval-iters 1", 8)
