# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Schedules of the colocated encoder: around the language model's pipeline, or in its bubbles."""

import os
from argparse import Namespace

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import BUBBLES, COLOCATED, THREE_PHASES, Layout, Layouts
from examples.mimo.nemotron_vlm.data import have_equal_images
from megatron.core.models.mimo.config.encoder_schedule import EncoderSchedule

FASTEST = 2
"""Microbatches encoded at once on GPUs: one alone has too little work for its kernels."""


def schedule_of(args: Namespace) -> EncoderSchedule:
    """Return the settings of the encoder's schedule that the options give."""
    in_bubbles = args.encoder_schedule == BUBBLES
    return EncoderSchedule(args.encoder_macro_batch, in_bubbles, args.recompute_encoder or None)


def fastest_macro_batch(layouts: Layouts, in_bubbles: bool) -> int:
    """Return how many microbatches GPUs encode at once by default; in bubbles, at most half."""
    encodes_all = EncoderSchedule(in_bubbles=in_bubbles).encodes_all(layouts.language.pp)
    if layouts.non_colocated or encodes_all:
        return 1
    number = layouts.num_microbatches
    return min(FASTEST, max(1, number // 2) if in_bubbles else number)


def set_encoder_schedule(args: Namespace, layouts: Layouts) -> None:
    """Choose the schedule and the microbatches encoded at once, unless options set them."""
    if args.encoder_schedule is None:
        args.encoder_schedule = BUBBLES if bubbles_win(args, layouts) else THREE_PHASES
    if args.encoder_macro_batch is None:
        fastest = fastest_macro_batch(layouts, args.encoder_schedule == BUBBLES)
        takes_fastest = args.device == "cuda" and not graphs_overlap(args, layouts, fastest)
        args.encoder_macro_batch = fastest if takes_fastest else 1


def graphs_overlap(args: Namespace, layouts: Layouts, at_once: int) -> bool:
    """Return whether CUDA graphs would overwrite memory that others of a step still need.

    Without a pipeline, the language model's graphs are those of a step's first microbatch. Graphs
    of a last, smaller macro-batch would take memory that was free after it, but is used again when
    they are replayed.
    """
    has_graphs = args.cuda_graph_impl == "local" and have_equal_images(args)
    count = layouts.num_microbatches
    return has_graphs and layouts.language.pp == 1 and count > at_once and count % at_once > 0


def bubbles_win(args: Namespace, layouts: Layouts) -> bool:
    """Return whether bubbles are known, from measurements, to be faster than three phases.

    They are with CUDA graphs of the encoder, which need a GPU and colocated modules. Axes other
    than pp and dp were not measured.
    """
    language = layouts.language
    at_once = args.encoder_macro_batch or fastest_macro_batch(layouts, in_bubbles=True)
    return (
        args.cuda_graph_impl == "local"
        and have_equal_images(args)
        and language.pp > 1
        and language.tp == language.cp == language.ep == language.vpp == 1
        and all(encoder.tp == 1 for encoder in layouts.encoders)
        and _kernels_run_beside_waiting_ones()
        and FASTEST <= at_once <= layouts.num_microbatches // 2
        and not in_several_stages(layouts)
    )


def _kernels_run_beside_waiting_ones() -> bool:
    """Return whether a kernel that waits for another rank holds back no kernel of this rank.

    It does so on a single connection to the device, while another kernel is loaded, and if ranks
    share a GPU. The program sets both variables unless they are set already.
    """
    import torch  # after the program has set the variables that it reads

    ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    return (
        os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1"
        and os.environ.get("CUDA_MODULE_LOADING") == "EAGER"
        and (gpus == 0 or ranks <= gpus)  # none if a run is only described
    )


def in_several_stages(layouts: Layouts) -> Layout | None:
    """Return an encoder of which a TP group lies in several pipeline stages; bubbles take none."""
    ranks = layouts.language.size // layouts.language.pp
    return next((each for each in layouts.encoders if ranks % each.tp), None)


def check_encoder_schedule(args: Namespace, layouts: Layouts) -> None:
    """Refuse options and layouts that do not go with the encoder's schedule."""
    language, apart, schedule = layouts.language, layouts.non_colocated, schedule_of(args)
    in_bubbles = schedule.in_bubbles
    if schedule.macro_batch > 1 and (apart or schedule.encodes_all(language.pp)):
        raise UserError(
            f"--encoder-macro-batch needs --placement {COLOCATED} and a language model with pp=1, "
            f"or --encoder-schedule {BUBBLES}; in three phases, all microbatches of a step are "
            "encoded at once"
        )
    if graphs_overlap(args, layouts, schedule.macro_batch):
        raise UserError(
            f"--cuda-graph-impl local: --encoder-macro-batch {schedule.macro_batch} must divide "
            f"the {layouts.num_microbatches} microbatches of a step"
        )
    if in_bubbles and (apart or language.pp == 1):
        raise UserError(
            f"--encoder-schedule {BUBBLES} needs --placement {COLOCATED} and a language model "
            "with pp of 2 or more, whose stages wait"
        )
    if in_bubbles and (encoder := in_several_stages(layouts)):
        raise UserError(
            f"--encoder-schedule {BUBBLES}: a TP group of --encoder {encoder} must lie in "
            f"one stage of --language {language}, which has {language.size // language.pp} ranks"
        )
    if in_bubbles and language.vpp > 1 and not args.overlap_p2p_comm:
        raise UserError(
            "--no-overlap-p2p-communication does not go with virtual stages and "
            f"--encoder-schedule {BUBBLES}"
        )
