# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Order in which a pipeline stage runs forwards and backwards; needs no process group."""

from types import SimpleNamespace

from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table


def order_of_stage(
    stage: int, size: int, microbatches: int, vpp: int
) -> list[tuple[str, int, int]]:
    """Return the operations of a stage in Megatron's 1F1B, in order.

    Args:
        vpp: virtual stages of each stage; with more than one, the schedule is interleaved.

    Returns:
        ``"forward"`` or ``"backward"``, virtual stage and microbatch of each operation.
    """
    fake = SimpleNamespace(size=lambda: size, rank=lambda: stage)
    place = SimpleNamespace(
        pp_group=fake, virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None
    )
    table = get_schedule_table(microbatches, vpp, size)
    warmup = get_pp_rank_microbatches(microbatches, vpp, size, p2p_communicator=place)[2]
    forwards = [("forward", chunk, number) for number, chunk in table]
    backwards = [("backward", vpp - 1 - chunk, number) for number, chunk in table]
    steady = [step for pair in zip(forwards[warmup:], backwards, strict=False) for step in pair]
    return [*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :]]
