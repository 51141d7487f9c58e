# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Megatron's options that are refused by name; rows.py has those that are taken."""

import argparse
import shlex
import sys

import pytest

from examples.mimo.common import refusals
from examples.mimo.common.errors import UserError
from examples.mimo.common.refusals import IN_OTHERS, ONLY_ON_MAIN, REFUSALS
from examples.mimo.nemotron_vlm.options import arguments
from examples.mimo.nemotron_vlm.options.arguments import parse
from examples.mimo.nemotron_vlm.options.refusals import OF_OWN_OPTIONS, TURNED_BACK
from megatron.training.arguments import add_megatron_arguments, validate_args
from megatron.training.training import get_megatron_optimizer_config

ENGINE = "--device cuda --transformer-impl transformer_engine"
REFUSED = [
    "--cuda-graph-impl local",
    "--optimizer muon",
    "--ckpt-format torch",
    "--moe-token-dispatcher-type flex",
    "--fp8-format hybrid",
    "--transformer-impl transformer_engine",
    "--no-calculate-per-token-loss",
    "--no-dist-ckpt-optim-fully-reshardable",
    "--apply-layernorm-1p",
    "--dataloader-type cyclic",
    "--position-embedding-type mrope",
    "--window-size 4,0",
    "--linear-cp-mode headwise",
    "--softmax-type off-by-one",
    "--softmax-type learnable --device cuda --transformer-impl transformer_engine --bf16",
    "--attention-dropout 0.1",
    "--num-layers 2",
    "--mtp-num-layers 1",
    "--no-initialization",
    "--moe-latent-size 16",
    "--moe-layer-freq 2",
    "--moe-router-load-balancing-type quantile_balancing",
    "--moe-router-load-balancing-type sinkhorn",
    "--moe-router-load-balancing-type seq_aux_loss sinkhorn --moe-aux-loss-coeff 0.1 0.1",
    "--quick-geglu",
    "--quick-geglu --swiglu --no-squared-relu",
    "--enable-ft-package",
    "--tp-only-amax-red",
    "--tokenizer-type SentencePieceTokenizer",
    "--dino-teacher-temp 0.1",
    "--padded-vocab-size 80",
    "--muon-momentum 0.5",
    "--kv-lora-rank 4",
    "--use-nccl-ub",
    "--main-params-dtype fp16",
    "--exp-avg-sq-dtype bf16",
    "--cross-entropy-loss-fusion --device cuda --fp16",
    "--log-straggler --device cuda",
    "--yaml-cfg options.yaml",
    "--cp-comm-type a2a",
    "--exit-signal SIGTERM --exit-signal-handler --async-save --device cuda",
    "--optimizer-cpu-offload --use-precision-aware-optimizer --async-save --device cuda",
    "--moe-flex-dispatcher-backend ncclep --moe-token-dispatcher-type flex --device cuda --bf16",
    "--transformer-impl inference_optimized --device cuda --bf16",
    "--fp8-format hybrid --transformer-impl local --device cuda --bf16",
    f"--fp8-recipe delayed --fp8-format hybrid --language pp=2 {ENGINE} --bf16",
    f"--fp8-recipe delayed --fp8-format hybrid --placement non-colocated {ENGINE} --bf16",
]
"""Options that are refused under a condition; test_accepted_options.py has the others."""

GRAPHS = f"{ENGINE} --cuda-graph-impl local"
FP8 = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise"
PACK = "--pack --micro-batch-size 1 --seq-length 64"
TOGETHER = [
    *(
        (f"{GRAPHS} {other}", "^--cuda-graph-impl local with --.* is not taken here")
        for other in (
            "--pack --micro-batch-size 1",
            "--placement non-colocated",
            "--freeze projector",
            "--recompute-encoder 1",
            "--step-batch-size-schedule 0:32",
        )
    ),
    (
        f"{GRAPHS} --bf16 --data mock --hybrid-layer-pattern MEM*/E*",
        "^--cuda-graph-impl local with multi-token prediction is not taken here",
    ),
    (
        f"{GRAPHS} {FP8} --recompute-granularity selective --recompute-modules moe",
        "--recompute-modules moe in FP8 is not taken here",
    ),
    (
        f"{ENGINE} {FP8} --recompute-granularity full --hybrid-layer-pattern MEM*/E*",
        "^--recompute-granularity full with multi-token prediction in FP8",
    ),
    (
        f"{GRAPHS} --data mock --micro-batch-size 4 --eval-micro-batch-size 8 --eval-iters 1",
        "--eval-micro-batch-size 8 must be 4 or less",
    ),
    (
        f"{GRAPHS} --data mock --language dp=2 --global-batch-size 24 --encoder-macro-batch 2",
        "--encoder-macro-batch 2 must divide the 3 microbatches",
    ),
    *(
        (
            f"{stages} --hybrid-layer-pattern MEM*/E* --no-untie-embeddings-and-output-weights",
            "^--hybrid-layer-pattern with multi-token prediction, tied embeddings and a pipeline",
        )
        for stages in ("--language pp=2", "--placement non-colocated")
    ),
    (f"{ENGINE} --pack --micro-batch-size 1", "in fp32 with --pack.* add --bf16, or choose local"),
    (f"{ENGINE} --language cp=2", "or context parallelism.* add --bf16, or choose local"),
    (
        f"{ENGINE} --bf16 --pack --micro-batch-size 1 --mamba-num-heads 12",
        "--mamba-num-heads that leave unaligned rows.*to be a multiple of 8",
    ),
    ("--fp16 --bf16", "^Megatron asks for: not --bf16$"),
    ("--encoder-attention flash4", "--encoder-attention flash4 needs --device cuda; te does not"),
    (f"{ENGINE} --bf16 --encoder-attention flash4", "flash4 needs --dynamic-resolution"),
    (f"{ENGINE} --dynamic-resolution --bf16 --encoder-attention flash4", "is not installed"),
    (
        "--language tp=2 --distribute-saved-activations --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1",
        "distribute_saved_activations.*sequence parallel",
    ),
    ("--global-batch-size 30", "global batch 30.*micro batch × dp = 4·2 = 8"),
    ("--language vpp=2", "vpp=2 needs pp of 2 or more"),
    ("--language cp=2 --context-parallel-size 1", "says cp=2, .*--context-parallel-size says 1"),
    ("--encoder pp=2", "takes tp and dp only.*Nearest that fit: tp=1,dp=2"),
    (
        "--placement non-colocated --recompute-encoder 2",
        "--recompute-encoder needs --placement colocated",
    ),
    ("--language pp=2 --encoder-macro-batch 2", "--encoder-macro-batch needs.*pp=1"),
    ("--language pp=2 --encoder-schedule bubbles", "bubbles is not taken here: it was dropped"),
    ("--dynamic-resolution-max-patches 8", "-min-patches and -max-patches need --dynamic-res"),
    ("--model tiny-omni --video-fps 2", "--video-… options need --dynamic-resolution and a --mo"),
    ("--dynamic-resolution --video-target-num-patches 9", "need --dynamic-resolution and a --mo"),
    (
        "--model tiny-omni --dynamic-resolution --video-target-num-patches 3",
        "--video-target-num-patches must be 4 or more, not 3",
    ),
    ("--dynamic-resolution --dynamic-resolution-min-patches 97", "97 must be from 4 to .* 96"),
    (f"{ENGINE} --dynamic-resolution", "in fp32 with --pack, --dynamic-resolution or"),
    ("--step-batch-size-schedule '0:8 1K:9'", "global batch 9"),
    ("--pack --micro-batch-size 2", "--micro-batch-size must be 1"),
    (f"{PACK} --eval-iters 1 --eval-micro-batch-size 2", "--eval-micro-batch-size must be 1"),
    (f"{PACK} --sample-multiple 24", "--sample-multiple 24 must divide --seq-length 64"),
    (f"{PACK} --sample-multiple 2 --language cp=2", "needs a multiple of 4"),
    ("--num-distributed-optimizer-instances 2 --language tp=2", "2 must divide dp=1 and expt_dp=1"),
    (
        "--num-distributed-optimizer-instances 2 --overlap-grad-reduce",
        "with --overlap-grad-reduce is not taken here",
    ),
    ("--train-iters 0", "^--train-iters must be 1 or more$"),
    ("--train-samples 0", "^--train-samples 0 must be 32 or more, the samples of a step$"),
    ("--lr nan", "^--lr must be 0 or more$"),
    ("--hidden-dropout 2", "^--hidden-dropout must be below 1$"),
    ("--hidden-dropout -1", "^--hidden-dropout must be 0 or more$"),
    (f"{ENGINE} --attention-dropout 2", "^--attention-dropout must be below 1$"),
    ("--adam-beta2 nan", "^--adam-beta2 must be 0 or more$"),
    ("--lr-warmup-fraction 1", "^--lr-warmup-fraction must be below 1$"),
    ("--lr-warmup-init 1", "^--lr-warmup-init 1.0 must be at most --lr 0.002$"),
    ("--tensor-model-parallel-size 0", "^--tensor-model-parallel-size must be 1 or more$"),
    ("--mamba-num-groups 0", "^--mamba-num-groups must be 1 or more$"),
    ("--encoder-dp -1", "^--encoder-dp must be 1 or more$"),
    ("--eval-micro-batch-size 0", "^--eval-micro-batch-size must be 1 or more$"),
    ("--lr 1e-3 --min-lr 1e-2", "^--min-lr 0.01 must be at most --lr 0.001$"),
    ("--moe-router-topk 9", "^--moe-router-topk 9 must be at most --num-experts 8$"),
    ("--num-attention-heads 7", "-heads 7 must be a multiple of --num-query-groups 4$"),
    ("--report r.jpg --metrics-out m --eval-iters 1", "^--report r.jpg: its name must end in .png"),
    ("--exit-signal SIGNAL", "^'SIGNAL' is none of the values that its option takes"),
    ("--config", "^--config takes a FILE$"),
    ("--model tiny-omni --dynamic-resolution --video-fps 0", "^--video-fps must be above 0"),
    ("--train-iters 60 --lr-warmup-iters 60", "-iters 60 must be less than 60 steps"),
    ("--freeze radio", "no such part"),
    ("--freeze encoder --encoder-lr 1e-4", "^--encoder-lr does nothing with --freeze encoder$"),
    ("--model tiny-omni --encoder images:dp=2", "^--encoder: sound is missing; add --encoder sou"),
    ("--model tiny-omni --encoder radio:dp=2", "radio:dp=2: no such encoder; choose from images"),
    ("--encoder images:dp=2 --encoder images:tp=2", "images is given twice; give each encoder"),
    ("--cuda-graph-impl full_iteration", "only --cuda-graph-impl local captures layers of sev"),
    ("--position-embedding-type relative", "a hybrid model has none, learned_absolute, rope"),
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
"""Options that do not go together, and what the refusal says."""


def parsed(line: str, world: int = 2):
    return parse(shlex.split(line), world_size=world)


class TestRefused:
    @pytest.mark.parametrize("arguments", REFUSED)
    def test_names_the_option_and_the_reason(self, arguments, monkeypatch):
        monkeypatch.setitem(sys.modules, "pynvml", None)
        with pytest.raises(UserError) as refusal:
            parsed(arguments)
        option = arguments.split()[0]
        assert str(refusal.value).startswith(option) and "\n" not in str(refusal.value)
        assert " is not taken here: " in str(refusal.value)

    @pytest.mark.parametrize(("arguments", "text"), TOGETHER)
    def test_names_what_does_not_go_together(self, arguments, text):
        with pytest.raises(UserError, match=text):
            parsed(arguments)

    def test_a_short_size_is_not_that_of_an_axis_whose_name_ends_alike(self):
        options = ["--language", "vpp=2,etp=1", "--pipeline-model-parallel-size", "2"]
        found = parse([*options, "--tensor-model-parallel-size", "2"], world_size=4).layouts
        assert str(found.language) == "tp=2,pp=2,dp=1,etp=1,vpp=2"

    def test_an_optimizer_of_the_engine_is_not_taken_without_it(self, monkeypatch):
        monkeypatch.setattr(refusals, "find_spec", lambda name: None)
        option = "--use-precision-aware-optimizer"
        with pytest.raises(UserError, match=f"^{option} is not taken here"):
            parse(["--device", "cuda", option], world_size=1)
        parse(["--device", "cuda", option, "--optimizer-cpu-offload"], world_size=1)

    def test_wandb_is_not_taken_without_it(self, monkeypatch):
        monkeypatch.setattr(refusals, "find_spec", lambda name: None)
        with pytest.raises(UserError, match="^--wandb-project is not taken here: wandb is not ins"):
            parsed("--wandb-project a --wandb-exp-name b --save saved")
        monkeypatch.setattr(refusals, "find_spec", lambda name: name)
        for options, missing in (("--save s", "exp-name"), ("--wandb-exp-name b", "save-dir")):
            with pytest.raises(UserError, match=f"^--wandb-project needs --wandb-{missing}"):
                parsed(f"--wandb-project a {options}")
        parsed("--wandb-project a --wandb-exp-name b --wandb-save-dir c")

    def test_every_refused_option_is_megatrons(self):
        """Refusals for other programs read Megatron's options alone."""
        parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
        known = {*parser._option_string_actions, "--encoder-schedule"}
        others = [*REFUSALS, *IN_OTHERS]
        refused = [refusal.option.split()[0] for refusal in [*others, *OF_OWN_OPTIONS]]
        refused += [refusal.option.replace("--no-", "--") for refusal in TURNED_BACK]
        assert not [option for option in refused if option not in known | {*ONLY_ON_MAIN}]
        line = "--cuda-graph-impl local --log-straggler --num-experts 8 --mtp-num-layers 1"
        args = parser.parse_args(line.split())
        args.device = "cuda"
        assert [refusal for refusal in others if refusal.applies(args)][-3:] == IN_OTHERS

    def test_what_megatron_sets_by_other_options_is_refused_too(self, monkeypatch):
        def validated(args, _defaults):
            args.optimizer = "muon"
            validate_args(args, _defaults)

        monkeypatch.setattr(arguments, "validate_args", validated)
        with pytest.raises(UserError, match="^--optimizer is not taken here"):
            parse([], world_size=1)

    def test_a_flag_that_a_preset_turns_on_has_an_opposite(self):
        assert parsed("").args.untie_embeddings_and_output_weights
        args = parsed("--no-untie-embeddings-and-output-weights --bias-linear").args
        assert not args.untie_embeddings_and_output_weights and args.add_bias_linear

    def test_some_options_need_no_other(self):
        """A state that is whole on each rank needs no resharding."""
        parsed("--no-dist-ckpt-optim-fully-reshardable --no-use-distributed-optimizer", 1)

    def test_sizes_of_layers_that_the_pattern_lacks_do_not_matter(self):
        assert parse(["--linear-num-key-heads", "0"], world_size=1).args.linear_num_key_heads == 0

    def test_master_weights_are_whole(self):
        """Else Transformer Engine's Adam saves 16 bits of each, beside those in the model's weight,
        and a run with another optimizer takes them for its master weights."""
        config, _ = get_megatron_optimizer_config(parsed("").args)
        assert not config.store_param_remainders

    def test_a_growing_batch_decays_alike_in_every_layout(self):
        options = ["--step-batch-size-schedule", "0:16 1K:32", "--micro-batch-size", "4"]
        one = parse([*options, "--train-iters", "4"], world_size=1).args
        other = parse([*options, "--train-iters", "4"], world_size=4).args
        # 1000 tokens are 31 samples of 32: two steps of 16 samples, two of 32.
        for args in (one, other):
            assert (args.global_batch_size, args.lr_decay_iters) == (16, 6)
            assert args.eval_global_batch_size == 16
        given = parse([*options, "--lr-decay-iters", "9"], world_size=1).args
        assert given.lr_decay_iters == 9
        assert parse([*options, "--train-samples", "96"], world_size=1).args.lr_decay_iters is None

    def test_the_batches_of_an_evaluation_must_fit_the_encoder(self):
        sizes = ["--eval-micro-batch-size", "1", "--eval-global-batch-size", "4"]
        layout = ["--encoder", "dp=4", "--language", "tp=4", "--placement", "non-colocated"]
        parse([*layout, *sizes], world_size=8)
        with pytest.raises(UserError, match="^--eval-global-batch-size 4.*the 1 samples"):
            parse([*layout, *sizes, "--eval-iters", "1"], world_size=8)
