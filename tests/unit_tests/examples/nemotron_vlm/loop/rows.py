# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Runs of the training program, and what each must equal: the table of "as on one rank".

A row is a model in a layout, on ranks of a CPU or a GPU each, with options that change nothing. Its
losses and gradient norms must be those of the same model on one rank (trajectories.py); those of
`WEIGHTS` are compared by the weights after a step (one_step.py). `--once` runs the first row of
each group.
"""

from dataclasses import dataclass

from examples.mimo.common.layout import parse_layout
from tests.unit_tests.examples.nemotron_vlm.loop.models import FULL, GDN, MODELS


@dataclass(frozen=True)
class Row:
    """A model in a layout, on so many ranks.

    options: change nothing. common: of the run on one rank too.
    microbatches: number in a step; by default two, or as many as stages.
    then: layouts (encoder, language, options) that go on, each from the checkpoint of the one
        before; each layout takes as many steps as the others.
    """

    ranks: int
    model: str
    encoder: str = "dp=1"
    language: str = "dp=1"
    options: tuple[str, ...] = ()
    common: tuple[str, ...] = ()
    microbatches: int = 0
    then: tuple[tuple[str, str, tuple[str, ...]], ...] = ()

    def __str__(self) -> str:
        later = [word for encoder, language, _ in self.then for word in (encoder, language)]
        words = [self.model, self.encoder, self.language, *self.options, *self.common, *later]
        text = "-".join(words).replace("---", "-").replace("--", "-").replace(" ", "-")
        return f"{text}-microbatches-{self.microbatches}" if self.microbatches else text

    @property
    def layouts(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """The first layout and those that go on."""
        return [(self.encoder, self.language, self.options), *self.then]

    def microbatches_and_dp(self, language: str) -> tuple[int, int]:
        """Microbatches of a step, and DP size (1 if it is not given), in the language's layout."""
        layout = parse_layout(language, "language")
        return self.microbatches or (layout.pp if layout.pp > 1 else 2), layout.dp or 1

    @property
    def commands(self) -> list[tuple[str, ...]]:
        """The options of each layout's run: the model's, the layout's and the batch's."""
        model, found = MODELS[self.model], []
        for encoder, language, options in self.layouts:
            encoders = [word for each in encoder.split() for word in ("--encoder", each)]
            batch = model.batch(*self.microbatches_and_dp(language))
            layout = (*encoders, "--language", language, *batch)
            found.append((*model.options, *self.common, *layout, *options))
        return found


APART = ("--placement", "non-colocated")
CONTIGUOUS = ("--linear-cp-layout", "contiguous")
ZIGZAG = ("--linear-cp-layout", "zigzag")
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "2000")
RECOMPUTE = (*FULL, "--recompute-encoder", "1")
GRAPHS = ("--cuda-graph-impl", "local")
MACRO_BATCH = ("--encoder-macro-batch", "2")
PADDED_256 = ("--make-vocab-size-divisible-by", "64")  # two of four TP ranks have no word
WORKERS = ("--num-workers", "4")
ALLGATHER = ("--moe-token-dispatcher-type", "allgather")
EVALUATION = ("--eval-interval", "1", "--eval-iters", "1")

FREEZE_SOUND = ("--freeze", "sound:encoder,sound:projector")

ADAPTED = ("--lora-dim", "8", "--lr", "1e-2", "--train-parts", "projector")
ADAPTED += ("--lora-target-modules", "all-linear,images:all-linear")
"""All linear layers of language model and encoder are adapted. At a small rate A, whose gradient
begins at zero, would move too little to show."""

PIPELINE, FLAT = "cp=2,pp=2,dp=1,ep=2", "tp=2,dp=2,ep=4,etp=1"
"""Layouts of the language model on four ranks: in three phases, and in one."""

ON_DP = ("tp=2,dp=2", "dp=4,ep=2", ())
ON_TP_ETP = ("dp=4", "tp=2,dp=2,ep=4,etp=1", ())
ON_CP = ("tp=4", "cp=2,dp=2,ep=2", ())
ON_PP = ("dp=4", "pp=2,dp=2,ep=2", ())
APART_ON_TP = ("tp=2", "tp=2,dp=1,ep=1", APART)
APART_ON_CP = ("pp=2,dp=1", "cp=2,dp=1,ep=2", APART)
APART_ON_PP = ("dp=2", "pp=2,dp=1", APART)
"""Layouts on four ranks between which checkpoints go."""

ON_CPUS = {
    "colocated": [
        Row(8, "own defaults", "tp=2,dp=4", "cp=2,pp=2,dp=2,ep=2"),
    ],
    "non-colocated": [
        Row(8, "own defaults", "pp=2,dp=2", "tp=2,dp=2,ep=4,etp=1", APART),
        Row(4, "24 samples", "tp=1,dp=1", "dp=3,ep=1", APART),
    ],
    "largest sizes": [  # drawn rows have the others
        Row(8, "tiny", "tp=1,dp=8", "tp=2,cp=2,pp=2,dp=1,ep=4,etp=1,vpp=2"),
        Row(8, "tiny", "tp=8,dp=1", "cp=8,dp=1,ep=8", microbatches=1),
    ],
    "experts": [
        Row(4, "tiny", "dp=4", "dp=4,etp=2", ALLGATHER),
    ],
    "one pipeline of both modules": [
        Row(8, "six layers, partly text", "tp=2", "tp=2,pp=3,dp=1", APART),
        Row(8, "six layers, partly text", "dp=4", "pp=2,cp=2,dp=1,ep=2,etp=1", APART),
        Row(4, "six layers, partly text", "pp=2", "pp=2,dp=1", APART),
        Row(2, "six layers, partly text", "dp=1", "dp=1", APART),
    ],
    "two encoders": [
        Row(8, "sound and images", "images:tp=2,dp=4 sound:dp=8", "cp=2,pp=2,dp=2,ep=2"),
        Row(4, "sound and images", "images:tp=2,dp=2 sound:dp=4", PIPELINE, OVERLAP, FREEZE_SOUND),
        Row(
            *(8, "sound and images", "images:tp=2,dp=1 sound:dp=2", PIPELINE, APART),
            then=(("images:tp=2,dp=4 sound:dp=8", "tp=2,dp=4,ep=8,etp=1", ()),),
        ),
    ],
    "recurrent layers": [
        Row(4, "tiny-gdn", "tp=2", "cp=4,dp=1,ep=2", CONTIGUOUS),
        Row(4, "tiny-gdn", "tp=2", "cp=2,pp=2,vpp=2,dp=1", (*CONTIGUOUS, *FULL)),
        Row(4, "tiny-gdn", "tp=2", "cp=4,dp=1,ep=2", ZIGZAG),
        Row(4, "packed", "dp=4", "cp=2,dp=2,ep=2", ZIGZAG),
    ],
    "packed rows": [
        Row(4, "packed", "dp=4", "cp=2,pp=2,dp=1", WORKERS),
        Row(4, "packed", "dp=2", "dp=2", APART),
    ],
    "images of any size": [
        Row(4, "packed images of any size", "dp=4", PIPELINE, RECOMPUTE, ("--freeze", "encoder")),
        Row(4, "packed images of any size", "pp=2,dp=1", "cp=2,dp=1,ep=2", APART),
        Row(2, "digits of any size", "dp=2", "tp=2,dp=1", then=(("tp=2", "dp=2", ()),)),
    ],
    "clips of video": [
        Row(8, "packed sound and video", "images:tp=2,dp=4 sound:dp=8", "cp=2,pp=2,dp=2,ep=2"),
        Row(
            *(4, "packed sound and video", "images:tp=2,dp=2 sound:dp=4", FLAT),
            (*OVERLAP, *MACRO_BATCH, "--recompute-encoder", "1"),
        ),
        Row(4, "packed video", "pp=2,dp=1", "cp=2,dp=1,ep=2", APART),
    ],
    "multi-token prediction": [
        Row(8, "three tokens ahead", "tp=2,dp=4", "tp=2,cp=2,pp=2,dp=1,ep=2,etp=1"),
        Row(4, "three tokens ahead", "dp=4", PIPELINE, FULL, then=(ON_DP,)),
        Row(4, "three tokens ahead", "dp=2", "pp=2,dp=1", APART),
        Row(4, "three tokens ahead, packed", "dp=4", PIPELINE),
    ],
    "a pattern with stages": [
        Row(4, "tiny", "tp=2,dp=2", "pp=2,dp=2,ep=2", ("--hybrid-layer-pattern", "M|E*E")),
    ],
    "a padded vocabulary": [
        Row(4, "65 words, later ones too", "dp=4", "tp=2,pp=2,dp=1,ep=2,etp=1", then=(ON_DP,)),
        Row(
            *(4, "65 words", "dp=4", "tp=4,dp=1", PADDED_256),
            common=("--no-untie-embeddings-and-output-weights", *EVALUATION),
        ),
    ],
    "a batch that grows": [  # the encoder runs again in more parts, and has more macro-batches
        Row(4, "growing batch", "tp=2,dp=2", PIPELINE, ("--recompute-encoder", "1", *OVERLAP[:1])),
        Row(4, "growing batch", "tp=2,dp=2", FLAT, ("--encoder-macro-batch", "3", *OVERLAP[:1])),
    ],
    "16 bits": [
        Row(4, "bf16 on CPUs", "tp=2,dp=2", PIPELINE, then=(APART_ON_TP,)),
        Row(4, "fp16 on CPUs", "tp=2,dp=2", PIPELINE),
    ],
    "development recipe": [Row(4, "development recipe", "tp=2,dp=2", PIPELINE)],
    "bit for bit": [
        Row(4, "bit for bit", "dp=4", "dp=4", microbatches=1),
        Row(4, "bit for bit", "dp=4", "pp=4,dp=1"),
        Row(4, "bit for bit", "pp=2,dp=1", "pp=2,dp=1", APART),
        Row(2, "bit for bit", "dp=2", "pp=2,dp=1,vpp=2"),
    ],
    "checkpoints in other layouts": [
        Row(4, "few experts", *ON_PP, then=(APART_ON_CP, ON_DP, APART_ON_PP)),
        Row(4, "few experts", *APART_ON_TP, then=(ON_TP_ETP, ON_CP, APART_ON_TP)),
    ],
    "frozen parts": [
        Row(4, "few experts", *first, common=("--freeze", parts), then=(second,))
        for parts, first, second in (
            ("language", ("dp=4", PIPELINE, ()), APART_ON_CP),
            ("encoder,projector", ("dp=4", PIPELINE, ()), APART_ON_PP),
            ("encoder", APART_ON_CP, ("dp=4", PIPELINE, ())),
        )
    ],
    "adapters": [
        Row(4, "few experts", "dp=4", PIPELINE, FULL, ADAPTED, then=(APART_ON_TP, ON_TP_ETP)),
        Row(  # ranks of the encoder and three stages have no adapter
            *(4, "few experts", *APART_ON_TP),
            (*ADAPTED[:4], "--adam-eps", "1e-3", "--lora-target-modules", "linear_qkv"),
            then=(("dp=4", "pp=4,dp=1", ()), ON_DP),
        ),
        Row(4, "tiny-gdn", "tp=2", "tp=2,cp=2,dp=1", CONTIGUOUS, ADAPTED),
        Row(4, "three tokens ahead", "tp=2,dp=2", "cp=2,pp=2,dp=1,vpp=2", OVERLAP, ADAPTED),
        Row(4, "tiny", "dp=4", "dp=4,etp=2", ALLGATHER, (*ADAPTED, "--lora-rs")),
        Row(
            *(4, "sound and images", "images:tp=2,dp=2 sound:dp=4", "tp=2,dp=2", ()),
            (*ADAPTED[:4], "--lora-target-modules", "sound:all-linear,experts.linear_fc2"),
        ),
    ],
}
"""Rows on CPU ranks by what they show; the most demanding first."""

WEIGHTS = {
    "whole samples": [
        Row(8, "one step", "tp=1,dp=8", "tp=4,dp=2,ep=2,etp=1"),
        Row(8, "one step", "tp=4,dp=2", "pp=2,dp=4,ep=4,vpp=2", microbatches=4),
        Row(8, "one step", "tp=1,dp=8", "cp=2,pp=2,dp=2,ep=2", microbatches=4),
    ],
    "silent errors": [
        Row(4, "one step", "dp=4", language, options, common, microbatches=4)
        for language, options, common in (
            ("tp=2,pp=2,dp=1,ep=2,etp=1", (), ("--no-untie-embeddings-and-output-weights",)),
            (
                "tp=2,dp=2,ep=4,etp=1",
                (),
                ("--moe-shared-expert-gate", "--moe-z-loss-coeff", "0.01"),
            ),
            ("tp=2,cp=2,dp=1,ep=2,etp=2", FULL, ("--moe-shared-expert-gate",)),
            ("tp=4,dp=1,ep=2,etp=1", ALLGATHER, ("--moe-aux-loss-coeff", "0.01")),
            ("tp=2,dp=2", (), GDN),
            (
                *("tp=2,cp=2,dp=1", ZIGZAG),
                ("--normalization", "LayerNorm", "--position-embedding-type", "rope"),
            ),
        )
    ],
}
"""Rows whose weights after a step are those of a layout with cp=1, pp=1 and the encoder's tp."""
