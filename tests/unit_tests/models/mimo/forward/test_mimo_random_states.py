# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Dropout, dtype and rows of an encoder and a language model in different layouts."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.models.mimo.forward.encoding import encode
from megatron.core.models.mimo.setup.module_groups import make_modules, prepare_process
from megatron.core.models.mimo.setup.teardown import destroy
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from tests.unit_tests.test_utilities import HAVE_CUDA, Utils, requires_world_size

IMAGES = "images"
WIDTH = 64


def masks() -> tuple[torch.Tensor, torch.Tensor]:
    """Draw dropout masks: for a tensor that TP ranks hold twice, and for one that they split."""
    ones = torch.ones(WIDTH, device=Utils.device)
    whole = F.dropout(ones)
    with get_cuda_rng_tracker().fork():
        return whole, F.dropout(ones)


class Encoder(torch.nn.Module):
    """Rows times a weight, with dropout of both kinds."""

    def __init__(self, groups) -> None:
        super().__init__()
        self.pg_collection, self.drawn = groups, []
        self.weight = torch.nn.Parameter(torch.ones(WIDTH))

    def forward(self, encoder_inputs):
        rows = encoder_inputs["rows"] * self.weight
        drawn = [masks() for _ in rows]
        self.drawn += drawn
        return torch.stack([row * a * b for row, (a, b) in zip(rows, drawn, strict=True)])


@pytest.fixture
def make_model():
    """Makes a model over all ranks from the axis that either module splits."""
    made = []

    def make(encoder: str, language: str, dtype: torch.dtype = torch.float32) -> SimpleNamespace:
        Utils.initialize_distributed()
        one = dict.fromkeys(("tp", "cp", "dp", "pp", "ep", "etp", "expt_dp"), 1)
        layouts, ranks = {}, Utils.world_size
        for name, axis in ((IMAGES, encoder), (LANGUAGE, language)):
            sizes = one | {axis: ranks, "expt_dp": 1 if axis == "pp" else ranks}
            layouts[name] = SimpleNamespace(**sizes), 0
        backend = "nccl" if HAVE_CUDA else "gloo"
        made.append(make_modules(layouts, backend))
        tracker = dict(te_rng_tracker=False, inference_rng_tracker=False, cuda_graph_impl="none")
        prepare_process(made[-1], Namespace(seed=7, **tracker))
        return SimpleNamespace(
            modality_submodules={IMAGES: Encoder(made[-1][IMAGES].groups).to(Utils.device)},
            colocated_comms={(IMAGES, LANGUAGE): None},
            random_states={},
            config=SimpleNamespace(params_dtype=dtype),
            _empty_encoder_output=lambda name: torch.empty(0, WIDTH, device=Utils.device),
        )

    yield make
    for modules in made:
        destroy([], modules)


def encoded(model: SimpleNamespace, counts: list[int], recompute: int | None = None):
    """The rows of microbatches with so many inputs."""
    rows = [torch.ones(count, WIDTH, device=Utils.device) for count in counts]
    return encode(model, [{IMAGES: {"rows": r}} for r in rows], recompute)[IMAGES]


def alike_on_both_ranks(tensor: torch.Tensor) -> bool:
    gathered = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(gathered, tensor)
    return torch.equal(*gathered)


@requires_world_size(2)
def test_an_encoders_masks_follow_its_own_tp_ranks(make_model):
    """Even if these are stages of the language model, whose seeds differ."""
    model = make_model("tp", "pp")
    F.dropout(torch.ones(1 + Utils.rank, device=Utils.device))  # as much as its samples take
    encoded(model, [2])
    (first, split), (second, _) = model.modality_submodules[IMAGES].drawn
    assert alike_on_both_ranks(first) and not alike_on_both_ranks(split)
    assert not torch.equal(first, second)


@requires_world_size(2)
@pytest.mark.parametrize(("axis", "alike"), [("pp", False), ("tp", True), ("dp", True)])
def test_a_language_models_masks_do_not_depend_on_what_a_rank_encodes(make_model, axis, alike):
    """Its stages differ, its TP ranks in what they split, its DP ranks in nothing."""
    model = make_model("dp", axis)
    for _ in range(2):
        encoded(model, [1 + Utils.rank])
        whole, split = masks()
        assert alike_on_both_ranks(whole) == alike
        assert alike_on_both_ranks(split) == (axis == "dp")


@requires_world_size(1)
def test_a_recomputed_encoder_has_the_masks_of_its_forward(make_model):
    """The language model draws other masks in between, and goes on as if nothing was encoded."""
    found = []
    for recompute in (None, 3):
        model = make_model("dp", "dp")
        rows = [encoded(model, [2, 0, 1], recompute) for _ in range(2)]
        drawn = [*masks()]
        sum(r.sum() for r in rows).backward()
        drawn += masks()
        encoder = model.modality_submodules[IMAGES]
        found.append((rows[0].detach(), rows[1].detach(), encoder.weight.grad, *drawn))
        assert not any(map(torch.equal, encoder.drawn[0], drawn))
    for kept, recomputed in zip(*found, strict=True):
        assert torch.equal(kept, recomputed)
    assert not torch.equal(found[0][0], found[0][1])


@requires_world_size(1)
def test_rows_have_the_language_models_dtype_and_gradients_the_encoders(make_model):
    """Ranks without a row send and receive that dtype too."""
    model = make_model("dp", "dp", dtype=torch.bfloat16)
    rows = encoded(model, [2, 1])
    rows.sum().backward()
    assert rows.dtype is torch.bfloat16
    assert model.modality_submodules[IMAGES].weight.grad.dtype is torch.float32
    assert encode(model, [{}])[IMAGES].dtype is torch.bfloat16


def test_an_encoder_may_give_nothing():
    """Upstream's encoders do so for inputs without a known encoder."""
    nothing = torch.nn.Module()
    nothing.forward = lambda encoder_inputs: None
    model = SimpleNamespace(modality_submodules={IMAGES: nothing}, colocated_comms={})
    assert encode(model, [{IMAGES: {}}]) == {}
