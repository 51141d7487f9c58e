# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Each rule of the table refuses its own example, before all other rules."""

import argparse
import shlex

import pytest

from examples.mimo.common import megatron_rules
from examples.mimo.common.errors import UserError
from examples.mimo.common.megatron_rules import IN_OTHERS, OF_MEGATRON
from examples.mimo.common.option_group import add_options
from examples.mimo.common.refused_options import FAMILIES, ONLY_ON_MAIN
from examples.mimo.common.rules import Rule, check
from examples.mimo.nemotron_vlm.options import run
from examples.mimo.nemotron_vlm.options.own_options import OwnOptions
from examples.mimo.nemotron_vlm.options.rules import RULES
from examples.mimo.nemotron_vlm.options.run import Run
from megatron.training.arguments import add_megatron_arguments, validate_args
from megatron.training.training import get_megatron_optimizer_config
from tests.unit_tests.examples.nemotron_vlm import preloaded  # noqa: F401 (its parser is quick)

WALKED = [rule for rule in RULES if rule not in FAMILIES and rule.example is not None]


@pytest.mark.parametrize("rule", WALKED, ids=lambda rule: rule.example or rule.title)
def test_a_rule_refuses_its_example(rule, monkeypatch, hopper):
    """It is the first rule that the example breaks, so no other rule hides it."""
    monkeypatch.setattr(megatron_rules, "find_spec", {"wandb": "there"}.get)
    broken = []

    def checked(made: Run, table: list[Rule]) -> None:
        broken.extend(each for each in table if each is rule or not broken and each.is_broken(made))
        check(made, [rule])

    monkeypatch.setattr(run, "check", checked)
    with pytest.raises(UserError) as refusal:
        Run.of(shlex.split(rule.example or rule.title), 2)
    assert broken == [rule]
    text = str(refusal.value)
    assert "\n" not in text and text.startswith(rule.title if rule.why else "")


ENGINE = "--device cuda --transformer-impl transformer_engine"
GRAPHS = f"{ENGINE} --cuda-graph-impl local"
FP8 = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise"
PACK = "--pack --micro-batch-size 1 --seq-length 64"
CLIPS = "--model tiny-omni --dynamic-resolution"
MORE = [
    ("--softmax-type learnable --device cuda --bf16", "^--softmax-type"),
    ("--moe-router-load-balancing-type sinkhorn", "^--moe-router-load-balancing-type sinkhorn"),
    ("--quick-geglu --swiglu --no-squared-relu", "^--quick-geglu is not taken here"),
    ("--tokenizer-type SentencePieceTokenizer", "^--tokenizer-type is not taken here: nothing"),
    ("--dino-teacher-temp 0.1", "^--dino-teacher-temp is not taken here"),
    ("--yaml-cfg options.yaml", "^--yaml-cfg is not taken here: options come from the command"),
    (
        f"--fp8-recipe delayed {FP8} --placement non-colocated {ENGINE} --fp8-recipe delayed",
        "^--fp",
    ),
    (
        f"{GRAPHS} --data mock --micro-batch-size 4 --eval-micro-batch-size 8 --eval-iters 1",
        "--eval-micro-batch-size 8 must be 4 or less",
    ),
    (
        f"{GRAPHS} --data mock --language dp=2 --global-batch-size 24 --encoder-macro-batch 2",
        "--encoder-macro-batch 2 must divide the 3 microbatches",
    ),
    (f"{GRAPHS} --bf16 {PACK} --cuda-graph-modules full", "a graph has one shape"),
    (f"{GRAPHS} --bf16 {PACK} --language cp=2 --global-batch-size 4", "a graph has one shape"),
    (f"{ENGINE} --pack --micro-batch-size 1", "in fp32 with --pack.* add --bf16, or choose local"),
    (f"{ENGINE} --dynamic-resolution", "in fp32 with --pack, --dynamic-resolution or"),
    (f"{ENGINE} --bf16 --encoder-attention flash4", "flash4 needs --dynamic-resolution"),
    (f"{ENGINE} --dynamic-resolution --bf16 --encoder-attention flash4", "is not installed"),
    (
        "--language tp=2 --distribute-saved-activations --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1",
        "distribute_saved_activations.*sequence parallel",
    ),
    ("--dry-run 0", "^--plan N and --dry-run RANKS take 1 or more"),
    ("--hybrid-layer-pattern MEX", "'X'"),
    ("--hybrid-layer-pattern ME*/E/M", "(?i)mtp"),
    ("--seq-length 0 --step-batch-size-schedule 0:32", "^--step-batch-size-schedule"),
    (f"{ENGINE} --bf16 --pack --tensor-model-parallel-size 0", "-size must be 1 or more$"),
    ("--language vpp=2", "vpp=2 needs pp of 2 or more"),
    ("--language tp=3", "tp=3 must divide the 8 attention heads. Nearest that fit"),
    ("--language cp=2 --context-parallel-size 1", "says cp=2, .*--context-parallel-size says 1"),
    ("--encoder pp=2", "takes tp and dp only.*Nearest that fit: tp=1,dp=2"),
    ("--dynamic-resolution-max-patches 8", "-min-patches and -max-patches need --dynamic-res"),
    ("--dynamic-resolution --video-target-num-patches 9", "need --dynamic-resolution and a --mo"),
    (f"{CLIPS} --video-target-num-patches 3", "--video-target-num-patches must be 4 or more, not"),
    (f"{CLIPS} --video-fps 0", "^--video-fps must be above 0"),
    ("--dynamic-resolution --dynamic-resolution-min-patches 97", "97 must be from 4 to .* 96"),
    ("--step-batch-size-schedule '0:8 1K:9'", "global batch 9"),
    (f"{PACK} --eval-iters 1 --eval-micro-batch-size 2", "--eval-micro-batch-size must be 1"),
    ("--train-iters 0", "^--train-iters must be 1 or more$"),
    ("--hidden-dropout 2", "^--hidden-dropout must be below 1$"),
    ("--hidden-dropout -1", "^--hidden-dropout must be 0 or more$"),
    ("--adam-beta2 nan", "^--adam-beta2 must be 0 or more$"),
    ("--lr-warmup-init 1", "^--lr-warmup-init 1.0 must be at most --lr 0.002$"),
    ("--tensor-model-parallel-size 0", "^--tensor-model-parallel-size must be 1 or more$"),
    ("--eval-micro-batch-size 0", "^--eval-micro-batch-size must be 1 or more$"),
    ("--moe-router-topk 9", "^--moe-router-topk 9 must be at most --num-experts 8$"),
    ("--num-attention-heads 7", "-heads 7 must be a multiple of --num-query-groups 4$"),
    ("--exit-signal SIGNAL", "^'SIGNAL' is none of the values that its option takes"),
    ("--config", "^--config takes a FILE$"),
    ("--freeze encoder --encoder-lr 1e-4", "^--encoder-lr does nothing with --freeze encoder$"),
    ("--encoder images:dp=2 --encoder images:tp=2", "images is given twice; give each encoder"),
    ("--freeze encoder,projector,language", "nothing to train"),
    ("--projector-lr -1", "--projector-lr must be 0 or more"),
    ("--fp8-parts encoder", "--fp8-parts does nothing without --fp8-format"),
    (
        f"{ENGINE} --bf16 --model tiny-omni --fp8-format hybrid --fp8-parts sound:encoder",
        "no such part; choose from encoder, language$",
    ),
    *(
        (f"--step-batch-size-schedule '{schedule}'", "^--step-batch-size-schedule")
        for schedule in ("8", "0:8 1K", "1K:8", "0:8 1:16", "0:x")
    ),
]
"""More lines that are refused: other values, other ways to break a rule, values that are none."""


def parsed(line: str, world: int = 2) -> Run:
    return Run.of(shlex.split(line), world)


@pytest.mark.parametrize(("line", "text"), MORE)
def test_a_line_is_refused(line, text):
    with pytest.raises(UserError, match=text) as refusal:
        parsed(line)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("package", "line", "cure"),
    [
        ("pynvml", "--log-straggler --device cuda --transformer-impl local", ""),
        ("wandb", "--wandb-project a --wandb-exp-name b --save s", ""),
        (
            "transformer_engine",
            "--use-precision-aware-optimizer --device cuda",
            "",
        ),
    ],
)
def test_an_option_needs_its_package(package, line, cure, monkeypatch):
    monkeypatch.setattr(megatron_rules, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=f"^{line.split()[0]} is not taken here: .*not installed|pip"
    ):
        parsed(line)
    if not cure:
        monkeypatch.setattr(megatron_rules, "find_spec", lambda name: name)
    parsed(f"{line} {cure}")


def test_every_title_begins_with_an_option_of_megatrons_or_ours():
    """Rules for other programs read Megatron's options alone."""
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    theirs = {*parser._option_string_actions, *ONLY_ON_MAIN}
    others = [*FAMILIES, *OF_MEGATRON, *IN_OTHERS]
    assert not [rule.title for rule in others if rule.title.split()[0] not in theirs]
    add_options(parser, OwnOptions)
    known = theirs | {*parser._option_string_actions}
    titles = {rule.title.split()[0] for rule in RULES if rule.why}
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
