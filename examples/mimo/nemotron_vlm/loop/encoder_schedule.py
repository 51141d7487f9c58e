# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""How many microbatches a colocated encoder encodes at once."""

from argparse import Namespace

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import COLOCATED, Layouts
from examples.mimo.nemotron_vlm.data import have_equal_images
from megatron.core.models.mimo.config.encoder_schedule import EncoderSchedule

FASTEST = 2
"""Microbatches encoded at once on GPUs: one alone has too little work for its kernels."""


def schedule_of(args: Namespace) -> EncoderSchedule:
    """Return the settings of the encoder's schedule that the options give."""
    return EncoderSchedule(args.encoder_macro_batch, args.recompute_encoder or None)


def fastest_macro_batch(layouts: Layouts) -> int:
    """Return how many microbatches GPUs encode at once by default."""
    is_free = not layouts.non_colocated and layouts.language.pp == 1
    return min(FASTEST, layouts.num_microbatches) if is_free else 1


def set_macro_batch(args: Namespace, layouts: Layouts) -> None:
    """Choose the microbatches encoded at once, unless an option does, and check their number.

    Raises:
        UserError: the layouts or CUDA graphs do not allow the number.
    """
    if args.encoder_macro_batch is None:
        fastest = fastest_macro_batch(layouts)
        takes_fastest = args.device == "cuda" and not _graphs_overlap(args, layouts, fastest)
        args.encoder_macro_batch = fastest if takes_fastest else 1
    at_once = args.encoder_macro_batch
    if at_once > 1 and (layouts.non_colocated or layouts.language.pp > 1):
        raise UserError(
            f"--encoder-macro-batch needs --placement {COLOCATED} and a language model with pp=1; "
            "with a pipeline, all microbatches of a step are encoded at once"
        )
    if _graphs_overlap(args, layouts, at_once):
        raise UserError(
            f"--cuda-graph-impl local: --encoder-macro-batch {at_once} must divide "
            f"the {layouts.num_microbatches} microbatches of a step"
        )


def _graphs_overlap(args: Namespace, layouts: Layouts, at_once: int) -> bool:
    """Return whether CUDA graphs would overwrite memory that others of a step still need.

    Without a pipeline, the language model's graphs are those of a step's first microbatch. Graphs
    of a last, smaller macro-batch would take memory that was free after it, but is used again when
    they are replayed.
    """
    has_graphs = args.cuda_graph_impl == "local" and have_equal_images(args)
    count = layouts.num_microbatches
    return has_graphs and layouts.language.pp == 1 and count > at_once and count % at_once > 0
