# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""How recurrent layers move their tokens: over which group, and that the host never waits."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from megatron.core.ssm.state_passing.layer_tokens import LayerTokens
from megatron.core.token_layout import pad_lengths
from megatron.core.transformer import TransformerConfig
from tests.unit_tests.no_host_sync import no_host_sync
from tests.unit_tests.ssm.recurrent_layers import DELTA_NET, MAMBA, call, make_layer
from tests.unit_tests.ssm.whole_and_sharded import Pair, Ranks, random_rows
from tests.unit_tests.test_utilities import Utils, requires_world_size


@requires_world_size(2)
@pytest.mark.parametrize(
    ("name", "mode"),
    [(MAMBA, "chunkwise"), (DELTA_NET, "chunkwise"), (DELTA_NET, "headwise")],
)
def test_the_host_waits_for_nothing_in_a_planned_packed_batch(name, mode):
    """The first layer of a batch makes its plans; the second is counted, and takes none."""
    pair = Pair(Ranks(cp=2), lambda groups, _: make_layer(name, groups, mode), "zigzag")
    lengths = pad_lengths((5, 0, 1, 39, 9), 2)
    packed = lengths.packed_seq_params(Utils.device)
    shard = pair.layout(lengths).shard(random_rows(lengths.total, 1, 32, seed=1), pair.rank)
    shard.requires_grad_()
    call(pair.sharded, shard, packed).sum().backward()
    with no_host_sync():
        call(pair.sharded, shard, packed).sum().backward()
    pair.destroy()


def test_sequence_parallel_tokens_need_a_group_whose_tp_is_the_fastest():
    def group_of(size: int, rank: int = 0) -> SimpleNamespace:
        return SimpleNamespace(size=lambda: size, rank=lambda: rank)

    config = SimpleNamespace(hidden_size=8, sequence_parallel=True)
    groups = SimpleNamespace(tp=group_of(2), cp=group_of(2), tp_cp=group_of(4, rank=1))
    with pytest.raises(ValueError, match="rank 0 of 4 here, found 1"):
        LayerTokens(config, groups)


CONTIGUOUS = {"attention_cp_layout": "contiguous"}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"linear_cp_mode": "ring"}, "linear_cp_mode must be one of"),
        ({"linear_cp_layout": "striped"}, "linear_cp_layout must be one of"),
        ({"linear_cp_layout": "contiguous"}, "needs linear_cp_mode='chunkwise'"),
        ({"attention_cp_layout": "striped"}, "attention_cp_layout must be one of"),
        (CONTIGUOUS | {"context_parallel_size": 2}, "'contiguous' takes one CP rank"),
        (
            {"mamba_training_ssm_states_dtype": torch.float32, "linear_cp_mode": "chunkwise"},
            "takes no mamba_training_ssm_states_dtype",
        ),
    ],
)
def test_what_is_no_option_or_does_not_go_together_is_refused(options, message):
    config_of = partial(TransformerConfig, num_layers=1, hidden_size=8, num_attention_heads=1)
    config_of(**CONTIGUOUS)  # on one rank
    with pytest.raises(ValueError, match=message):
        config_of(**options)
