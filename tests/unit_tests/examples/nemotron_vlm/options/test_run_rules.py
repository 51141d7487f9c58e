# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Each rule refuses its own example, before all other rules; defaults follow from the device, the
layout and CUDA graphs."""

import argparse
import os
import re
import shlex

import pytest
import torch

from examples.mimo.common.errors import UserError
from examples.mimo.common.megatron_rules import FAMILIES, IN_OTHERS, OF_MEGATRON
from examples.mimo.common.rules import check
from examples.mimo.nemotron_vlm.options import derived, run
from examples.mimo.nemotron_vlm.options.rules import RULES
from examples.mimo.nemotron_vlm.options.run import Run
from examples.mimo.nemotron_vlm.planner.plan import plan_of
from megatron.training.arguments import add_megatron_arguments
from megatron.training.training import get_megatron_optimizer_config
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
LOCAL = "--transformer-impl local --device cuda"
LINES = [
    ("--hidden-dropout 2", "^--hidden-dropout must be below 1$"),
    ("--moe-router-topk 9", "^--moe-router-topk 9 must be at most --num-experts 8$"),
    (f"{ENGINE} --bf16 --pack --tensor-model-parallel-size 0", "-size must be 1 or more$"),
    ("--decoupled-lr -1", "^--decoupled-lr must be 0 or more$"),
    ("--tensorboard-log-interval 0", "^--tensorboard-log-interval must be 1 or more$"),
    ("--fp16 --hysteresis 0", "^--hysteresis must be 1 or more$"),
    ("--fp16 --initial-loss-scale 2 --min-loss-scale 4", "4.0 must be above 0, and at most --ini"),
    (
        "--start-weight-decay 0.1 --end-weight-decay 0 --weight-decay-incr-style linear",
        "^--start-weight-decay 0.1 must be at most --end-weight-decay 0.0$",
    ),
    ("--lr-decay-style WSD", "^--lr-decay-style WSD needs --lr-wsd-decay-iters"),
    (
        "--train-samples 64 --lr-decay-style WSD --lr-wsd-decay-iters 2",
        "^--lr-decay-style WSD needs --lr-wsd-decay-samples",
    ),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 21", "-iters 21 must be at most 20"),
    ("--train-samples 64 --lr-warmup-samples 64", "^--lr-warmup-samples .* 64 must be less than"),
    ("--dry-run 0", "^--plan N and --dry-run RANKS .* take 1 or more"),
    ("--keep-best eval_loss --save s", "^--keep-best without --save and --eval-iters"),
    ("--dynamic-resolution-max-patches 8", "-min-patches and -max-patches need --dynamic-res"),
    (f"{CLIPS} --video-target-num-patches 3", "--video-target-num-patches must be 4 or more, not"),
    ("--dynamic-resolution --dynamic-resolution-min-patches 97", "97 must be from 4 to .* 96"),
    ("--tokenizer-type SentencePieceTokenizer", "^--tokenizer-type is not taken here: nothing"),
    ("--qk-clip-threshold 50", "^--qk-clip-threshold is not taken here: nothing"),
    ("--tp-comm-overlap-cfg x.yaml", "^--tp-comm-overlap-cfg is not taken here: nothing"),
    ("--validation-set-names a", "^--validation-set-names is not taken .* one held-out set"),
    ("--pipeline-model-parallel-comm-backend ucc", "-backend is not taken here: process groups"),
    ("--pack --eval-iters 1 --eval-micro-batch-size 2", "one row a microbatch"),
    ("--mtp-num-layers 1", "^--num-layers or --mtp-num-layers of another number"),
    (
        f"{GRAPHS} --bf16 --data mock --hybrid-layer-pattern MEM*/E*",
        "multi-token prediction is not",
    ),
    (f"{GRAPHS} --bf16 {PACK} --cuda-graph-modules full", "a graph has one shape"),
    (f"{COUNTS} {FP8}", "^--cuda-graph-modules moe needs token counts that"),
    (f"{ENGINE} --pack --micro-batch-size 1", "in fp32 with --pack.* add --bf16, or choose local"),
    (f"{ENGINE} --dynamic-resolution --bf16 --encoder-attention flash4", "is not installed"),
    ("--exp-avg-dtype bf16", "exp_avg_dtype can only be fp32 when not using precision-aware"),
    ("--language cp=2 --context-parallel-size 1", "says cp=2, .*--context-parallel-size says 1"),
    ("--step-batch-size-schedule '0:8 1K:9'", "global batch 9"),
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


@pytest.mark.parametrize("device", ["--device cpu", f"{LOCAL} --bf16 --dry-run 1"])
def test_recomputation_chooses_its_modules_if_none_is_named(device):
    assert plan_of(parsed(f"{device} --recompute-granularity selective", 1)).recompute == "none"


def test_batches_of_evaluation_need_fit_only_if_there_are_any():
    line = "--encoder dp=4 --language tp=4 --placement non-colocated"
    line += " --eval-micro-batch-size 1 --eval-global-batch-size 4"
    parsed(line, 8)
    with pytest.raises(UserError, match="^--eval-global-batch-size 4.*the 1 samples"):
        parsed(f"{line} --eval-iters 1", 8)


GROUPED = "--device cuda --data mock --moe-grouped-gemm --bf16"
RECOMPUTE = "--recompute-granularity selective --recompute-modules moe_act"
MOCK = f"{GRAPHS} --data mock"
PLAIN = f"{ENGINE} --bf16"
SAVES = "--device cuda --save saved"
OFFLOAD = "--optimizer-cpu-offload --use-precision-aware-optimizer"
CP = "--data digits --bf16 --language cp=2"
GROWS = "--step-batch-size-schedule '0:16 1K:32' --micro-batch-size 4"  # after 31 samples of 32

FACTS = {
    # With graphs, macro-batches divide a step.
    "at once": lambda run: run.args.encoder_macro_batch,
    # With allgather, token counts stay on the device, which is faster.
    "dispatcher": lambda run: run.args.moe_token_dispatcher_type,
    # Packed rows are contiguous where states pass.
    "tokens": lambda run: run.args.linear_cp_layout,
    # Collectives overlap unless the host may load kernels amid them.
    "overlap": lambda run: run.args.overlap_grad_reduce + run.args.overlap_param_gather,
    # Without the preparation of the dispatch, graphs of routers do not join the stream of counts.
    "graphs": lambda run: " ".join(part.name for part in run.configs.language.cuda_graph_modules),
    # Encoders have graphs only if a backward follows; the language model has them in any case.
    "encoder": lambda run: {part.cuda_graph_impl for part in run.configs.encoders[0].values()},
    "language": lambda run: run.configs.language.cuda_graph_impl,
    "asynchronous": lambda run: run.args.async_save + run.args.use_persistent_ckpt_worker,
    # With a pipeline each microbatch has graphs of its own, whose FP8 weights would grow old.
    "no FP8 weights kept": lambda run: run.configs.language.disable_parameter_transpose_cache,
    # cuDNN makes a kernel for each number of tokens; Transformer Engine reads the variables.
    "cuDNN": lambda _: {os.environ.get(f"NVTE_NORM_{way}_USE_CUDNN") for way in ("FWD", "BWD")},
    # Megatron's fused one rounds the gradients of the logits to bfloat16, in any precision.
    "loss": lambda run: (run.args.loss_kernel, run.args.cross_entropy_loss_fusion),
    "loss without a kernel": lambda run: FACTS["loss"](run),
    # Else Transformer Engine's Adam saves 16 bits of each, beside those in the model's weight, and
    # a run with another optimizer takes them for its master weights.
    "whole": lambda run: get_megatron_optimizer_config(run.args)[0].store_param_remainders,
    # A growing batch decays alike in every layout.
    "decay": lambda run: (
        *(run.args.global_batch_size, run.args.eval_global_batch_size),
        run.args.lr_decay_iters,
    ),
}


@pytest.mark.parametrize(
    ("line", "ranks", "fact", "expected"),
    [
        (LOCAL, 2, "at once", 2),
        ("--transformer-impl local", 2, "at once", 1),
        (f"{LOCAL} --global-batch-size 8", 2, "at once", 1),  # a step of one microbatch
        (f"{LOCAL} --language pp=2", 2, "at once", 1),
        (f"{MOCK} --language pp=2", 4, "at once", 1),
        (f"{MOCK} --language dp=4 --global-batch-size 48", 4, "at once", 1),  # of three
        (GROUPED, 4, "dispatcher", "allgather"),
        (f"{GROUPED} --language ep=2", 4, "dispatcher", "alltoall"),
        (f"{GROUPED} {GRAPHS} --language tp=2,ep=2,etp=1", 4, "dispatcher", "allgather"),
        (f"{GROUPED} {GRAPHS} --language ep=4", 4, "dispatcher", "alltoall"),
        (f"{GROUPED} --moe-shared-expert-overlap", 4, "dispatcher", "alltoall"),
        (f"{GROUPED} {RECOMPUTE}", 4, "dispatcher", "alltoall"),
        (f"{GROUPED} {ENGINE} {FP8}", 4, "dispatcher", "alltoall"),
        (f"{GROUPED} {ENGINE} {FP8} --fp8-parts encoder", 4, "dispatcher", "allgather"),
        (f"{GROUPED} --placement non-colocated --language dp=2", 4, "dispatcher", "alltoall"),
        (CP, 4, "tokens", "zigzag"),
        (f"{CP} {PACK}", 4, "tokens", "contiguous"),
        (f"{PLAIN} --dynamic-resolution", 1, "overlap", 2),
        (f"{PLAIN} {MOCK}", 1, "overlap", 2),
        (f"{PLAIN} {MOCK} --dynamic-resolution", 1, "overlap", 0),
        (f"{PLAIN} {GRAPHS} --data digits", 1, "overlap", 0),
        (MOCK, 1, "graphs", "attn mamba moe_router moe_preprocess"),
        (
            *(f"{MOCK} --cuda-graph-modules moe_router attn", 1),
            *("graphs", "moe_router attn moe_preprocess"),
        ),
        (
            *(f"{MOCK} --bf16 --pack --moe-token-dispatcher-type alltoall", 1),
            *("graphs", "mamba moe_router moe_preprocess"),
        ),
        (MOCK, 1, "encoder", {"local"}),
        (f"{MOCK} --freeze encoder", 1, "encoder", {"none"}),
        (f"{MOCK} --freeze encoder", 1, "language", "local"),
        ("--device cuda", 1, "asynchronous", 0),  # nothing is saved
        (SAVES, 1, "asynchronous", 2),
        (f"{SAVES} --exit-signal-handler --exit-signal SIGUSR1", 1, "asynchronous", 2),
        (f"{SAVES} --exit-signal-handler", 1, "asynchronous", 0),
        (f"{SAVES} --bf16 --dry-run 1 {OFFLOAD}", 1, "asynchronous", 0),
        (f"{GRAPHS} {FP8} --language pp=1", 2, "no FP8 weights kept", False),
        (f"{GRAPHS} {FP8} --language pp=2", 2, "no FP8 weights kept", True),
        (f"{LOCAL} --data mock", 1, "cuDNN", {"1"}),
        (f"{LOCAL} --model tiny-omni --dynamic-resolution", 1, "cuDNN", {None}),
        (f"{LOCAL} --bf16", 1, "loss", (True, False)),
        (f"{LOCAL} --bf16", 1, "loss without a kernel", (False, True)),
        (f"{LOCAL} --fp16", 1, "loss without a kernel", (False, False)),
        ("", 2, "whole", True),
        (f"{GROWS} --train-iters 4", 1, "decay", (16, 16, 6)),  # two steps of 16 samples, two of 32
        (f"{GROWS} --train-iters 4", 4, "decay", (16, 16, 6)),
    ],
)
def test_a_default_follows_from_other_options(line, ranks, fact, expected, hopper, monkeypatch):
    monkeypatch.setattr(derived, "has_loss_kernel", lambda: "without" not in fact)
    assert FACTS[fact](parsed(line, ranks)) == expected


def test_saves_are_synchronous_where_memory_has_segments_that_grow(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert not parsed(SAVES, 1).args.async_save


@pytest.mark.parametrize("generation", [8, 10])
def test_token_counts_stay_on_the_host_of_other_gpus(generation, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (generation, 0))
    assert parsed(GROUPED, 4).args.moe_token_dispatcher_type == "alltoall"
