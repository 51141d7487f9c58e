# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The plan of attention under CP: which tokens each query sees."""

from itertools import accumulate

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.token_layout import pad_lengths, zigzag_layout
from megatron.core.token_layout.attention_plan import attention_plan
from tests.unit_tests.test_token_layout import cp_sizes, lengths_of_samples, plans


@given(lengths_of_samples, cp_sizes, st.booleans())
@plans
def test_every_query_sees_its_sample_up_to_itself_or_whole(lengths, cp_size, is_causal):
    padded = pad_lengths(lengths, cp_size)
    sample = torch.arange(len(lengths)).repeat_interleave(torch.tensor(padded.padded).long())
    layout = zigzag_layout(padded, cp_size)
    for rank in range(cp_size):
        plan, seen = attention_plan(padded, cp_size, rank, is_causal), []
        for block, keys in blocks_and_keys(plan, padded):
            hidden = range(block.queries)[::-1] if is_causal else [0] * block.queries
            seen += [keys[: block.keys - later] for later in hidden]
        for token, keys in zip(layout.tokens[rank].tolist(), seen, strict=True):
            own = sample == sample[token]
            if is_causal:
                own[token + 1 :] = False
            elif (own & padded.valid).any():
                own &= padded.valid
            assert keys == own.nonzero().flatten().tolist()


def blocks_and_keys(plan, padded):
    """Blocks, and the key tokens of each."""
    starts = accumulate(padded.padded, initial=0)
    return [
        (block, [*range(start, start + block.keys)])
        for start, sample in zip(starts, plan, strict=False)  # the last start is the end
        for block in sample
    ]
