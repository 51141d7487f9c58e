# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A layer's tokens: as links of a recurrence, and between zigzag and contiguous token layouts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.state_passing.options import passes_states
from megatron.core.token_layout import (
    PaddedLengths,
    Route,
    contiguous_layout,
    exchange,
    lengths_of_batch,
    plan_route,
    zigzag_layout,
)
from megatron.core.token_layout.recurrence_plan import RecurrencePlan, plan_recurrence

Projection = Callable[[Tensor], tuple[Tensor, Tensor | None]]


class LayerTokens:
    """Tokens of one layer, or of a stack of them.

    Args:
        pg_collection: groups ``tp`` and ``cp``; with sequence parallelism also ``tp_cp``.

    Attributes:
        is_zigzag: whether the layer's input and output are zigzag. True until a stack that keeps
            tokens contiguous calls :func:`tokens_are_contiguous`.
    """

    def __init__(self, config, pg_collection) -> None:
        self.cp_group = pg_collection.cp
        self.tp_size = pg_collection.tp.size()
        self.cp_size = self.cp_group.size()
        self.is_zigzag = True
        self.sp_size = self.tp_size if config.sequence_parallel else 1
        self._hidden_group = self.cp_group
        if self.sp_size > 1 and self.cp_size > 1:
            self._hidden_group = getattr(pg_collection, "tp_cp", None)
            wanted = self.cp_group.rank() * self.tp_size + pg_collection.tp.rank()
            if self._hidden_group is None or self._hidden_group.rank() != wanted:
                raise ValueError(
                    "state passing with sequence parallelism needs a tp_cp group in which tp is "
                    f"the fastest: rank {wanted} of {self.tp_size * self.cp_size} here, found "
                    f"{self._hidden_group and self._hidden_group.rank()}"
                )

    def lengths(self, hidden: Tensor, packed: PackedSeqParams | None) -> PaddedLengths:
        """Lengths of the batch whose shard is ``hidden [S/(cp·sp), B, H]``."""
        return lengths_of_batch(packed, hidden.size(0) * self.cp_size * self.sp_size)

    def recurrence(self, hidden: Tensor, packed: PackedSeqParams | None) -> RecurrencePlan:
        """Plan of a recurrence over the batch whose shard is ``hidden [S/(cp·sp), B, H]``."""
        lengths, rank = self.lengths(hidden, packed), self.cp_group.rank()
        return plan_recurrence(lengths, self.cp_size, rank, hidden.device, self.is_zigzag)

    def to_contiguous(self, hidden: Tensor, packed: PackedSeqParams | None) -> Tensor:
        """Convert ``hidden [S/(cp·sp), B, …]`` from zigzag to contiguous; a collective."""
        return exchange(hidden, self._route(hidden, packed), self._hidden_group)

    def to_zigzag(self, hidden: Tensor, packed: PackedSeqParams | None) -> Tensor:
        """Convert from contiguous to zigzag: the inverse of :meth:`to_contiguous`, bit for bit."""
        return exchange(hidden, self._route(hidden, packed).reversed(), self._hidden_group)

    def project_in(
        self,
        hidden: Tensor,
        packed: PackedSeqParams | None,
        plan: RecurrencePlan,
        projection: Projection,
    ) -> Tensor:
        """Project ``hidden [S/(cp·sp), B, H]`` to the plan's links, ``[links, L, …]``."""
        if self._converts(plan):
            hidden = self.to_contiguous(hidden, packed)
        return plan.by_link(projection(hidden)[0].transpose(0, 1))

    def project_out(
        self,
        y: Tensor,
        packed: PackedSeqParams | None,
        plan: RecurrencePlan,
        projection: Projection,
    ) -> tuple[Tensor, Tensor | None]:
        """Project ``y [S/cp, B, …]`` to ``[S/(cp·sp), B, H]``; and the bias."""
        out, bias = projection(y)
        return (self.to_zigzag(out, packed) if self._converts(plan) else out), bias

    def _converts(self, plan: RecurrencePlan) -> bool:
        return self.is_zigzag and not plan.is_zigzag

    def _route(self, hidden: Tensor, packed: PackedSeqParams | None) -> Route:
        lengths = self.lengths(hidden, packed)
        rank = self._hidden_group.rank()
        return _cached_route(lengths, self.cp_size, self.sp_size, rank, hidden.device)


def groups_and_tokens(pg_collection, config) -> tuple[object, LayerTokens | None]:
    """Groups over which a recurrent layer splits its heads, and the mover of its tokens.

    Returns:
        ``pg_collection`` and None if the layer splits its heads over CP or has one CP rank. If it
        passes states between ranks: a copy whose ``cp`` is one rank, and a :class:`LayerTokens`.
    """
    if not passes_states(config) or pg_collection.cp.size() == 1:
        return pg_collection, None
    groups = copy.copy(pg_collection)
    groups.cp = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    return groups, LayerTokens(config, pg_collection)


def tokens_are_contiguous(layers: nn.Module) -> None:
    """Tell the recurrent layers among ``layers`` that their input and output are contiguous."""
    for module in layers.modules():
        if tokens := getattr(module, "layer_tokens", None):
            tokens.is_zigzag = False


def exchange_halo(x: Tensor, reach: int, plan: RecurrencePlan, group: dist.ProcessGroup) -> Tensor:
    """The ``reach`` tokens before each link of ``x [links, L, D]``; a collective over ``group``."""
    halo = plan.halo(reach)
    if halo.route.is_local:
        return x.new_zeros(x.shape[0], reach, x.shape[2])
    last = plan.tokens_first(x[:, x.shape[1] - halo.kept :])
    return plan.links_first(exchange(last, halo.route, group, halo.adjoint))


@lru_cache(maxsize=64)
def _cached_route(
    lengths: PaddedLengths, cp_size: int, sp_size: int, rank: int, device: torch.device
) -> Route:
    layouts = (zigzag_layout(lengths, cp_size), contiguous_layout(lengths, cp_size))
    source, destination = (layout.over_tensor_ranks(sp_size) for layout in layouts)
    return plan_route(source, destination, rank).to(device)
