# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Share out batches of equal samples that both modules' ranks of a DP index have been given."""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from megatron.core.models.mimo.bridge.topology import BridgeTopology

Microbatch = dict[str, object]


def shared_out(
    microbatches: list[Microbatch], topology: BridgeTopology, encoder_name: str
) -> list[Microbatch]:
    """Cut the microbatches of a step to what this rank encodes, and to what it consumes.

    Args:
        microbatches: MimoModel's keyword arguments, with the samples of a DP index of the module
            with fewer DP ranks; they end with the encoders' inputs in the first microbatch.

    Raises:
        ValueError: the rank encodes samples of another DP index than it consumes, or packed samples
            would have to be cut.
    """
    rank = dist.get_rank()
    encoded, consumed = topology.encodes(rank), topology.consumes(rank)
    whole = max(encoded, consumed, key=len)
    if not set(encoded) | set(consumed) <= set(whole):
        raise ValueError(
            f"rank {rank} encodes samples of other DP indices than it consumes: give the ranks "
            "their samples yourself, and call colocated_forward_backward"
        )
    pieces = len(whole) // len(consumed)
    if pieces > 1 and any(batch.get("packing_kwargs") is not None for batch in microbatches):
        raise ValueError(
            f"packed samples cannot be cut for language model dp={topology.dest_dp} and encoder "
            f"dp={topology.src_dp}; use an encoder dp of as many or more"
        )
    own = (consumed.start - whole.start) // len(consumed)
    inputs = [
        (batch.pop("modality_inputs", None) or {}).get(encoder_name) for batch in microbatches
    ]
    if all(part is not None for part in inputs):
        place = (encoded.start - whole.start) // len(encoded)
        join = partial(_joined, pieces=pieces, place=place, places=len(whole) // len(encoded))
        microbatches[0]["modality_inputs"] = {encoder_name: tree_map(join, *inputs)}
    elif any(part is not None for part in inputs):
        raise ValueError(f"all microbatches must have inputs of {encoder_name}, or none")
    return [_cut(batch, own, pieces) for batch in microbatches]


def _cut(batch: Microbatch, own: int, pieces: int) -> Microbatch:
    """Return piece ``own`` of a batch's text; position ids may have rotary axes in front."""
    names = ("input_ids", "labels", "loss_mask", "position_ids")
    cut = {
        name: batch[name].chunk(pieces, dim=batch[name].dim() - 2)[own]
        for name in names
        if batch.get(name) is not None
    }
    return batch | cut


def _joined(*values: object, pieces: int, place: int, places: int) -> object:
    """Join inputs in the order in which the language model consumes them, and take a part of them.

    Each DP index of the language model consumes one of ``pieces`` pieces of every microbatch.
    """
    if not isinstance(values[0], Tensor):
        return values[0]
    dim = 1 if values[0].dim() == 3 else 0
    size = sum(value.size(dim) for value in values)
    if size % places or any(value.size(dim) % pieces for value in values):
        raise ValueError(f"{size} samples in {len(values)} microbatches are not divisible")
    ordered = [value.chunk(pieces, dim)[piece] for piece in range(pieces) for value in values]
    return torch.cat(ordered, dim).chunk(places, dim)[place].contiguous()
