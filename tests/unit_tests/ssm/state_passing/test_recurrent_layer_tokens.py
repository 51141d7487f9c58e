# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""How recurrent layers move their tokens: over which group, and that the host never waits."""

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


def stand_in_group(size: int, rank: int = 0) -> SimpleNamespace:
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


def tokens_of(tp_size: int, sequence_parallel: bool, tp_cp) -> LayerTokens:
    config = SimpleNamespace(hidden_size=8, sequence_parallel=sequence_parallel)
    groups = SimpleNamespace(tp=stand_in_group(tp_size), cp=stand_in_group(2), tp_cp=tp_cp)
    return LayerTokens(config, groups)


class TestGroups:
    def test_sequence_parallel_tokens_need_a_group_whose_tp_is_the_fastest(self):
        with pytest.raises(ValueError, match="rank 0 of 4 here, found 1"):
            tokens_of(2, True, stand_in_group(4, rank=1))


def config_of(**options) -> TransformerConfig:
    return TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, **options)


class TestOptions:
    @pytest.mark.parametrize(
        "mode, layout, message",
        [
            ("ring", "zigzag", "linear_cp_mode must be one of"),
            ("chunkwise", "striped", "linear_cp_layout must be one of"),
            ("headwise", "contiguous", "needs linear_cp_mode='chunkwise'"),
        ],
    )
    def test_what_is_no_option_or_does_not_go_together_is_refused(self, mode, layout, message):
        with pytest.raises(ValueError, match=message):
            config_of(linear_cp_mode=mode, linear_cp_layout=layout)

    def test_attention_takes_contiguous_tokens_on_one_cp_rank_only(self):
        config_of(attention_cp_layout="contiguous")
        with pytest.raises(ValueError, match="attention_cp_layout='contiguous' takes one CP rank"):
            config_of(attention_cp_layout="contiguous", context_parallel_size=2)
        with pytest.raises(ValueError, match="attention_cp_layout must be one of"):
            config_of(attention_cp_layout="striped")

    def test_states_of_another_dtype_are_refused(self):
        """Upstream's head-parallel layers take the option, from kernels that have it."""
        with pytest.raises(ValueError, match="takes no mamba_training_ssm_states_dtype"):
            config_of(
                mamba_training_ssm_states_dtype=torch.float32,
                linear_cp_mode="chunkwise",
            )
