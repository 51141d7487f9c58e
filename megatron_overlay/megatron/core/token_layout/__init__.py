# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Token layouts under context parallelism, and the exchange of tokens between layouts.

Plan on the host, once per batch::

    lengths = pad_lengths(sample_lengths, cp_size)
    zigzag, contiguous = zigzag_layout(lengths, cp_size), contiguous_layout(lengths, cp_size)
    route = plan_route(zigzag, contiguous, cp_group.rank()).to(device)

Execute in the layers, without waiting for the device::

    hidden = exchange(hidden, route, cp_group)              # [total/cp, ...]
    hidden = exchange(hidden, route.reversed(), cp_group)   # restored bit for bit

Attention and recurrent layers plan by `attention_plan` and `recurrence_plan`.
"""

from megatron.core.token_layout.exchange import Moving, exchange, gather_tokens
from megatron.core.token_layout.layouts import (
    TokenLayout,
    check_zigzag_lengths,
    contiguous_layout,
    zigzag_layout,
    zigzag_owners,
)
from megatron.core.token_layout.padded_lengths import (
    PaddedLengths,
    copied_to,
    lengths_of_batch,
    pad_lengths,
)
from megatron.core.token_layout.route import Route, plan_route

__all__ = [
    "Moving",
    "PaddedLengths",
    "Route",
    "TokenLayout",
    "check_zigzag_lengths",
    "contiguous_layout",
    "copied_to",
    "exchange",
    "gather_tokens",
    "lengths_of_batch",
    "pad_lengths",
    "plan_route",
    "zigzag_layout",
    "zigzag_owners",
]
