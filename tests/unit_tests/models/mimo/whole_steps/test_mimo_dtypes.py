# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""An encoder in another precision than the language model, colocated."""

import pytest
import torch
import torch.distributed as dist

from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from tests.unit_tests.models.mimo.mimo_gpt import IMAGES
from tests.unit_tests.models.mimo.mimo_gpt_training import Job, draw, encoder_gradients
from tests.unit_tests.models.mimo.whole_steps.test_mimo_colocated_e2e import modules
from tests.unit_tests.test_utilities import Utils, requires_world_size

JOB = Job(tuple(draw({IMAGES: patches}, seed) for seed, patches in enumerate((0, 0, 0, 3))))
"""Rank 0 encodes nothing, with a pipeline or without, and takes what rank 1 encodes."""

TOLERANCE = 0.02
"""Tolerance relative to a gradient's norm: bf16 rounds by 0.4 %, in a few layers."""


@requires_world_size(2)
@pytest.mark.parametrize("encoder", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("language", [dict(tp=2), dict(pp=2)], ids=str)
def test_encoder_gradients_are_those_of_one_precision(encoder, language):
    """The reference is one rank with all in fp32; the language model has the other precision."""
    other = torch.bfloat16 if encoder is torch.float32 else torch.float32
    with modules(language={}, images={}) as made:
        expected = [encoder_gradients(JOB, made) if Utils.rank == 0 else None]
        dist.broadcast_object_list(expected)
    layouts = {LANGUAGE: language | dict(dtype=other), IMAGES: dict(dp=2, dtype=encoder)}
    with modules(**layouts) as made:
        found = encoder_gradients(JOB, made)
    for name, whole in expected[0].items():
        part = found[name].float()
        dist.all_reduce(part)  # a rank has the gradient of the samples it encoded
        error = (part - whole).norm() / whole.norm()
        assert error < TOLERANCE, f"{name}: {error:.3f}"
