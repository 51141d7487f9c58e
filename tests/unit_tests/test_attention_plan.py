# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The plan of attention under CP: which tokens each query sees."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.token_layout import pad_lengths
from megatron.core.token_layout.attention_plan import attention_plan
from tests.unit_tests.test_token_layout import cp_sizes, lengths_of_samples, plans


@given(lengths_of_samples, cp_sizes, st.booleans())
@plans
def test_every_query_sees_its_sample_up_to_itself_or_whole(lengths, cp_size, is_causal):
    padded = pad_lengths(lengths, cp_size)
    sample = torch.arange(len(lengths)).repeat_interleave(torch.tensor(padded.padded).long())
    for rank in range(cp_size):
        plan = attention_plan(padded, cp_size, rank, torch.device("cpu"), is_causal)
        seen = []
        for block, keys in zip(plan.blocks, key_runs(plan), strict=True):
            hidden = range(block.queries)[::-1] if is_causal else [0] * block.queries
            seen += [keys[: block.keys - later] for later in hidden]
        for token, keys in zip(plan.layout.tokens[rank].tolist(), seen, strict=True):
            own = sample == sample[token]
            if is_causal:
                own[token + 1 :] = False
            elif (own & padded.valid).any():
                own &= padded.valid
            assert keys == own.nonzero().flatten().tolist()


def key_runs(plan):
    """Key tokens of each block, as the variable-length kernel finds them."""
    if not plan.blocks:
        return []
    bounds = plan.cu_keys.tolist()
    assert plan.cu_queries.diff().tolist() == [block.queries for block in plan.blocks]
    tokens = plan.key_tokens.tolist()
    return [tokens[start:end] for start, end in zip(bounds[:-1], bounds[1:], strict=True)]
