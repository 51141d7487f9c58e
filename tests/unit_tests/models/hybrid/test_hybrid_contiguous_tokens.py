# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A hybrid stack that keeps its tokens contiguous: what each layer sees.

What comes out is compared with one rank in rows.py of the training program, "recurrent layers".
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.ssm.state_passing.layer_tokens import groups_and_tokens
from megatron.core.token_layout import PaddedLengths, contiguous_layout, zigzag_layout
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_layer import TransformerLayer
from tests.unit_tests.ssm.recurrent_layers import SIZES
from tests.unit_tests.ssm.whole_and_sharded import Pair, Ranks
from tests.unit_tests.test_utilities import Utils, requires_world_size

HIDDEN = 32
TOKENS = 24
EVERY_LAYER = Symbols.name_sorted_valid_layer_symbols()


def make_config(**options) -> TransformerConfig:
    return TransformerConfig(
        num_layers=4,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        normalization="RMSNorm",
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        linear_cp_mode="chunkwise",
        linear_cp_layout="contiguous",
        **SIZES,
        **options,
    )


class Seen(TransformerLayer):
    """Passes its input on, and notes the tokens it was given, and the padding mask."""

    def __init__(self, config, layer_number: int, pg_collection, **others) -> None:
        MegatronModule.__init__(self, config)
        self.layer_number = layer_number
        self.layer_tokens = groups_and_tokens(pg_collection, config)[1]

    def forward(self, hidden_states, padding_mask=None, **others):
        self.tokens, self.mask = hidden_states[:, 0, 0].tolist(), padding_mask
        return hidden_states + 0, None


@pytest.fixture
def ranks(request):
    """Groups of a layout, and this rank's tokens as attention and recurrent layers have them."""
    # The pair's layers are not used.
    pair = Pair(request.param, lambda groups, _: nn.Identity(), "zigzag")
    config = make_config(
        context_parallel_size=request.param.cp,
        tensor_model_parallel_size=request.param.tp,
        sequence_parallel=request.param.tp > 1,
    )
    groups = pair.groups
    groups.pp = None
    lengths = PaddedLengths((TOKENS,), (TOKENS,))
    place = groups.tp_cp.rank()
    layouts = [make(lengths, request.param.cp) for make in (zigzag_layout, contiguous_layout)]
    zigzag, contiguous = (
        layout.over_tensor_ranks(request.param.tp).tokens[place].tolist() for layout in layouts
    )
    yield SimpleNamespace(config=config, groups=groups, zigzag=zigzag, contiguous=contiguous)
    pair.destroy()


def stack_of_stand_ins(ranks, **options) -> HybridStack:
    kinds = ("mamba", "gdn", "attention", "dsa", "mla", "mlp", "moe")
    return HybridStack(
        ranks.config,
        HybridStackSubmodules(**{f"{kind}_layer": Seen for kind in kinds}),
        layer_type_list=EVERY_LAYER,
        post_layer_norm=False,
        pg_collection=ranks.groups,
        **options,
    )


def rows(tokens: list[int]) -> torch.Tensor:
    """Hidden states whose values are the tokens' numbers."""
    hidden = torch.tensor(tokens, dtype=torch.float32, device=Utils.device)
    return hidden[:, None, None].expand(-1, 2, HIDDEN).clone().requires_grad_()


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(Ranks(cp=2), marks=requires_world_size(2), id="cp=2"),
        pytest.param(Ranks(cp=2, tp=2), marks=requires_world_size(4), id="tp=2,cp=2"),
    ],
    indirect=True,
)
class TestOrderOfTokens:
    def test_each_layer_sees_its_own(self, ranks):
        """Attention of every kind sees zigzag tokens; recurrent layers know of contiguous ones."""
        stack = stack_of_stand_ins(ranks)
        hidden = rows(ranks.zigzag)
        out = stack(hidden, attention_mask=None)
        for symbol, layer in zip(EVERY_LAYER, stack.layers, strict=True):
            expected = ranks.zigzag if symbol in "*D+" else ranks.contiguous
            assert layer.tokens == expected, symbol
            if symbol in "MG":
                assert not layer.layer_tokens.is_zigzag, symbol
        assert torch.equal(out, hidden)
        weight = torch.rand_like(out)
        (out * weight).sum().backward()
        assert torch.equal(hidden.grad, weight)

    def test_the_padding_mask_goes_with_the_tokens(self, ranks):
        stack = stack_of_stand_ins(ranks)
        mask = torch.tensor([[token % 3 == 0 for token in ranks.zigzag]], device=Utils.device)
        stack(rows(ranks.zigzag), attention_mask=None, padding_mask=mask)
        experts = stack.layers[EVERY_LAYER.index(Symbols.MOE)]
        assert experts.mask.tolist() == [[token % 3 == 0 for token in ranks.contiguous]]

    def test_tokens_stay_contiguous_between_pipeline_stages(self, ranks):
        first = stack_of_stand_ins(ranks, post_process=False)
        between = first(hidden_states=rows(ranks.zigzag), attention_mask=None)
        assert between[:, 0, 0].tolist() == ranks.contiguous
        last = stack_of_stand_ins(ranks, pre_process=False)
        last.set_input_tensor(between)
        out = last(hidden_states=None, attention_mask=None)
        assert out[:, 0, 0].tolist() == ranks.zigzag

    @pytest.mark.parametrize("graphs", ["local", "transformer_engine"])
    def test_graphs_of_single_layers_are_refused(self, ranks, graphs):
        ranks.config.cuda_graph_impl = graphs
        with pytest.raises(ValueError, match="takes no CUDA graphs of single layers"):
            stack_of_stand_ins(ranks)
