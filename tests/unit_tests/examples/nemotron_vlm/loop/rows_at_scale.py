# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Rows for four or eight GPUs: the published widths with the kernels of Transformer Engine.

Few layers and experts let one GPU hold the model. The model as published is compared with a run on
eight: `COMPARED_WITH` has its layout.
"""

from functools import partial

from tests.unit_tests.examples.nemotron_vlm.loop.models import ENGINE, MODELS, Model
from tests.unit_tests.examples.nemotron_vlm.loop.rows import APART, BUBBLES, FULL, Row

NANO = (*ENGINE, "--bf16", "--model", "nano-vl-30b-a3b", "--data", "mock")
NANO += ("--seq-length", "4096", "--distributed-timeout-minutes", "8")
SMALL = ("--num-layers", "8", "--num-experts", "16", "--vocab-size", "32768")
PUBLISHED = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"

_model = partial(Model, samples=16, packed=True, steps=4, tolerance=5e-2)
"""In bf16 another layout rounds differently: losses have three digits, gradient norms two."""

MODELS |= {
    "nano": _model((*NANO, *SMALL, "--hybrid-layer-pattern", "MEMEM*EM")),
    "nano-gdn": _model(
        (*NANO, *SMALL, "--model", "nano-vl-30b-a3b-gdn", "--hybrid-layer-pattern", "GEGEG*EG")
    ),
    "published": _model((*NANO, *FULL, "--num-layers", "52", "--hybrid-layer-pattern", PUBLISHED)),
}

COMPARED_WITH = {"published": Row(8, "published", "dp=8", "dp=8,ep=8")}
"""Runs that other rows of a model must equal, for models that one GPU cannot hold."""

AT_SCALE = [
    Row(8, "nano", "tp=2,dp=4", "cp=2,pp=2,dp=2,ep=2"),
    Row(4, "nano", "dp=4", "tp=2,cp=2"),
    Row(8, "nano", "tp=2,dp=4", "tp=2,dp=2,cp=2"),
    Row(4, "nano", "tp=2,dp=2", "dp=2,cp=2"),
    Row(8, "nano", "tp=4,dp=2", "dp=4,cp=2"),
    Row(4, "nano", "dp=4", "pp=2,dp=2"),
    Row(4, "nano", "dp=4", "pp=4"),
    Row(4, "nano", "dp=4", "pp=4", BUBBLES),
    Row(4, "nano", "tp=2,dp=2", "cp=2,pp=2,ep=2"),
    Row(4, "nano", "dp=4", "dp=4,ep=4"),
    Row(8, "nano", "dp=8", "dp=8,ep=8"),
    Row(4, "nano", "dp=4", "cp=4"),
    Row(8, "nano", "dp=8", "cp=8"),
    Row(4, "nano", "dp=2", "pp=2", (*APART, "--micro-batch-size", "2")),
    Row(8, "nano", "dp=4", "pp=4", (*APART, "--micro-batch-size", "4")),
    Row(4, "nano", "tp=2,dp=2", "tp=2,ep=2", then=(("dp=4", "cp=2,pp=2", ()),)),
    Row(8, "nano-gdn", "dp=8", "cp=8"),
    Row(4, "nano-gdn", "dp=4", "cp=4"),
    Row(8, "published", "dp=8", "pp=2,dp=4,ep=4", ("--recompute-encoder", "1")),
]
