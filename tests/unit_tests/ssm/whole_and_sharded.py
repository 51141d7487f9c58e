# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A recurrent layer over CP ranks against the same layer on one, for the tests of each layer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.token_layout import (
    PaddedLengths,
    TokenLayout,
    contiguous_layout,
    zigzag_layout,
)
from tests.unit_tests.no_host_sync import no_host_sync
from tests.unit_tests.test_utilities import HAVE_CUDA, Utils

Tolerances = tuple[float, float]
"""Tolerances of the output and of gradients, relative to the whole tensor's norm."""

# On a GPU the kernels multiply fp32 in TF32, whose mantissa has 10 bits.
TOLERANCES: dict[torch.dtype, Tolerances] = {
    torch.float32: (3e-3, 1e-2) if HAVE_CUDA else (1e-5, 1e-4),
    torch.float64: (1e-10, 1e-10),
}
ROUNDED_TO_FP32 = ("dt_bias", "A_log")
"""Upstream's Mamba mixer takes these parameters, and so their gradients, through fp32."""


@dataclass(frozen=True)
class Ranks:
    """``cp`` ranks, beside ``tp``; ranks of the world beyond them stay idle."""

    cp: int
    tp: int = 1

    def __str__(self) -> str:
        return f"tp={self.tp},cp={self.cp}"


class Pair:
    """A layer over CP ranks and, with the same weights, its oracle that has every token.

    Args:
        make: builds the layer over the given groups; alike on all ranks of one TP coordinate.
        layout: layout of the tokens that the sharded layer is given.
        dtype: dtype of the layers.
        tolerances: take the place of the dtype's.
    """

    def __init__(
        self,
        ranks: Ranks,
        make: Callable[[SimpleNamespace, bool], nn.Module],
        layout: str,
        dtype: torch.dtype = torch.float32,
        tolerances: Tolerances | None = None,
    ) -> None:
        Utils.initialize_distributed()
        self.size, self.layout_name, self.dtype = ranks.cp, layout, dtype
        self.tolerances = tolerances or TOLERANCES[dtype]
        self.grids = [
            HyperCommGrid([ranks.tp, ranks.cp], ["tp", "cp"]),
            HyperCommGrid([ranks.tp, 1, ranks.cp], ["tp", "cp", "dp"]),
        ]
        groups = [
            SimpleNamespace(
                tp=g.create_pg("tp"), cp=g.create_pg("cp"), tp_cp=g.create_pg(["tp", "cp"])
            )
            for g in self.grids
        ]
        self.is_member = self.grids[0].is_current_rank_in_grid()
        if self.is_member:
            self.groups = groups[0]
            self.cp_group, self.rank = self.groups.cp, self.groups.cp.rank()
            self.sharded, self.whole = make(self.groups, True), make(groups[1], False)
            self.sharded.load_state_dict(self.whole.state_dict())

    def destroy(self) -> None:
        """Free the groups."""
        for grid in self.grids:
            grid.destroy()

    def layout(self, lengths: PaddedLengths) -> TokenLayout:
        """Return the layout of the tokens that the ranks give the sharded layer."""
        make = zigzag_layout if self.layout_name == "zigzag" else contiguous_layout
        return make(lengths, self.size)

    def assert_equal(self, call, hidden: Tensor, lengths: PaddedLengths, packed: bool) -> None:
        """Compare output and all gradients of real tokens ``hidden`` with each sample alone.

        In a packed batch in fp32, a second layer makes the host wait for nothing.

        Args:
            call: ``(layer, hidden, packed_seq_params) -> output``.
        """
        forward_tolerance, gradient_tolerance = self.tolerances
        layout = self.layout(lengths)
        weight = random_rows(*hidden.shape[:2], hidden.shape[2], seed=2).to(hidden.dtype)
        expected_input = hidden.clone().requires_grad_()
        samples = [s for s in expected_input.split(lengths.real) if len(s)]
        expected = torch.cat([call(self.whole, sample, None) for sample in samples])
        (expected * weight).sum().backward()

        found_input = hidden.clone().requires_grad_()
        # The padding's numbers would show if they reached a real token.
        shard = layout.shard(lengths.pad(found_input, value=3.0), self.rank)
        weight = layout.shard(lengths.pad(weight), self.rank)
        params, guard = None, nullcontext()
        if packed:
            params = lengths.packed_seq_params(Utils.device)
        if packed and self.dtype is torch.float32:
            call(self.sharded, shard.detach(), params)  # makes the batch's plans
            guard = no_host_sync()
        with guard:
            found = call(self.sharded, shard, params)
            (found * weight).sum().backward()

        real = layout.shard(lengths.valid, self.rank).to(Utils.device)
        expected_shard = layout.shard(lengths.pad(expected), self.rank)
        # An empty shard of real tokens has no norm.
        if real.any():
            assert_close(found[real], expected_shard[real], forward_tolerance, "output")
        dist.all_reduce(found_input.grad, group=self.cp_group)
        assert_close(found_input.grad, expected_input.grad, gradient_tolerance, "input gradient")
        expected_gradients = dict(self.whole.named_parameters())
        for name, parameter in self.sharded.named_parameters():
            # As the data-parallel reduction adds them up.
            gradient = parameter.grad.clone()
            dist.all_reduce(gradient, group=self.cp_group)
            tolerance = max(gradient_tolerance, 1e-6 * (name in ROUNDED_TO_FP32))
            assert_close(gradient, expected_gradients[name].grad, tolerance, name)


def random_rows(tokens: int, batch: int, width: int, seed: int) -> Tensor:
    """``[tokens, batch, width]``, alike on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, batch, width, generator=generator).to(Utils.device)


def assert_close(found: Tensor, expected: Tensor, tolerance: float, name: str) -> None:
    """Compare to ``tolerance`` of the whole tensor's norm: terms are added in another order."""
    error = (found - expected).norm() / expected.norm()
    assert error < tolerance, f"{name}: relative error {error:.1e}"
