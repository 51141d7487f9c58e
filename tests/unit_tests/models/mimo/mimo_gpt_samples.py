# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Random samples for the model of mimo_gpt.py, with any number of patches each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron.core.models.mimo.bridge.batch_plan import BatchPlan
from tests.unit_tests.models.mimo.mimo_gpt import PIXELS, TOKEN_IDS, TOKENS
from tests.unit_tests.test_utilities import Utils

TEXT_IDS = min(TOKEN_IDS.values())


@dataclass(frozen=True, eq=False)
class Sample:
    """Token ids, labels and loss mask ``[length]``; per modality, patches ``[n, PIXELS]``."""

    ids: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    patches: dict[str, torch.Tensor]


def draw(patches: dict[str, int], seed: int, length: int = TOKENS) -> Sample:
    """Draw a sample with so many patches of each modality, at random places of the text."""
    rng = torch.Generator().manual_seed(seed)
    text = torch.randint(TEXT_IDS, (length + 1,), generator=rng)
    ids = text[:-1].clone()
    free = torch.randperm(length, generator=rng).tolist()
    for name, count in patches.items():
        ids[[free.pop() for _ in range(count)]] = TOKEN_IDS[name]
    return Sample(
        ids=ids,
        labels=text[1:],
        loss_mask=(torch.rand(length, generator=rng) < 0.6).float(),
        patches={n: torch.randn(count, PIXELS, generator=rng) for n, count in patches.items()},
    )


def batch(
    encoded: dict[str, Sequence[Sample]],
    read: Sequence[Sample],
    packed: bool,
    plan: BatchPlan | None = None,
) -> dict[str, object]:
    """MimoModel's keyword arguments.

    Args:
        encoded: per modality, the samples whose patches its encoder takes on this rank.
        read: the samples that the language model takes; of one length, unless packed.
        packed: lay them end to end, as one row.
        plan: brought along, if any.
    """
    join = (lambda parts: torch.cat(parts)[None]) if packed else torch.stack
    lengths = [len(sample.ids) for sample in read]
    bounds = torch.tensor([0, *lengths], device=Utils.device).cumsum(0)
    packing = {
        "cu_seqlens_q": bounds,
        "cu_seqlens_kv": bounds,
        "max_seqlen_q": max(lengths),
        "max_seqlen_kv": max(lengths),
    }

    def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
        return join(tensors).to(Utils.device)

    inputs = {}
    for name, samples in encoded.items():
        patches = [s.patches[name] for s in samples if len(s.patches[name])]
        hidden = {"hidden_states": torch.cat(patches).to(Utils.device)} if patches else None
        inputs[name] = {"patches": hidden} if patches else None
    return ({"batch_plan": plan} if plan else {}) | {
        "input_ids": joined([s.ids for s in read]),
        "position_ids": joined([torch.arange(length) for length in lengths]),
        "labels": joined([s.labels for s in read]),
        "loss_mask": joined([s.loss_mask for s in read]),
        "modality_inputs": inputs,
        "packing_kwargs": packing if packed else None,
    }
