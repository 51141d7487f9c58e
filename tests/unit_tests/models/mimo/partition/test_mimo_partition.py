# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Lengths, groups and tokens of batches that are cut over CP and sequence-parallel ranks.

That each rank gets its own tokens, and no padding counts, is in test_mimo_upstream_schedule.py.
"""

from types import SimpleNamespace

import pytest
import torch

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.models.mimo.partition.adapter import PartitionAdapter, PartitionConfig
from megatron.core.models.mimo.partition.language_batch import (
    partition_groups,
    token_arguments,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.token_layout import PaddedLengths, zigzag_owners

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


class TestPackedParameters:
    def test_real_boundaries_are_told_from_padded_ones(self):
        """They are on a stage that has no tensor, too."""
        *_, params = adapter_of(2, 2).shard(
            None, torch.zeros(1, 26), torch.ones(1, 26), packed(ROW)
        )
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
        with pytest.raises(ValueError, match=r"of \(5,\) tokens are padded to \(8,\).*loss_mask"):
            adapter_of(4, 1).shard(None, torch.zeros(1, 5), None)

    @pytest.mark.parametrize(
        ("options", "tokens", "samples", "message"),
        [
            ({}, 30, packed(ROW), "end at 26, which does not match the 30 tokens"),
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


def model_of(adapter: PartitionAdapter | None) -> SimpleNamespace:
    language = torch.nn.Module()
    language.mtp_process = True
    special = {"images": IMAGE, "sound": SOUND}
    return SimpleNamespace(
        language_model=language, special_token_ids=special, partition_adapter=adapter
    )


class TestTokensOfMultiTokenPrediction:
    @pytest.mark.parametrize(
        ("cp", "rank", "own"),
        [(1, 0, range(8)), (2, 0, [0, 1, 6, 7]), (2, 1, [2, 3, 4, 5])],
    )
    def test_predictions_from_images_and_sound_have_no_loss(self, cp, rank, own):
        """CP ranks have the tokens of their hidden states: the first and last quarter, or the two
        between."""
        adapter = adapter_of(cp, 1, rank) if cp > 1 else None
        found = token_arguments(model_of(adapter), IDS, None, PREDICTED)
        assert torch.equal(found["input_ids"], IDS[:, own])
        assert found["loss_mask"].tolist() == [[[1, 0, 0, 0, 1, 0, 1, 0][i] for i in own]]

    def test_padded_samples_are_refused(self):
        with pytest.raises(ValueError, match="has to pad"):
            token_arguments(model_of(adapter_of(4, 1)), IDS[:, :7], None, PREDICTED[:, :7])
