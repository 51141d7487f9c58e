# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The runs of the training program that `make test-gpu` compares with a run on one GPU."""

from __future__ import annotations

from dataclasses import dataclass

from examples.mimo.nemotron_vlm.data import SampleSource
from tests.gpu.partly_text import PartlyText

ENGINE = ("--transformer-impl", "transformer_engine")
LOCAL = ("--transformer-impl", "local")
TWO_DIGITS = ("--data", "digits:2")
GRAPHS = ("--cuda-graph-impl", "local")
APART = ("--placement", "non-colocated")
CALM = ("--lr", "1e-5")  # otherwise Adam takes full steps of rounding: one-GPU runs differ by 3 %
BF16 = ("--bf16", *CALM)
PACK = ("--pack", "--seq-length", "64", "--pack-window", "24", "--sample-multiple", "16")
NO_CHECK = ("--no-check-for-nan-in-loss-and-grad",)  # so that graphs have bubbles by default
NO_OVERLAP = ("--no-overlap-grad-reduce", "--no-overlap-param-gather")
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform")
RECOMPUTE += ("--recompute-num-layers", "1", "--recompute-encoder", "1")


@dataclass(frozen=True)
class Model:
    """The model and data of a run, whatever its layout.

    options: of the command line. source: replaces the samples that the options name.
    is_16_bit: losses are compared with the spread of one-GPU runs, else with 1e-4.
    packed: rows hold several samples, and a microbatch is one row.
    """

    options: tuple[str, ...]
    source: SampleSource | None = None
    is_16_bit: bool = False
    packed: bool = False


MODELS = {
    "engine": Model(ENGINE),
    "local": Model(LOCAL),
    "two digits": Model((*ENGINE, *TWO_DIGITS)),
    "gated delta nets": Model((*LOCAL, "--model", "tiny-gdn")),
    "partly text": Model(ENGINE, source=PartlyText()),
    "partly text local": Model(LOCAL, source=PartlyText()),
    "frozen encoder": Model((*ENGINE, "--freeze", "encoder")),
    "frozen language": Model((*ENGINE, "--freeze", "language")),
    "packed local": Model((*LOCAL, *PACK), packed=True),
    "bf16": Model((*ENGINE, *BF16), is_16_bit=True),
    "bf16 two digits": Model((*ENGINE, *TWO_DIGITS, *BF16), is_16_bit=True),
    "bf16 local": Model((*LOCAL, *BF16), is_16_bit=True),
    "bf16 packed": Model(
        (*ENGINE, *BF16, *PACK, "--seq-length", "256"), is_16_bit=True, packed=True
    ),
    "fp16": Model(
        (*ENGINE, "--fp16", *CALM, "--initial-loss-scale", "1024", "--hysteresis", "1"),
        is_16_bit=True,
    ),
}


@dataclass(frozen=True)
class Row:
    """A run: a model in a layout, with options that must change nothing.

    microbatches: number in a step; with a pipeline, as many as stages by default.
    """

    model: str
    encoder: str = "dp=1"
    language: str = "dp=1"
    options: tuple[str, ...] = ()
    microbatches: int = 2

    def __str__(self) -> str:
        words = [self.model, self.encoder, self.language, *self.options]
        text = "-".join(words).replace("---", "-").replace("--", "-").replace(" ", "-")
        return text if self.microbatches == 2 else f"{text}-microbatches-{self.microbatches}"


ON_ONE = [
    Row("two digits", options=GRAPHS),
    Row("bf16 two digits", options=GRAPHS),
    Row("engine", options=LOCAL),
    Row("engine", options=RECOMPUTE),
    Row("engine", options=NO_OVERLAP),
    Row("engine", options=("--encoder-macro-batch", "4"), microbatches=4),
]

ON_TWO = [
    Row("engine", "dp=2", "dp=2"),
    Row("engine", "tp=2", "dp=2"),
    Row("engine", "dp=2", "tp=2,ep=2,etp=1"),
    Row("engine", "tp=2", "tp=2"),
    Row("engine", "dp=2", "pp=2", microbatches=4),
    Row("engine", "tp=2", "pp=2"),
    Row("engine", "dp=2", "pp=2,vpp=2", microbatches=4),
    Row("engine", "dp=2", "dp=2,ep=2"),
    Row("engine", options=APART),
    Row("engine", options=APART, microbatches=4),
    Row("engine", "dp=2", "pp=2", RECOMPUTE),
    Row("engine", "dp=2", "tp=2", NO_OVERLAP),
    Row("local", "dp=2", "tp=2,ep=2,etp=1"),
    Row("local", "tp=2", "cp=2"),
    Row("local", "dp=2", "cp=2", RECOMPUTE),
    Row("local", "dp=2", "pp=2"),
    Row("local", options=APART),
    Row("gated delta nets", "dp=2", "cp=2"),
    Row("gated delta nets", "dp=2", "tp=2"),
    Row("partly text", "dp=2", "tp=2"),
    Row("partly text", "tp=2", "pp=2"),
    Row("partly text", options=APART),
    Row("partly text local", "dp=2", "cp=2"),
    Row("frozen encoder", "dp=2", "pp=2"),
    Row("frozen language", "tp=2", "dp=2"),
    Row("packed local", "dp=2", "cp=2", microbatches=8),
    Row("packed local", "tp=2", "dp=2", microbatches=4),
    Row("packed local", "dp=2", "pp=2", microbatches=8),
    Row("packed local", options=APART, microbatches=8),
    Row("bf16", "dp=2", "tp=2,ep=2,etp=1"),
    Row("bf16", "tp=2", "dp=2"),
    Row("bf16", "dp=2", "cp=2"),
    Row("bf16", "tp=2", "cp=2"),
    Row("bf16", "dp=2", "cp=2", RECOMPUTE),
    Row("bf16 local", "dp=2", "tp=2"),
    Row("bf16", "dp=2", "pp=2", microbatches=4),
    Row("bf16", options=APART),
    Row("bf16 packed", "dp=2", "cp=2", microbatches=8),
    Row("bf16 packed", "tp=2", "dp=2", microbatches=4),
    Row("bf16 packed", options=APART, microbatches=8),
    Row("fp16", "dp=2", "tp=2,ep=2,etp=1"),
    Row("fp16", "tp=2", "pp=2"),
    Row("fp16", options=APART),
    Row("two digits", "dp=2", "tp=2,ep=2,etp=1", GRAPHS),
    Row("bf16 two digits", "dp=2", "tp=2", GRAPHS),
]

AHEAD = [
    Row("two digits", "tp=2", "dp=2", GRAPHS),
    Row("two digits", "dp=2", "pp=2", GRAPHS, microbatches=4),
    Row("two digits", "dp=2", "pp=2", (*GRAPHS, *NO_CHECK), microbatches=4),
    Row("engine", "dp=2", "pp=2", ("--encoder-schedule", "bubbles"), microbatches=4),
    Row("bf16 two digits", "dp=2", "pp=2", (*GRAPHS, *NO_CHECK), microbatches=4),
]
"""Rows on two GPUs with several connections to each, where the host runs ahead of the device.
Neither module has TP or CP, for which Megatron asks for a single connection."""
