# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Rows of modalities at their tokens' places, without waiting; what comes of it: test_omni.py."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.mimo.config.role import ModuleLayout
from megatron.core.models.mimo.forward.embedding_merge import embed_tokens
from megatron.core.models.mimo.forward.encoding import note_split_sizes
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.partition.adapter import PartitionAdapter, PartitionConfig
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.unit_tests.no_host_sync import no_host_sync
from tests.unit_tests.test_utilities import Utils, requires_world_size

SPECIAL = {"images": 30, "sounds": 31}
BATCH, TOKENS, HIDDEN = 3, 17, 4


def model_of() -> SimpleNamespace:
    """Stand in for a MimoModel; its vocabulary ends before special tokens."""
    torch.manual_seed(0)
    words = torch.nn.Embedding(30, HIDDEN).to(Utils.device)
    places = torch.nn.Embedding(TOKENS, HIDDEN).to(Utils.device)

    def embedding(input_ids, position_ids):
        return (words(input_ids) + places(position_ids)).transpose(0, 1)

    language = SimpleNamespace(embedding=embedding)
    bridges = {("images", "language"): None}
    return SimpleNamespace(
        language_model=language,
        special_token_ids=SPECIAL,
        colocated_comms=bridges,
        partition_adapter=None,
        mimo_config=SimpleNamespace(module_to_grid_map={}),
    )


@pytest.fixture(params=[0, 20], ids=["text-only", "mixed"])
def batch(request):
    """Token ids and positions [B, S], and rows of each modality, as many as its tokens."""
    rng = torch.Generator().manual_seed(1)
    ids = torch.randint(request.param, 32 if request.param else 30, (BATCH, TOKENS), generator=rng)
    rows = {
        name: torch.randn(int((ids == token).sum()), HIDDEN, generator=rng).to(Utils.device)
        for name, token in SPECIAL.items()
    }
    positions = torch.arange(TOKENS).expand(BATCH, TOKENS)
    return ids.to(Utils.device), positions.to(Utils.device), rows


def test_nothing_waits_for_the_device_backward_included(batch):
    """Rows take the dtype of the text."""
    ids, positions, rows = batch
    half = {name: tensor.bfloat16() for name, tensor in rows.items()}
    whole = {name: tensor.float() for name, tensor in half.items()}
    with no_host_sync():
        found = embed_tokens(model_of(), ids, positions, half)
        found.sum().backward()
    assert torch.equal(found, embed_tokens(model_of(), ids, positions, whole))


@requires_world_size(2)
@pytest.mark.parametrize("colocated", [True, False])
def test_gradients_come_through_the_mask_that_each_token_had(batch, colocated):
    """Sequence parallelism is on, which cuts the embeddings after they are made."""
    Utils.initialize_distributed()
    grid = HyperCommGrid([2], ["tp"])
    group = grid.create_pg("tp")
    model_parallel_cuda_manual_seed(
        7, tp_rank=group.rank(), ep_rank=0, etp_rank=0, force_reset_rng=True
    )
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        hidden_dropout=0.5,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
    )
    embedding = LanguageModelEmbedding(
        config, 32, TOKENS, "none", scatter_to_sequence_parallel=False, tp_group=group
    ).to(Utils.device)
    torch.nn.init.ones_(embedding.word_embeddings.weight)
    cut = PartitionConfig(True, False, False, TOKENS, tp_group=group)
    model = SimpleNamespace(
        language_model=SimpleNamespace(embedding=embedding),
        special_token_ids=SPECIAL,
        colocated_comms=model_of().colocated_comms if colocated else {},
        partition_adapter=PartitionAdapter(cut),
        mimo_config=SimpleNamespace(module_to_grid_map={"language": grid}),
    )
    for method in ("get_text_embeddings", "align_embeddings_by_token_positions"):
        setattr(model, method, getattr(MimoModel, method).__get__(model))

    ids, positions, rows = batch
    rows = {name: torch.zeros_like(tensor) for name, tensor in rows.items()}
    adapter = model.partition_adapter
    embedded = embed_tokens(model, ids, positions, rows)
    own = adapter.shard_embeddings(embedded, adapter.lengths(TOKENS))
    factors = torch.randn(2, *own.shape, generator=torch.Generator().manual_seed(2))
    factors = factors.to(Utils.device)
    (own * factors[group.rank()]).sum().backward()

    # All words' embeddings are ones, so the output is the mask; that of images is zero.
    shards = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(shards, own.detach(), group)
    masked = (torch.stack(shards) * factors).flatten(0, 1)[:TOKENS].transpose(0, 1)
    expected = torch.zeros(32, HIDDEN, device=Utils.device)
    expected.index_add_(0, ids.flatten(), masked.flatten(0, 1))
    part = expected.chunk(2)[group.rank()]
    torch.testing.assert_close(embedding.word_embeddings.weight.grad, part)
    assert set(own.unique().tolist()) == {0, 2}
    grid.destroy()


@pytest.mark.parametrize("samples", [[[30, 1], [30, 30]], [[30, 1], [1, 30]], [[30, 30]], [[1, 1]]])
@pytest.mark.parametrize("shape", [(3, 4), (2, 4), (3, 1, 4)])
def test_the_rows_of_samples_are_noted_as_upstream_notes_them(samples, shape):
    """The refusal holds where the DP sizes are not refused, as with colocated modules."""
    model = SimpleNamespace(special_token_ids=SPECIAL, role=SimpleNamespace())
    model.role.mode = ModuleLayout.COLOCATED
    for ids in (torch.tensor(samples), None):
        for name in (*SPECIAL, "clips"):
            found, wanted = torch.zeros(shape), torch.zeros(shape)
            note_split_sizes(model, found, ids, name)
            MimoModel._attach_modality_split_sizes(model, wanted, ids, name)
            assert vars(found) == vars(wanted)
