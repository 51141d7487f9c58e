# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""An encoder in another precision than the language model, colocated."""

import pytest
import torch
import torch.distributed as dist

from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from tests.unit_tests.models.mimo_gpt import IMAGES
from tests.unit_tests.models.mimo_gpt_samples import draw
from tests.unit_tests.models.mimo_gpt_training import Job, encoder_gradients
from tests.unit_tests.models.test_mimo_colocated_e2e import modules
from tests.unit_tests.test_utilities import Utils, requires_world_size

JOB = Job([draw({IMAGES: patches}, seed) for seed, patches in enumerate((3, 2, 0, 0))])
"""Two microbatches; one encoder rank of the two has no patches in either or in one of them."""

TOLERANCE = 0.02
"""Of a gradient's norm: bf16 rounds by 0.4 %, in a few layers."""


@requires_world_size(2)
@pytest.mark.parametrize("encoder", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("language", [dict(tp=2), dict(pp=2)], ids=str)
def test_encoder_gradients_are_those_of_one_precision(encoder, language):
    """Against one rank with fp32 throughout; the language model has the other precision."""
    other = torch.bfloat16 if encoder is torch.float32 else torch.float32
    with modules(language={}, images={}) as made:
        expected = [encoder_gradients(JOB, made) if Utils.rank == 0 else None]
        dist.broadcast_object_list(expected)
    layouts = {LANGUAGE: language | dict(dtype=other), IMAGES: dict(dp=2, dtype=encoder)}
    with modules(**layouts) as made:
        found = encoder_gradients(JOB, made)
    for name, whole in expected[0].items():
        part = found[name].float()
        dist.all_reduce(part)  # each rank has that of the samples it encoded
        error = (part - whole).norm() / whole.norm()
        assert error < TOLERANCE, f"{name}: {error:.3f}"
