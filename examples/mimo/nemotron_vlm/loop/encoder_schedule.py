# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Schedules of the colocated encoder: around the language model's pipeline, or in its bubbles."""

from __future__ import annotations

import os
from argparse import Namespace

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import (
    BUBBLES,
    COLOCATED,
    NON_COLOCATED,
    THREE_PHASES,
    Layout,
    Layouts,
)
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
        args.encoder_macro_batch = fastest if args.device == "cuda" else 1


def bubbles_win(args: Namespace, layouts: Layouts) -> bool:
    """Return whether bubbles are known, from measurements, to be faster than three phases.

    They are with CUDA graphs, which need a GPU and colocated modules. Checking each loss for NaN
    makes the host wait, but it must run ahead of the device. Axes other than pp and dp were not
    measured.
    """
    language = layouts.language
    at_once = args.encoder_macro_batch or fastest_macro_batch(layouts, in_bubbles=True)
    return (
        args.cuda_graph_impl == "local"
        and not args.check_for_nan_in_loss_and_grad
        and language.pp > 1
        and language.tp == language.cp == language.ep == language.vpp == 1
        and all(encoder.tp == 1 for encoder in layouts.encoders)
        and _kernels_run_beside_waiting_ones()
        and FASTEST <= at_once <= layouts.num_microbatches // 2
        and bubbles_may_run(layouts)
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


def check_encoder_schedule(args: Namespace, language: Layout) -> None:
    """Refuse options that need another schedule or placement.

    Raises:
        UserError: such an option is set.
    """
    apart, in_bubbles = args.placement == NON_COLOCATED, args.encoder_schedule == BUBBLES
    if args.encoder_macro_batch > 1 and (apart or schedule_of(args).encodes_all(language.pp)):
        raise UserError(
            f"--encoder-macro-batch needs --placement {COLOCATED} and a language model with pp=1, "
            f"or --encoder-schedule {BUBBLES}; in three phases, all microbatches of a step are "
            "encoded at once"
        )
    if in_bubbles and (apart or language.pp == 1):
        raise UserError(
            f"--encoder-schedule {BUBBLES} needs --placement {COLOCATED} and a language model "
            "with pp of 2 or more, whose stages wait"
        )


def bubbles_may_run(layouts: Layouts) -> bool:
    """Return whether each TP group of an encoder lies in one pipeline stage, as bubbles need."""
    return _in_several_stages(layouts) is None


def _in_several_stages(layouts: Layouts) -> Layout | None:
    """Return an encoder whose TP groups do not lie in one pipeline stage each."""
    ranks = layouts.language.size // layouts.language.pp
    return next((each for each in layouts.encoders if ranks % each.tp), None)


def check_bubbles(args: Namespace, layouts: Layouts) -> None:
    """Refuse layouts and options with which the encoder cannot run in the pipeline's bubbles.

    Raises:
        UserError: the layouts or options are such.
    """
    if args.encoder_schedule != BUBBLES:
        return
    if encoder := _in_several_stages(layouts):
        ranks = layouts.language.size // layouts.language.pp
        raise UserError(
            f"--encoder-schedule {BUBBLES}: a TP group of --encoder {encoder} must lie in "
            f"one stage of --language {layouts.language}, which has {ranks} ranks"
        )
    if layouts.language.vpp > 1 and not args.overlap_p2p_comm:
        raise UserError(
            "--no-overlap-p2p-communication does not go with virtual stages and "
            f"--encoder-schedule {BUBBLES}"
        )
