# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""This program's own options, in addition to Megatron's."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from examples.mimo.common.layout import COLOCATED, NON_COLOCATED
from examples.mimo.nemotron_vlm.data.reading_options import ReadingOptions


def _repeated():
    """Return the field of an option that may be given several times."""
    return field(default=None, metadata={"argparse_meta": {"action": "append"}})


@dataclass
class OwnOptions(ReadingOptions):
    """Options of this program; all others are Megatron's."""

    config: str | None = _repeated()
    """YAML file of options, KEY: VALUE, without their dashes; the command line wins"""
    device: Literal["cpu", "cuda"] = "cpu"
    """device that the ranks compute on"""
    placement: Literal[COLOCATED, NON_COLOCATED] = COLOCATED
    """run both modules on all ranks, or the encoder on the first ranks and the language model on
    the others"""
    language: str = ""
    """the language model's layout, AXIS=SIZE[,AXIS=SIZE…] with axes tp cp pp dp ep etp vpp; dp is
    derived when left out; short for --tensor-model-parallel-size and so on; or planned: all that
    --plan chooses for the ranks there are"""
    encoder: str | None = _repeated()
    """layout of encoder and projector, in the same form, with axes tp dp pp; NAME:AXIS=SIZE… is of
    one of a model's several encoders, once for each"""
    encoder_tp: int | None = None
    """the encoder's tensor-parallel size"""
    encoder_dp: int | None = None
    """the encoder's data-parallel size"""
    encoder_pp: int | None = None
    """the encoder's pipeline-parallel size, on ranks of its own"""
    recompute_encoder: int = 0
    """with colocated modules, keep no encoder activations but recompute them in the backward, for
    so many microbatches at a time; 0 keeps them"""
    encoder_macro_batch: int | None = None
    """with colocated modules and no pipeline, encode the images of so many microbatches at once;
    default: 2 on GPUs if a step has that many, else 1"""
    encoder_attention: Literal["te", "flash4"] | None = None
    """with --dynamic-resolution, compute the attention of images by Transformer Engine or by
    flash-attn-4; default: flash4 on Hopper GPUs in 16 bits where it is installed, else te"""
    freeze: str = ""
    """comma-separated parts that are not trained: encoder, projector, language; the first two are
    those of all encoders, or with NAME: before them of one"""
    lora_dim: int = 0
    """rank of LoRA adapters, which are trained in place of the weights; 0 for none"""
    lora_alpha: float = 32.0
    """adapters' outputs are multiplied by this over --lora-dim"""
    lora_rs: bool = False
    """adapters' outputs are multiplied by --lora-alpha over the square root of --lora-dim"""
    lora_dropout: float = 0.0
    """chance that an adapter drops an element of its input"""
    lora_target_modules: str = "all-linear"
    """comma-separated layers that have adapters: all-linear, or patterns of the end of layers'
    names, such as linear_qkv or experts.linear_fc1; of the language model, or with NAME: before
    them of an encoder"""
    train_parts: str = ""
    """comma-separated parts, as --freeze takes them, that are trained beside --lora-dim's adapters;
    all others are frozen"""
    fp8_parts: str = ""
    """comma-separated parts that --fp8-format is for: encoder, language, or NAME:encoder for one of
    several; default: all that have layers of Transformer Engine; projectors stay in bf16"""
    encoder_lr: str | None = _repeated()
    """learning rate of the encoder, or NAME:RATE for one of several; default: --lr"""
    projector_lr: str | None = _repeated()
    """learning rate of the projector, in the same form; default: --lr"""
    encoder_weight_decay: str | None = _repeated()
    """weight decay of the encoder, in the same form; default: --weight-decay"""
    projector_weight_decay: str | None = _repeated()
    """weight decay of the projector, in the same form; default: --weight-decay"""
    data: str = "digits"
    """data set: digits (strips of one to three scanned digits), digits:N (of N digits), mock
    (noise), energon:PATH (shards, or a folder with train.jsonl), FILE.json, FILE.jsonl or
    FILE.parquet (records), module.Class:KEY=VALUE,… (a class of yours)"""
    balance: bool = True
    """take rows in the stream's order, instead of assigning them to ranks and microbatches by their
    cost"""
    metrics_out: Path | None = None
    """write a JSON line per step to this file"""
    keep_best: Literal["eval_loss", "eval_accuracy", "eval_exact_match"] | None = None
    """keep the checkpoint with the best of this held-out score, beside the newest; SAVE/best names
    it for the tools"""
    report: Path | None = None
    """write a page of curves, test answers and who holds what to this HTML file at the end"""
    log_file: str | None = None
    """file that Megatron's own output goes to, or - for the terminal; default: log-TIME.txt beside
    --metrics-out, a file for each start"""
    dry_run: int = field(
        default=0, metadata={"argparse_meta": {"nargs": "?", "const": 1, "metavar": "RANKS"}}
    )
    """print the parameter counts of the model, and a prediction of the memory and step of RANKS
    ranks in the layouts, and end"""
    plan: int = 0
    """print the fastest layouts for the model and the batch on so many GPUs, and end; --placement
    leaves out the other"""
    plan_gpu: str = "h200"
    """GPU that --plan and --dry-run are for: h100, h200 or b200"""
    plan_gpus_per_node: int = 8
    """GPUs of a node that --plan and --dry-run are for"""


HELP = """Train a Nemotron VLM with Megatron's own loop, each module in its own parallel layout.

  torchrun --nproc-per-node 8 examples/mimo/pretrain_nemotron_vlm.py \\
      --encoder tp=2,dp=4 --language cp=2,pp=2,ep=2 --train-iters 20 --metrics-out metrics.jsonl
  torchrun --nproc-per-node 8 examples/mimo/pretrain_nemotron_vlm.py --config run.yaml

model       --model NAME  --freeze PARTS  --fp8-parts PARTS  --dynamic-resolution
            --dynamic-resolution-min-patches N  --dynamic-resolution-max-patches N
adapters    --lora-dim N  --lora-alpha N  --lora-rs  --lora-dropout P
            --lora-target-modules WORDS  --train-parts PARTS
layout      --encoder LAYOUT  --language LAYOUT|planned  --placement colocated|non-colocated
            --encoder-tp N  --encoder-dp N  --encoder-pp N
speed       --device cpu|cuda  --encoder-macro-batch N  --recompute-encoder N
            --encoder-attention te|flash4
data        --data digits|mock|energon:PATH  --pack  --pack-window N  --sample-multiple N
            --disable-balance  --max-tiles N  --disable-thumbnail
            --video-frames N  --video-fps N  --video-target-num-patches N
            --bad-samples skip|refuse  --long-samples skip|refuse|cut
            --prompt TEXT  --image-token TOKEN  --surveys DIR
training    --encoder-lr RATE  --projector-lr RATE  --encoder-weight-decay RATE
            --projector-weight-decay RATE
output      --keep-best eval_loss|eval_accuracy|eval_exact_match
            --config FILE  --metrics-out FILE  --report FILE  --log-file FILE
before      --dry-run [RANKS]  --plan GPUS  --plan-gpu NAME  --plan-gpus-per-node N

Megatron's options are taken as well: --train-iters N, --global-batch-size N, --lr RATE,
--save DIR, --load DIR, --bf16, ...; --help-all lists them all, with what each does."""
