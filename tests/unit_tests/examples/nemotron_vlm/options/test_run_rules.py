# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Each rule refuses its own example, before all other rules."""

import argparse
import ast
import inspect
import re
import shlex

import pytest

from examples.mimo.common import megatron_rules
from examples.mimo.common.errors import UserError
from examples.mimo.common.megatron_rules import IN_OTHERS, OF_MEGATRON
from examples.mimo.common.option_group import add_options
from examples.mimo.common.refused_options import FAMILIES, ONLY_ON_MAIN
from examples.mimo.common.rules import check, refusals
from examples.mimo.nemotron_vlm.options import rules, run, value_rules
from examples.mimo.nemotron_vlm.options.own_options import OwnOptions
from examples.mimo.nemotron_vlm.options.rules import RULES
from examples.mimo.nemotron_vlm.options.run import Run
from megatron.training.arguments import add_megatron_arguments, validate_args
from megatron.training.training import get_megatron_optimizer_config
from tests.unit_tests.examples.nemotron_vlm import preloaded  # noqa: F401 (its parser is quick)

WALKED = [rule for rule in RULES if rule not in FAMILIES and rule.example is not None]


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    """Options find wandb installed, and no other package that they need."""
    monkeypatch.setattr(megatron_rules, "find_spec", {"wandb": "there"}.get)


@pytest.mark.parametrize("rule", WALKED, ids=lambda rule: rule.example or rule.title)
def test_a_rule_refuses_its_example(rule, monkeypatch, hopper):
    """It is the first rule that the example breaks, so no other rule hides it."""

    def checked(found):
        made = found.gi_frame.f_locals["run"]
        assert next(each for each in RULES if each is rule or each.is_broken(made)) is rule
        check(refusals(made, [rule]))

    monkeypatch.setattr(run, "check", checked)
    with pytest.raises(UserError) as refusal:
        Run.of(shlex.split(rule.example or rule.title), 2)
    text = str(refusal.value)
    assert "\n" not in text and text.startswith(rule.title)


def parsed(line: str, world: int = 2) -> Run:
    return Run.of(shlex.split(line), world)


ENGINE = "--device cuda --transformer-impl transformer_engine"
GRAPHS = f"{ENGINE} --cuda-graph-impl local"
FP8 = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise"
PACK = "--pack --micro-batch-size 1 --seq-length 64"
CLIPS = "--model tiny-omni --dynamic-resolution"
LINES = [
    ("--plan 4 --dry-run 4", "^--plan N and --dry-run RANKS take 1 or more"),
    ("--model tiny --video-frames 3", "need --dynamic-resolution and a --model with video"),
    ("--report r.html --eval-iters 1", "^--report shows .*: add --metrics-out FILE"),
    ("--wandb-project a", "^--wandb-project needs --wandb-exp-name NAME"),
    ("--save s --save-interval 300 --save-retain-interval 500", "500 must be .*; nearest: 600"),
    ("--keep-best eval_loss --save s", "^--keep-best needs --save DIR and --eval-iters N"),
    ("--lr nan", "^--lr must be 0 or more$"),
    ("--hidden-dropout 2", "^--hidden-dropout must be below 1$"),
    ("--moe-router-topk 9", "^--moe-router-topk 9 must be at most --num-experts 8$"),
    (f"{ENGINE} --lora-dim 4", "^--lora-dim 4 must be a multiple of 8 on GPUs"),
    ("--num-attention-heads 7", "-heads 7 must be a multiple of --num-query-groups 4$"),
    (
        "--keep-best eval_loss --save s --eval-iters 1 --eval-interval 3 --save-interval 2",
        "--save-interval 2 must divide --eval-interval 3",
    ),
    ("--report r.png --metrics-out m --eval-iters 1", "must end in .html"),
    ("--pack --micro-batch-size 2", "--micro-batch-size must be 1"),
    ("--pack --seq-length 64 --sample-multiple 24", "24 must divide --seq-length 64"),
    ("--train-samples 10", "^--train-samples 10 must be 32 or more"),
    ("--train-iters 6 --lr-warmup-iters 6", "^--lr-warmup-iters 6 must be less than 6 steps"),
    ("--global-batch-size 30", "the global batch 30 must be a multiple of"),
    ("--language pp=2 --encoder-macro-batch 2", "^--encoder-macro-batch needs --placement"),
    (
        f"{GRAPHS} --data mock --language dp=2 --global-batch-size 24 --encoder-macro-batch 2",
        "--encoder-macro-batch 2 must divide the 3 microbatches",
    ),
    ("--num-distributed-optimizer-instances 2 --language tp=2", "2 must divide dp=1"),
    ("--pack --seq-length 64 --sample-multiple 2 --language cp=2", "needs a multiple of 4"),
    ("--encoder-attention flash4", "^--encoder-attention flash4 needs --device cuda"),
    ("--fp16 --bf16", "^Megatron asks for: not --bf16$"),
    ("--pack --eval-iters 1 --eval-micro-batch-size 2", "--eval-micro-batch-size must be 1"),
    (
        f"{GRAPHS} --data mock --micro-batch-size 4 --eval-micro-batch-size 8 --eval-iters 1",
        "--eval-micro-batch-size 8 must be 4 or less",
    ),
    (
        "--language pp=2,vpp=2 --eval-iters 1 --eval-micro-batch-size 32",
        "^--eval-global-batch-size 32, .*-size 32: .* must divide the 1 microbatches",
    ),
    (f"{ENGINE} {FP8} --seq-length 40 --micro-batch-size 1", "= 40 tokens must be a multiple of"),
    (f"{ENGINE} {FP8} --hidden-size 72", "hidden size = 72 must be a multiple of 16"),
    ("--tokenizer-type SentencePieceTokenizer", "^--tokenizer-type is not taken here: nothing"),
    (
        f"--fp8-recipe delayed {FP8} --placement non-colocated {ENGINE} --fp8-recipe delayed",
        "^--fp",
    ),
    ("--mtp-num-layers 1", "^--num-layers or --mtp-num-layers of another number"),
    (
        f"{GRAPHS} --bf16 --data mock --hybrid-layer-pattern MEM*/E*",
        "multi-token prediction is not",
    ),
    (f"{GRAPHS} --bf16 {PACK} --cuda-graph-modules full", "a graph has one shape"),
    (f"{GRAPHS} --bf16 {PACK} --language cp=2 --global-batch-size 4", "a graph has one shape"),
    (f"{ENGINE} --pack --micro-batch-size 1", "in fp32 with --pack.* add --bf16, or choose local"),
    (f"{ENGINE} --dynamic-resolution", "in fp32 with --pack, --dynamic-resolution or"),
    (f"{ENGINE} --dynamic-resolution --bf16 --encoder-attention flash4", "is not installed"),
    ("--dry-run 0", "^--plan N and --dry-run RANKS take 1 or more"),
    ("--hybrid-layer-pattern MEX", "'X'"),
    ("--hybrid-layer-pattern ME*/E/M", "(?i)mtp"),
    (f"{ENGINE} --bf16 --pack --tensor-model-parallel-size 0", "-size must be 1 or more$"),
    ("--language vpp=2", "vpp=2 needs pp of 2 or more"),
    ("--language cp=2 --context-parallel-size 1", "says cp=2, .*--context-parallel-size says 1"),
    ("--dynamic-resolution-max-patches 8", "-min-patches and -max-patches need --dynamic-res"),
    (f"{CLIPS} --video-target-num-patches 3", "--video-target-num-patches must be 4 or more, not"),
    (f"{CLIPS} --video-fps 0", "^--video-fps must be above 0"),
    ("--dynamic-resolution --dynamic-resolution-min-patches 97", "97 must be from 4 to .* 96"),
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
"""Lines for each refusal that no table has, and for more ways to break a rule."""


def test_lines_are_refused_and_each_refusal_is_that_of_a_line(monkeypatch, hopper):
    said = set()

    def checked(found):
        refusal, inner = next(found), found
        while inner.gi_yieldfrom is not None:
            inner = inner.gi_yieldfrom
        said.add((inspect.getmodule(inner.gi_code), inner.gi_frame.f_lineno))
        raise UserError(refusal)

    monkeypatch.setattr(run, "check", checked)
    for line, text in LINES:
        with pytest.raises(UserError) as refusal:
            parsed(line)
        assert re.search(text, str(refusal.value)) and "\n" not in str(refusal.value), line
    for module in (rules, value_rules):
        nodes = ast.walk(ast.parse(inspect.getsource(module)))
        yields = {(module, node.lineno) for node in nodes if isinstance(node, ast.Yield)}
        assert yields and yields <= said, yields - said


@pytest.mark.parametrize(
    "line",
    [
        "--log-straggler --device cuda --transformer-impl local",
        "--wandb-project a --wandb-exp-name b --save s",
        "--use-precision-aware-optimizer --device cuda",
        "--enable-ft-package",
    ],
)
def test_an_option_needs_its_package(line, monkeypatch):
    monkeypatch.setattr(megatron_rules, "find_spec", lambda name: None)
    why = f"^{line.split()[0]}.* is not taken here: .*not installed"
    with pytest.raises(UserError, match=why):
        parsed(line)
    monkeypatch.setattr(megatron_rules, "find_spec", lambda name: name)
    parsed(line)


def test_every_title_begins_with_an_option_of_megatrons_or_ours():
    """Rules for other programs read Megatron's options alone."""
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    theirs = {*parser._option_string_actions, *ONLY_ON_MAIN}
    others = [*FAMILIES, *OF_MEGATRON, *IN_OTHERS]
    assert not [rule.title for rule in others if rule.title.split()[0] not in theirs]
    add_options(parser, OwnOptions)
    known = theirs | {*parser._option_string_actions}
    titles = {rule.title.split()[0] for rule in RULES}
    assert not {each for each in titles if not {each, each.replace("--no-", "--")} & known}


def test_rules_of_other_programs_need_no_run_of_this_one():
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    line = "--cuda-graph-impl local --log-straggler --num-experts 8 --mtp-num-layers 1"
    args = parser.parse_args(line.split())
    args.device = "cuda"
    made = argparse.Namespace(args=args)
    others = [*FAMILIES, *OF_MEGATRON, *IN_OTHERS]
    assert [rule for rule in others if rule.is_broken(made)][-3:] == IN_OTHERS


def test_what_megatron_sets_by_other_options_is_refused_too(monkeypatch):
    def validated(args, _defaults):
        args.optimizer = "muon"
        validate_args(args, _defaults)

    monkeypatch.setattr(run, "validate_args", validated)
    with pytest.raises(UserError, match="^--optimizer other than adam is not taken"):
        Run.of([], world_size=1)


def test_a_short_size_is_not_that_of_an_axis_whose_name_ends_alike():
    options = (
        "--language vpp=2,etp=1 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2"
    )
    assert str(parsed(options, 4).layouts.language) == "tp=2,pp=2,dp=1,etp=1,vpp=2"


def test_a_flag_that_a_preset_turns_on_has_an_opposite():
    assert parsed("").args.untie_embeddings_and_output_weights
    args = parsed("--no-untie-embeddings-and-output-weights --bias-linear").args
    assert not args.untie_embeddings_and_output_weights and args.add_bias_linear


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


def test_master_weights_are_whole():
    """Else Transformer Engine's Adam saves 16 bits of each, beside those in the model's weight,
    and a run with another optimizer takes them for its master weights."""
    config, _ = get_megatron_optimizer_config(parsed("").args)
    assert config.store_param_remainders


def test_a_growing_batch_decays_alike_in_every_layout():
    options = "--step-batch-size-schedule '0:16 1K:32' --micro-batch-size 4"
    for world in (1, 4):  # 1000 tokens are 31 samples of 32: two steps of 16 samples, two of 32
        args = parsed(f"{options} --train-iters 4", world).args
        assert (args.global_batch_size, args.lr_decay_iters) == (16, 6)
        assert args.eval_global_batch_size == 16
    assert parsed(f"{options} --lr-decay-iters 9", 1).args.lr_decay_iters == 9
    assert parsed(f"{options} --train-samples 96", 1).args.lr_decay_iters is None
