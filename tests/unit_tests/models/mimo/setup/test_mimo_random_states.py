# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Dropout of an encoder and a language model in different layouts."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.models.mimo.forward.encoding import encode
from megatron.core.models.mimo.setup.module_groups import make_modules, prepare_process
from megatron.core.models.mimo.setup.teardown import destroy
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from tests.unit_tests.test_utilities import HAVE_CUDA, Utils, requires_world_size

IMAGES = "images"
WIDTH = 64
BACKEND = "nccl" if HAVE_CUDA else "gloo"


def masks() -> tuple[torch.Tensor, torch.Tensor]:
    """Draw dropout masks: for a tensor that TP ranks hold twice, and for one that they split."""
    ones = torch.ones(WIDTH, device=Utils.device)
    whole = F.dropout(ones)
    with get_cuda_rng_tracker().fork():
        return whole, F.dropout(ones)


class Encoder(torch.nn.Module):
    """Rows times a weight, with dropout of both kinds."""

    def __init__(self, groups: ProcessGroupCollection) -> None:
        super().__init__()
        self.pg_collection, self.drawn = groups, []
        self.weight = torch.nn.Parameter(torch.ones(WIDTH))

    def forward(self, encoder_inputs):
        rows = encoder_inputs["rows"] * self.weight
        drawn = [masks() for _ in rows]
        self.drawn += drawn
        return torch.stack([row * a * b for row, (a, b) in zip(rows, drawn, strict=True)])


class Model:
    """An encoder and a language model over all ranks, seeded as Megatron seeds the latter."""

    def __init__(self, encoder: dict[str, int], language: dict[str, int]) -> None:
        Utils.initialize_distributed()
        self.grids, groups = [], []
        for sizes in (encoder, language):
            sizes = dict(tp=1, cp=1, dp=1, pp=1) | sizes
            self.grids.append(HyperCommGrid(list(sizes.values()), list(sizes)))
            groups.append(ProcessGroupCollection.from_hyper_comm_grid(self.grids[-1]))
        self.encoder = Encoder(groups[0]).to(Utils.device)
        self.mimo = SimpleNamespace(
            modality_submodules={IMAGES: self.encoder},
            colocated_comms={(IMAGES, LANGUAGE): None},
            random_states={},
            config=SimpleNamespace(params_dtype=torch.float32),
        )
        tp_rank = groups[1].tp.rank()
        model_parallel_cuda_manual_seed(
            7, tp_rank=tp_rank, ep_rank=0, etp_rank=0, force_reset_rng=True
        )

    def encode(self, counts: list[int], recompute: int | None = None) -> torch.Tensor:
        rows = [torch.ones(count, WIDTH, device=Utils.device) for count in counts]
        return encode(self.mimo, [{IMAGES: {"rows": r}} for r in rows], recompute)[IMAGES]


@pytest.fixture
def make_model():
    made = []

    def make(**layouts) -> Model:
        made.append(Model(**layouts))
        return made[-1]

    yield make
    for model in made:
        for grid in model.grids:
            grid.destroy()


def of_both_ranks(tensor: torch.Tensor) -> list[torch.Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(gathered, tensor)
    return gathered


class TestTwoRanks:
    @requires_world_size(2)
    def test_an_encoders_masks_follow_its_own_tp_ranks(self, make_model):
        model = make_model(encoder=dict(tp=2), language=dict(dp=2))
        F.dropout(torch.ones(1 + Utils.rank, device=Utils.device))  # as much as its samples take
        model.encode([2])
        for whole, split in model.encoder.drawn:
            assert torch.equal(*of_both_ranks(whole))
            assert not torch.equal(*of_both_ranks(split))
        first, second = model.encoder.drawn
        assert not torch.equal(first[0], second[0])

    @requires_world_size(2)
    def test_a_language_models_masks_do_not_depend_on_what_a_rank_encodes(self, make_model):
        model = make_model(encoder=dict(dp=2), language=dict(tp=2))
        for _ in range(2):
            model.encode([1 + Utils.rank])
            whole, split = masks()
            assert torch.equal(*of_both_ranks(whole))
            assert not torch.equal(*of_both_ranks(split))

    @requires_world_size(2)
    @pytest.mark.parametrize(("axis", "whole_alike"), [("pp", False), ("tp", True), ("dp", True)])
    def test_a_language_models_stages_draw_different_masks(self, axis, whole_alike):
        """Its TP ranks differ in what they split, its DP ranks in nothing, as in Megatron."""
        Utils.initialize_distributed()
        one = dict.fromkeys(("tp", "cp", "dp", "pp", "ep", "etp", "expt_dp"), 1)
        sizes = one | {axis: 2} | ({} if axis == "pp" else {"expt_dp": 2})
        modules = make_modules({LANGUAGE: (SimpleNamespace(**sizes), 0)}, BACKEND)
        tracker = dict(te_rng_tracker=False, inference_rng_tracker=False, cuda_graph_impl="none")
        prepare_process(modules, Namespace(seed=1, **tracker))
        whole, split = masks()
        assert torch.equal(*of_both_ranks(whole)) == whole_alike
        assert torch.equal(*of_both_ranks(split)) == (axis == "dp")
        destroy([], modules)


class TestOneRank:
    @requires_world_size(1)
    def test_a_recomputed_encoder_has_the_masks_of_its_forward(self, make_model):
        """The language model draws in between, and goes on as if nothing was encoded."""
        found = []
        for recompute in (None, 3):
            model = make_model(encoder={}, language={})
            rows = [model.encode([2, 0, 1], recompute) for _ in range(2)]
            drawn = [*masks()]
            sum(r.sum() for r in rows).backward()
            drawn += masks()
            found.append((rows[0].detach(), rows[1].detach(), model.encoder.weight.grad, *drawn))
        for kept, recomputed in zip(*found, strict=True):
            assert torch.equal(kept, recomputed)
        assert not torch.equal(found[0][0], found[0][1])

    @requires_world_size(1)
    def test_encoder_and_language_model_draw_different_masks(self, make_model):
        model = make_model(encoder={}, language={})
        model.encode([1])
        assert all(
            not torch.equal(*pair) for pair in zip(model.encoder.drawn[0], masks(), strict=True)
        )
