# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Token layouts of a hybrid stack: which each kind of layer gets.

What comes out is compared with one rank in rows.py of the training program, "recurrent layers", and
in test_mimo_upstream_schedule.py, with padding.
"""

import pytest
import torch

from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.token_layout import PaddedLengths, contiguous_layout, zigzag_layout
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_layer import TransformerLayer
from tests.unit_tests.ssm.recurrent_layers import HIDDEN, SIZES, groups_of
from tests.unit_tests.test_utilities import Utils, requires_world_size

EVERY_LAYER = Symbols.name_sorted_valid_layer_symbols()
LENGTHS = PaddedLengths((24,), (24,))


class Seen(TransformerLayer):
    """Passes its input on, and notes the tokens it was given."""

    def __init__(self, config, layer_number: int, **others) -> None:
        MegatronModule.__init__(self, config)
        self.layer_number = layer_number

    def forward(self, hidden_states, **others):
        self.tokens = hidden_states[:, 0, 0].tolist()
        return hidden_states + 0, None


def stack_over(groups, layout: str, graphs: str = "none") -> HybridStack:
    config = TransformerConfig(
        num_layers=4,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        normalization="RMSNorm",
        linear_cp_mode="chunkwise",
        linear_cp_layout=layout,
        context_parallel_size=2,
        **SIZES,
    )
    config.cuda_graph_impl, groups.pp = graphs, None
    kinds = ("mamba", "gdn", "attention", "dsa", "mla", "mlp", "moe")
    layers = HybridStackSubmodules(**{f"{kind}_layer": Seen for kind in kinds})
    options = dict(layer_type_list=EVERY_LAYER, post_layer_norm=False, pg_collection=groups)
    return HybridStack(config, layers, **options)


@requires_world_size(2)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_attention_of_every_kind_sees_zigzag_tokens_and_other_layers_those_of_the_layout(layout):
    Utils.initialize_distributed()
    grid = HyperCommGrid([1, 2], ["tp", "cp"])
    groups = groups_of(grid)
    zigzag, contiguous = (
        make(LENGTHS, 2).tokens[groups.cp.rank()].tolist()
        for make in (zigzag_layout, contiguous_layout)
    )
    stack, others = stack_over(groups, layout), contiguous if layout == "contiguous" else zigzag
    hidden = torch.tensor(zigzag, dtype=torch.float32, device=Utils.device)
    hidden = hidden[:, None, None].expand(-1, 2, HIDDEN)
    assert torch.equal(stack(hidden, attention_mask=None), hidden)
    for symbol, layer in zip(EVERY_LAYER, stack.layers, strict=True):
        assert layer.tokens == (zigzag if symbol in "*D+" else others), symbol
    for graphs in ("local", "transformer_engine") if layout == "contiguous" else ():
        with pytest.raises(ValueError, match="takes no CUDA graphs of single layers"):
            stack_over(groups, layout, graphs)
    grid.destroy()
