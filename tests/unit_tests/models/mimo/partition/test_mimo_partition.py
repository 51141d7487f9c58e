# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""How a batch is cut over CP and sequence-parallel ranks; every rank is played by one process."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.models.mimo.partition.adapter import PartitionAdapter, PartitionConfig
from megatron.core.models.mimo.partition.language_batch import (
    padding_arguments,
    partition_groups,
    token_arguments,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.token_layout import PaddedLengths, zigzag_owners
from tests.unit_tests.test_utilities import Utils

ROW = (5, 7, 1, 13)
"""Lengths of packed samples: none fits any CP size."""


def group_of(size: int, rank: int) -> SimpleNamespace:
    """Stand in for a process group, as one member sees it."""
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


def adapter_of(cp: int, tp: int, cp_rank: int = 0, tp_rank: int = 0, **options) -> PartitionAdapter:
    """The adapter of one rank of cp × tp; sequence parallel where there are several TP ranks."""
    groups = dict(cp_group=group_of(cp, cp_rank), tp_group=group_of(tp, tp_rank))
    settings = dict(tp_comm_overlap=False, max_seq_len=64) | options
    return PartitionAdapter(PartitionConfig(tp > 1, cp > 1, **settings, **groups))


def packed(samples: tuple[int, ...], **more) -> PackedSeqParams:
    bounds = PaddedLengths(samples, samples).cu_seqlens
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, **more)


@dataclass
class Batch:
    """Tensors whose values say which token of which row they belong to."""

    rows: int
    tokens: int

    def __post_init__(self):
        labels = 1 + torch.arange(self.rows * self.tokens).view(self.rows, self.tokens)
        self.labels = labels
        self.loss_mask = torch.ones(self.rows, self.tokens)
        self.embeddings = labels.t()[..., None] * torch.tensor([1.0, -1.0])

    def shards(self, cp: int, tp: int, samples=None) -> list[tuple]:
        """Return what each rank of cp × tp receives, TP ranks fastest."""
        return [
            adapter_of(cp, tp, cp_rank, tp_rank).shard(
                self.embeddings,
                self.labels,
                self.loss_mask,
                packed(samples) if samples else None,
            )
            for cp_rank in range(cp)
            for tp_rank in range(tp)
        ]


BATCHES = [
    pytest.param(Batch(3, 32), None, id="even"),
    pytest.param(Batch(2, 13), None, id="odd"),
    pytest.param(Batch(1, 1), None, id="one-token"),
    pytest.param(Batch(1, 26), ROW, id="packed"),
    pytest.param(Batch(1, 9), (0, 4, 0, 5), id="packed-with-empty-samples"),
]


@pytest.fixture
def default_group():
    """Megatron splits along the sequence only where torch.distributed is up."""
    Utils.initialize_distributed()


sizes = pytest.mark.parametrize(
    ("cp", "tp"), [(cp, tp) for cp in (1, 2, 4) for tp in (1, 2) if cp * tp > 1]
)
batches = pytest.mark.parametrize(("batch", "samples"), BATCHES)


@pytest.mark.usefixtures("default_group")
@sizes
@batches
class TestEveryTokenHasOnePlace:
    def test_gathered_shards_give_back_the_batch_and_else_padding(self, batch, samples, cp, tp):
        """All tensors of a rank hold the same tokens."""
        shards, adapter = batch.shards(cp, tp, samples), adapter_of(cp, tp)
        lengths = adapter.lengths(batch.tokens, packed(samples) if samples else None)
        whole = torch.cat([embeddings for embeddings, *_ in shards])
        whole = whole[adapter.token_layout(lengths).places]
        assert torch.equal(whole[lengths.valid], batch.embeddings)
        assert not whole[~lengths.valid].any()
        for first in range(0, cp * tp, tp):
            parts = shards[first : first + tp]
            embeddings = torch.cat([part[0] for part in parts])
            for _, labels, loss_mask, _ in parts:
                assert torch.equal(embeddings[..., 0].t(), labels.float())
                assert torch.equal(loss_mask, (labels > 0).float())

    def test_owners_and_padding_mask_are_those_of_the_shards(self, batch, samples, cp, tp):
        params = packed(samples) if samples else None
        lengths = adapter_of(cp, tp).lengths(batch.tokens, params)
        owners = zigzag_owners(lengths, cp)
        for index, (embeddings, labels, *_) in enumerate(batch.shards(cp, tp, samples)):
            place = divmod(index, tp)
            mine = batch.labels[0][owners == place[0]].tolist()
            assert mine == sorted(filter(None, labels[0].tolist()))
            found = padding_arguments(batch.labels, adapter_of(cp, tp, *place), params)
            is_padding = embeddings[..., 0].t() == 0
            assert torch.equal(found.get("padding_mask", torch.zeros_like(is_padding)), is_padding)
            assert bool(found) == (lengths.real != lengths.padded)


@pytest.mark.usefixtures("default_group")
class TestPackedParameters:
    def test_real_boundaries_are_told_from_padded_ones(self):
        """They are on a stage that has no tensor, too."""
        params = Batch(1, 26).shards(2, 2, ROW)[0][3]
        assert params.cu_seqlens_q.tolist() == [0, 5, 12, 13, 26]
        assert params.cu_seqlens_q_padded.tolist() == [0, 8, 16, 20, 40]
        assert params.seq_idx.tolist() == [[0] * 8 + [1] * 8 + [2] * 4 + [3] * 20]
        *tensors, middle = adapter_of(2, 2).shard(None, None, None, packed(ROW))
        assert tensors == [None, None, None]
        assert torch.equal(middle.cu_seqlens_q_padded, params.cu_seqlens_q_padded)

    def test_samples_padded_by_the_loader_stay_as_they_are(self):
        """Upstream's packing gives the boundaries of real tokens, and of all that the row holds."""
        params = packed((3, 6), cu_seqlens_q_padded=torch.tensor([0, 4, 12]))
        adapter = adapter_of(2, 1)
        lengths = adapter.lengths(12, params)
        assert lengths == PaddedLengths((4, 8), (4, 8))
        assert zigzag_owners(lengths, 2).tolist() == [0, 1, 1, 0, 0, 0, 1, 1, 1, 1, 0, 0]


class TestRefusals:
    def test_padding_without_a_loss_mask(self):
        batch = Batch(1, 5)
        with pytest.raises(ValueError, match=r"of \(5,\) tokens are padded to \(8,\).*loss_mask"):
            adapter_of(4, 1).shard(batch.embeddings, batch.labels, None)

    @pytest.mark.parametrize(
        ("options", "tokens", "samples", "message"),
        [
            ({}, 30, packed(ROW), "have 26 tokens, the sequence 30"),
            ({"tp_comm_overlap": True}, 32, None, "needs sequences of 64 tokens, found 32"),
        ],
    )
    def test_another_length(self, options, tokens, samples, message):
        with pytest.raises(ValueError, match=message):
            adapter_of(2, 2, **options).lengths(tokens, samples)

    def test_a_forgotten_group_is_no_silent_whole_batch(self):
        with pytest.raises(AssertionError, match="reads a global group"):
            PartitionConfig.from_mp_config(
                ModelParallelConfig(context_parallel_size=2), max_seq_len=64
            )


def test_a_grid_gives_the_groups_and_one_without_cp_has_none():
    grid = SimpleNamespace(dim_names=["tp", "dp"], get_pg=lambda dim: f"group of {dim}")
    config = SimpleNamespace(module_to_grid_map={"language": grid})
    assert partition_groups(config, None, None) == (None, "group of tp")
    grid.dim_names.append("cp")
    assert partition_groups(config, None, None) == ("group of cp", "group of tp")


IMAGE, SOUND = 8, 9
IDS = torch.tensor([[1, IMAGE, IMAGE, 2, 3, SOUND, 4, 5]])
PREDICTED = torch.tensor([[1.0, 1, 1, 0, 1, 1, 1, 0]])
"""Tokens whose successor has a loss."""


def model_of(adapter: PartitionAdapter | None, mtp: bool = True) -> SimpleNamespace:
    language = torch.nn.Module()
    language.mtp_process = mtp
    special = {"images": IMAGE, "sound": SOUND}
    return SimpleNamespace(
        language_model=language, special_token_ids=special, partition_adapter=adapter
    )


class TestTokensOfMultiTokenPrediction:
    def test_predictions_from_images_and_sound_have_no_loss(self):
        found = token_arguments(model_of(None), IDS, None, PREDICTED)
        assert found["loss_mask"].tolist() == [[1, 0, 0, 0, 1, 0, 1, 0]]
        assert torch.equal(found["input_ids"], IDS)

    def test_cp_ranks_have_their_own_tokens(self):
        """They are those of the hidden states: the first and last quarter, and the two between."""
        for rank, own in enumerate(([0, 1, 6, 7], [2, 3, 4, 5])):
            found = token_arguments(model_of(adapter_of(2, 1, rank)), IDS, None, PREDICTED)
            assert torch.equal(found["input_ids"], IDS[:, own])
            assert found["loss_mask"].tolist() == [[[1, 0, 0, 0, 1, 0, 1, 0][i] for i in own]]

    def test_padded_samples_are_refused(self):
        with pytest.raises(ValueError, match="has to pad"):
            token_arguments(model_of(adapter_of(4, 1)), IDS[:, :7], None, PREDICTED[:, :7])
