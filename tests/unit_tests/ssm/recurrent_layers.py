# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Small recurrent layers over CP ranks, and the same layers with every token on one rank."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.silu_gated_delta_net import SiluGatedDeltaNet
from megatron.core.ssm.state_passing.layer_tokens import tokens_are_contiguous
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.token_layout import PaddedLengths, TokenLayout, contiguous_layout, zigzag_layout
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.sequence_parallel_norm import SequenceParallelNorm
from tests.unit_tests.no_host_sync import no_host_sync
from tests.unit_tests.test_utilities import HAVE_CUDA, Utils

HIDDEN = 32
MAMBA, DELTA_NET = "mamba", "gated delta net"
PROJECTIONS = {"in_proj": ColumnParallelLinear, "out_proj": RowParallelLinear}
SIZES = dict(
    mamba_num_heads=8,
    mamba_head_dim=16,
    mamba_num_groups=2,
    mamba_state_dim=8,
    linear_key_head_dim=8,
    linear_value_head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)
"""Sizes of both kinds of layers."""


@dataclass(frozen=True)
class Row:
    """A layer over ``cp`` × ``tp`` of ``world`` ranks; the others stay idle.

    options: of the sharded layer alone.
    """

    world: int
    layer: str
    cp: int
    tp: int = 1
    layout: str = "zigzag"
    dtype: torch.dtype = torch.float32
    options: dict = field(default_factory=dict)

    def __str__(self) -> str:
        words = [self.layer, f"tp={self.tp}", f"cp={self.cp}", self.layout]
        words.append(str(self.dtype).removeprefix("torch."))
        words += ["norm-again"] if self.options else []
        return ",".join(words).replace(" ", "-")


def make_layer(
    name: str,
    groups: SimpleNamespace,
    layout: str,
    dtype: torch.dtype,
    **options,
) -> nn.Module:
    """A layer over ``groups``, alike on all ranks of one TP coordinate.

    Args:
        options: more fields of TransformerConfig.
    """
    tp_rank = groups.tp.rank()
    model_parallel_cuda_manual_seed(7, tp_rank=tp_rank, ep_rank=0, etp_rank=tp_rank)
    torch.manual_seed(7)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        normalization="RMSNorm",
        use_cpu_initialization=True,
        params_dtype=dtype,
        linear_cp_mode="chunkwise",
        **SIZES | options,
    )
    if name == MAMBA:
        parts = MambaMixerSubmodules(**PROJECTIONS)
        layer = MambaMixer(config, parts, HIDDEN, chunk_size=16, pg_collection=groups)
        varied = (layer.D, layer.norm.weight, layer.conv1d_bias)
    else:
        parts = GatedDeltaNetSubmodules(**PROJECTIONS, out_norm=SequenceParallelNorm)
        layer = SiluGatedDeltaNet(config, parts, layer_number=1, pg_collection=groups)
        layer.A_log.data.fill_(-1)
        varied = (layer.dt_bias, layer.A_log)
    # Heads must differ in every parameter: those that start out as ones would hide a mix-up.
    generator = torch.Generator().manual_seed(tp_rank)
    with torch.no_grad():
        for parameter in varied:
            parameter.add_(torch.rand(parameter.shape, generator=generator).to(parameter.device))
        layer.A_log.sub_(3)  # decays slow enough that a state outlives a shard
    if layout == "contiguous":
        tokens_are_contiguous(layer)
    return layer.to(Utils.device, dtype)


def call(layer: nn.Module, hidden: Tensor, packed_seq_params: PackedSeqParams | None) -> Tensor:
    """A layer's output."""
    more = {"attention_mask": None} if isinstance(layer, SiluGatedDeltaNet) else {}
    return layer(hidden, packed_seq_params=packed_seq_params, **more)[0]


# Relative to the whole tensor's norm, of the output and of gradients. On a GPU the kernels multiply
# fp32 in TF32, whose mantissa has 10 bits.
TOLERANCES = {
    torch.float32: (3e-3, 1e-2) if HAVE_CUDA else (1e-5, 1e-4),
    torch.float64: (1e-10, 1e-10),
}

ROUNDED_TO_FP32 = ("dt_bias", "A_log")
"""Upstream's Mamba mixer takes these parameters, and so their gradients, through fp32."""


def groups_of(grid: HyperCommGrid) -> SimpleNamespace:
    """Make the groups that a layer takes."""
    return SimpleNamespace(
        tp=grid.create_pg("tp"), cp=grid.create_pg("cp"), tp_cp=grid.create_pg(["tp", "cp"])
    )


class Pair:
    """A row's layer and, with the same weights, its oracle on one rank, which has every token."""

    def __init__(self, row: Row) -> None:
        Utils.initialize_distributed()
        self.row, self.size, self.dtype = row, row.cp, row.dtype
        self.tolerances = TOLERANCES[row.dtype]
        self.grids = [
            HyperCommGrid([row.tp, row.cp], ["tp", "cp"]),
            HyperCommGrid([row.tp, 1, row.cp], ["tp", "cp", "dp"]),
        ]
        groups, alone = map(groups_of, self.grids)
        self.is_member = self.grids[0].is_current_rank_in_grid()
        if self.is_member:
            self.cp_group, self.rank = groups.cp, groups.cp.rank()
            shared = {"layout": row.layout, "dtype": row.dtype}
            self.sharded = make_layer(row.layer, groups, **shared, **row.options)
            self.whole = make_layer(row.layer, alone, **shared)
            self.sharded.load_state_dict(self.whole.state_dict())

    def destroy(self) -> None:
        """Free the groups."""
        for grid in self.grids:
            grid.destroy()

    def layout(self, lengths: PaddedLengths) -> TokenLayout:
        """Return the layout of the tokens that the ranks give the sharded layer."""
        make = zigzag_layout if self.row.layout == "zigzag" else contiguous_layout
        return make(lengths, self.size)

    def assert_equal(self, hidden: Tensor, lengths: PaddedLengths, packed: bool) -> None:
        """Compare output and all gradients of real tokens ``hidden`` with each sample alone.

        In a packed batch in fp32, a second layer makes the host wait for nothing.
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
