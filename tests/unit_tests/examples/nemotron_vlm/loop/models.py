# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The models and data of the rows, on CPU ranks and on GPUs."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from examples.mimo.nemotron_vlm.data import SampleSource
from examples.mimo.nemotron_vlm.data.whole_images import WholeImages
from examples.mimo.nemotron_vlm.model.presets import tiny
from tests.unit_tests.examples.nemotron_vlm.loop.sound_and_images import (
    PICTURES,
    PartlyText,
    SoundAndImages,
    SoundAndVideo,
)
from tests.unit_tests.examples.nemotron_vlm.runs import FOUR_LAYERS, LOCAL, OWN_DEFAULTS, STEPS

COMPARED = 3
"""Steps compared by default: a wrong forward shows in the first, a wrong gradient in the second,
state that steps leave behind in the third."""

TOLERANCE = 1e-4
"""Relative tolerance of fp32 losses and gradient norms: ten steps amplify sums in another order."""


@dataclass(frozen=True)
class Model:
    """The model and data of a run, whatever its layout.

    options: of the command line. source: replaces the samples that the options name.
    samples: rows of a global batch; 0 if the options say so. packed: a microbatch is one row.
    steps: number that are compared.
    tolerance: relative; None: the spread of one-GPU runs. In 16 bits, CPU ranks compare losses.
        With 0, one rank takes microbatches of as many samples.
    """

    options: tuple[str, ...] = ()
    source: SampleSource | None = None
    samples: int = 32
    packed: bool = False
    steps: int = COMPARED
    tolerance: float | None = TOLERANCE

    @property
    def is_16_bit(self) -> bool:
        """Whether weights round, and with them the choice of experts."""
        return self.tolerance is None or self.tolerance > TOLERANCE

    def batch(self, microbatches: int, dp: int) -> tuple[str, ...]:
        """Options for a step's batch in so many microbatches."""
        if not self.samples:
            return ()
        micro_size = 1 if self.packed else self.samples // microbatches // dp
        return ("--global-batch-size", str(self.samples), "--micro-batch-size", str(micro_size))


RECIPE = """
    --hybrid-layer-pattern MEMEM*EMEMEM*EMEMEM* --num-experts 16 --moe-router-topk 6
    --hidden-size 32 --num-query-groups 2 --kv-channels 4 --mamba-num-heads 8
    --ffn-hidden-size 16 --moe-ffn-hidden-size 16 --moe-shared-expert-intermediate-size 32
    --attention-backend flash --cross-entropy-loss-fusion --use-fused-weighted-squared-relu
    --seq-length 64 --vocab-size 512 --init-method-std 0.0173 --rerun-mode disabled
    --bf16 --micro-batch-size 1 --global-batch-size 4 --weight-decay 0.05
    --lr 2e-4 --min-lr 2e-6 --lr-decay-iters 10 --eval-interval 1 --log-interval 1
    --overlap-grad-reduce --overlap-param-gather
"""
"""The command of upstream's 20-layer development recipe for a Nemotron VLM, with small widths and
fewer experts, without the options that are this program's defaults."""

PROPORTIONAL_STEP = (
    *("--train-iters", "1", "--lr", "1e6", "--adam-eps", "100"),
    *("--clip-grad", "0", "--weight-decay", "0"),
)
"""Adam's first step with an epsilon far above all gradients: weights move by 10⁴ × gradient, to 1%,
far above their own rounding. So a gradient of the wrong size shows, which Adam and clipping would
otherwise hide."""

ENGINE = ("--transformer-impl", "transformer_engine")
TWO_DIGITS = ("--data", "digits:2")
CALM = ("--lr", "1e-5")  # otherwise Adam takes full steps of rounding: one-GPU runs differ by 3 %
BF16 = ("--bf16", *CALM)
PACK = ("--pack", "--seq-length", "64", "--pack-window", "24", "--sample-multiple", "16")
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform")
FULL += ("--recompute-num-layers", "1")
GDN = ("--model", "tiny-gdn", "--hybrid-layer-pattern", "MEG*")
OMNI_LAYERS = ("--model", "tiny-omni", *FOUR_LAYERS)
SIX_LAYERS = ("--hybrid-layer-pattern", "ME*E*M")  # language pp=2, 3 and 6 divide it
FEW_EXPERTS = ("--hybrid-layer-pattern", "ME*M")  # with pp=2 the second stage has none
SHARDS = ("--data", "energon:{shards}", "--tokenizer-model", "{shards}/tokenizer")
ANY_SIZE = ("--dynamic-resolution",)
OMNI = tuple(option.replace("{shards}", "{shards}/../omni") for option in SHARDS)
PARTLY_WHOLE = WholeImages(PartlyText(), tiny().with_images_of_any_size().images, 64, 0)
VIDEO = ("--model", str(Path(__file__).with_name("tiny_video.json")))  # without sound
MTP = ("--hybrid-layer-pattern", "ME*M/E*/E*")
EXACT = ("--deterministic-mode", "--ddp-reduce-scatter-with-fp32-accumulation", "--no-balance")
EXACT += (*FOUR_LAYERS, "--data", "digits:2")  # each encoder rank has a microbatch's images
ROWS = (*OWN_DEFAULTS, *LOCAL, *PACK, *FOUR_LAYERS)
GROWING = ("--step-batch-size-schedule", "0:16 1K:32", "--micro-batch-size", "4")

MODELS = {
    "tiny": Model(FOUR_LAYERS),
    "own defaults": Model(OWN_DEFAULTS, steps=STEPS),
    "one step": Model((*FOUR_LAYERS, *PROPORTIONAL_STEP, "--seq-length", "16"), samples=16),
    "65 words": Model((*FOUR_LAYERS, "--data", "mock", "--vocab-size", "65")),
    "65 words, later ones too": Model((*MTP, "--data", "mock", "--vocab-size", "65")),
    "24 samples": Model((*OWN_DEFAULTS, *FOUR_LAYERS), samples=24),
    "tiny-gdn": Model((*LOCAL, *GDN)),
    "six layers, partly text": Model(SIX_LAYERS, source=PartlyText(), samples=24),
    "sound and images": Model(OMNI_LAYERS, source=SoundAndImages()),
    "growing batch": Model((*FOUR_LAYERS, *GROWING), samples=0, steps=4),
    "packed": Model(ROWS, samples=8, packed=True),
    "packed shards of all media": Model(
        (*ROWS, *OMNI, *ANY_SIZE, *OMNI_LAYERS),
        samples=16,
        packed=True,
        steps=4,
    ),
    "digits of any size": Model((*FOUR_LAYERS, *ANY_SIZE)),
    "packed images of any size": Model(
        (*ROWS, *ANY_SIZE), source=PARTLY_WHOLE, samples=8, packed=True
    ),
    "packed sound and video": Model(
        (*ROWS, *ANY_SIZE, *OMNI_LAYERS),
        **{"source": SoundAndVideo(), "samples": 8, "packed": True},
    ),
    "packed video": Model(
        (*ROWS, *ANY_SIZE, *VIDEO),
        **{"source": WholeImages(PartlyText(), PICTURES, 64, 0), "samples": 8, "packed": True},
    ),
    "few experts": Model(FEW_EXPERTS),
    "bf16 on CPUs": Model((*FOUR_LAYERS, "--bf16"), tolerance=3e-2),
    "fp16 on CPUs": Model((*FOUR_LAYERS, "--fp16", "--initial-loss-scale", "8"), tolerance=1e-2),
    "three tokens ahead": Model(MTP),
    "three tokens ahead, packed": Model((*ROWS, *MTP), samples=8, packed=True),
    "bit for bit": Model(EXACT, samples=8, steps=4, tolerance=0.0),
    "development recipe": Model(tuple(RECIPE.split()), samples=0, steps=2, tolerance=3e-2),
}
"""On CPU ranks. A rounded weight sends some tokens to another expert, hence the tolerances."""

on_gpus = partial(Model, steps=STEPS)
in_16_bits = partial(on_gpus, samples=128, tolerance=None)
"""The more samples, the less a token matters that rounding sends to another expert."""

ON_GPUS = {
    "engine": on_gpus(ENGINE),
    "local": on_gpus(LOCAL),
    "65 words on engine": on_gpus((*ENGINE, "--data", "mock", "--vocab-size", "65")),
    "two digits": on_gpus((*ENGINE, *TWO_DIGITS)),
    "partly text": on_gpus(ENGINE, source=PartlyText()),
    "partly text local": on_gpus(LOCAL, source=PartlyText()),
    "frozen encoder": on_gpus((*ENGINE, "--freeze", "encoder")),
    "frozen language": on_gpus((*ENGINE, "--freeze", "language")),
    "packed local": on_gpus((*LOCAL, *PACK), samples=8, packed=True),
    "any size local": on_gpus((*LOCAL, *ANY_SIZE)),
    "shards": on_gpus((*LOCAL, *PACK, *SHARDS), samples=8, packed=True),
    "bf16": in_16_bits((*ENGINE, *BF16)),
    "bf16 two digits": in_16_bits((*ENGINE, *TWO_DIGITS, *BF16)),
    "sound local": on_gpus((*LOCAL, "--model", "tiny-omni"), source=SoundAndImages()),
    "bf16 any size": in_16_bits((*ENGINE, *ANY_SIZE, *BF16)),
    "bf16 packed": in_16_bits(
        (*ENGINE, *BF16, *PACK, "--seq-length", "256"), samples=8, packed=True
    ),
    "bf16 packed, partly text": in_16_bits(
        (*ENGINE, *BF16, *PACK, "--seq-length", "256"),
        **{"source": PartlyText(), "samples": 8, "packed": True},
    ),
    "fp16": in_16_bits(
        (*ENGINE, "--fp16", *CALM, "--initial-loss-scale", "1024", "--hysteresis", "1")
    ),
    # Last, because others wait until its kernels are compiled, for a minute.
    "gated delta nets": on_gpus((*LOCAL, "--model", "tiny-gdn")),
}

MODELS |= ON_GPUS
