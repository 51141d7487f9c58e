# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers that pass states over two GPUs, with kernels and with the reference ops."""

import pytest
import torch

from megatron.core.ssm.state_passing.gated_delta import layer as gated_delta_net
from megatron.core.ssm.state_passing.mamba import layer as mamba
from megatron.core.token_layout import PaddedLengths, pad_lengths
from tests.unit_tests.ssm.recurrent_layers import (
    DELTA_NET,
    MAMBA,
    Pair,
    Row,
    call,
    random_rows,
)
from tests.unit_tests.test_utilities import Utils, requires_world_size

TOLERANCE = 1e-3
"""Tolerance relative to a tensor's norm, for fp32 kernels without TF32."""

LENGTHS = {
    "one-row": PaddedLengths((96,), (96,)),
    "packed-of-one-length": pad_lengths((95, 0, 96, 94), 2),
    "packed-odd-and-empty": pad_lengths((5, 0, 1, 139, 9), 2),
    "packed-shorter-than-a-shard": pad_lengths((3, 7, 2, 11), 2),
}

MODULES = {MAMBA: mamba, DELTA_NET: gated_delta_net}


@requires_world_size(2)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("tokens", ["zigzag", "contiguous"])
@pytest.mark.parametrize("name", MODULES)
def test_kernels_equal_the_reference_ops(name, tokens, lengths, monkeypatch, record_property):
    module, chosen = MODULES[name], LENGTHS[lengths]
    packed = chosen.packed_seq_params(Utils.device) if len(chosen.real) > 1 else None
    pair = Pair(Row(2, name, cp=2, layout=tokens))
    hidden = pair.layout(chosen).shard(random_rows(chosen.total, 1, 32, seed=1), pair.rank)

    def outcome() -> dict[str, torch.Tensor]:
        """Return the output and all gradients of this rank."""
        given = hidden.clone().requires_grad_()
        pair.sharded.zero_grad()
        output = call(pair.sharded, given, packed)
        weight = random_rows(*output.shape, seed=2 + Utils.rank)
        (output * weight).sum().backward()
        gradients = {n: p.grad.clone() for n, p in pair.sharded.named_parameters()}
        return {"output": output.detach(), "input": given.grad, **gradients}

    used = []
    choose = module.gpu_kernels
    monkeypatch.setattr(module, "gpu_kernels", lambda which: used.append(choose(which)) or used[-1])
    by_kernels = outcome()
    assert used and all(used), "the kernels were not used"
    monkeypatch.setattr(module, "gpu_kernels", lambda which: None)
    by_reference = outcome()
    pair.destroy()
    worst = 0.0
    for part, expected in by_reference.items():
        error = (by_kernels[part] - expected).norm() / expected.norm().clamp_min(1e-30)
        worst = max(worst, error.item())
    record_property("found", worst)
    assert worst <= TOLERANCE
