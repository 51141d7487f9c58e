# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The Mamba mixer that passes states between CP ranks, against the same mixer on whole samples."""

import pytest
import torch

from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.ssm.state_passing.layer_tokens import tokens_are_contiguous
from megatron.core.token_layout import PaddedLengths
from tests.unit_tests.ssm.mixers import HIDDEN, call, make_mixer
from tests.unit_tests.ssm.whole_and_sharded import (
    EqualsOneRank,
    Pair,
    Ranks,
    assert_close,
    cases,
    random_rows,
)
from tests.unit_tests.test_utilities import HAVE_CUDA, Utils

HEADS, HEADDIM, GROUPS, SEQUENCE, BATCH = 8, 16, 2, 48, 2
# Odd, empty, below 2·cp, and longer than a chunk of the scan and than a shard.
PACKED = (5, 0, 1, 39, 9)


# The head-parallel path takes neither cp=3 nor cp=5, which do not divide the heads.
CASES = cases(
    (2, Ranks(cp=2), "zigzag", torch.float32),
    (2, Ranks(cp=2), "contiguous", torch.float64),
    (4, Ranks(cp=3), "zigzag", torch.float32),
    (4, Ranks(cp=4), "contiguous", torch.float32),
    (4, Ranks(cp=4), "zigzag", torch.float64),
    (4, Ranks(cp=2, tp=2), "zigzag", torch.float32),
    (4, Ranks(cp=2, tp=2), "contiguous", torch.float32),
    (8, Ranks(cp=5), "zigzag", torch.float32),
    (8, Ranks(cp=8), "contiguous", torch.float64),
)


def mixer_of(groups, passes_states: bool, layout: str, dtype: torch.dtype) -> MambaMixer:
    mixer = make_mixer(
        groups,
        dtype=dtype,
        mamba_num_heads=HEADS,
        mamba_head_dim=HEADDIM,
        mamba_num_groups=GROUPS,
        linear_cp_mode="chunkwise" if passes_states else "headwise",
    )
    if layout == "contiguous":
        tokens_are_contiguous(mixer)
    with torch.no_grad():
        # Decays slow enough that a state outlives a shard.
        mixer.A_log.sub_(3)
    return mixer


@pytest.fixture
def pair(request):
    """The mixers."""
    ranks, layout, dtype = request.param

    def make(groups, shards):
        return mixer_of(groups, shards, layout, dtype)

    yield from Pair(ranks, make, layout, dtype).while_used()


@pytest.mark.parametrize("pair", CASES, indirect=True)
class TestMixerThatPassesStates(EqualsOneRank):
    call = staticmethod(call)
    hidden, sequence, batch, packed = HIDDEN, SEQUENCE, BATCH, PACKED

    def test_a_window_may_reach_over_several_ranks(self, pair):
        """A rank has two tokens, and the convolution sees the three before each token."""
        if pair:
            length = 2 * pair.size
            hidden = random_rows(length, BATCH, HIDDEN, seed=1).to(pair.dtype)
            pair.assert_equal(call, hidden, PaddedLengths((length,), (length,)), packed=False)


@pytest.mark.parametrize("pair", cases((4, Ranks(cp=3), "zigzag", torch.float32)), indirect=True)
@pytest.mark.skipif(HAVE_CUDA, reason="transformers takes the same kernels where it finds them")
class TestAgainstTransformers:
    def test_equals_the_mamba_2_of_transformers(self, pair):
        """They agree to 1e-5 in fp32: transformers adds the same terms in another order."""
        if not pair:
            return
        modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
        config = modeling.Mamba2Config(
            num_heads=HEADS,
            head_dim=HEADDIM,
            hidden_size=HIDDEN,
            state_size=8,
            expand=HEADS * HEADDIM // HIDDEN,
            n_groups=GROUPS,
            chunk_size=16,
            num_hidden_layers=1,
        )
        other = modeling.Mamba2Mixer(config, layer_idx=0).eval().to(Utils.device)
        weights = pair.whole.state_dict()
        weights = {name.replace("conv1d_", "conv1d."): weights[name] for name in weights}
        assert not other.load_state_dict(weights, strict=False).missing_keys
        hidden = random_rows(SEQUENCE, BATCH, HIDDEN, seed=1)
        lengths = PaddedLengths((SEQUENCE,), (SEQUENCE,))
        shard = pair.layout(lengths).shard(hidden, pair.rank)
        with torch.no_grad():
            expected = other(hidden.transpose(0, 1)).transpose(0, 1)
            found = call(pair.sharded, shard, None)
        expected = pair.layout(lengths).shard(expected, pair.rank)
        assert_close(found, expected, 1e-5, "output")
