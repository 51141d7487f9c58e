# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Print what the zigzag to contiguous exchange moves, against the least and against a gather.

Usage, with the checkout on PYTHONPATH: python tools/bench/context_parallel_exchange.py
Under torchrun with N > 1 ranks, also the time at cp=N, against gathering everything.
"""

import os

import torch
import torch.distributed as dist
from ranks import seconds, start

from megatron.core.context_parallel_layout import (
    contiguous_layout,
    exchange,
    gather_tokens,
    pad_lengths,
    plan_route,
    received_tokens,
    zigzag_layout,
)

CP_SIZES = (2, 3, 4, 5, 8, 16)
BATCHES = {
    "one sample of 32768": (32768,),
    "64 odd samples, 21 to 1029 long": tuple(21 + 16 * i for i in range(64)),
}
HIDDEN = 2688


def print_volumes() -> None:
    """Tokens received, over all ranks: the exchange, the least, and an all-gather."""
    print("| batch | cp | moved share | moved / least | gather / moved | fullest rank / shard |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, lengths in BATCHES.items():
        for cp_size in CP_SIZES:
            padded = pad_lengths(lengths, cp_size)
            zigzag = zigzag_layout(padded, cp_size)
            contiguous = contiguous_layout(padded, cp_size)
            received = received_tokens(zigzag, contiguous)
            moved = sum(received)
            # No exchange can do with less than the real tokens whose rank differs.
            changes = zigzag.places // zigzag.shard_size != contiguous.places // zigzag.shard_size
            least = int((changes & padded.valid).sum())
            print(
                f"| {name} | {cp_size} | {moved / padded.total:.3f} | {moved / least:.3f} "
                f"| {(cp_size - 1) * padded.total / moved:.2f} "
                f"| {max(received) / zigzag.shard_size:.3f} |"
            )


def print_times() -> None:
    """Time of an exchange over that of an all-gather and a selection, forward and backward."""
    device = start()
    group, cp_size, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    if rank == 0:
        print(f"\n| batch | cp | exchange / gather, time on {device.type} |\n|---|---:|---:|")
    for name, lengths in BATCHES.items():
        padded = pad_lengths(lengths, cp_size)
        zigzag = zigzag_layout(padded, cp_size).to(device)
        contiguous = contiguous_layout(padded, cp_size).to(device)
        route = plan_route(zigzag, contiguous, rank)
        shard = torch.ones(zigzag.shard_size, HIDDEN, device=device, requires_grad=True)

        def by_exchange(shard=shard, route=route):
            exchange(shard, route, group).sum().backward()

        def by_gather(shard=shard, zigzag=zigzag, contiguous=contiguous):
            contiguous.shard(gather_tokens(shard, zigzag, group), rank).sum().backward()

        ratio = seconds(by_exchange, device) / seconds(by_gather, device)
        if rank == 0:
            print(f"| {name} | {cp_size} | {ratio:.2f} |")
    dist.destroy_process_group()


def main() -> None:
    """Volumes always; times where there are ranks."""
    if int(os.environ.get("RANK", "0")) == 0:
        print_volumes()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        print_times()


if __name__ == "__main__":
    main()
