# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Ranks that hold the language model alone (non-colocated) shard a batch and lose nothing of it."""

import pytest
import torch
import torch.distributed as dist

from examples.mimo.nemotron_vlm.layout import Layout
from examples.mimo.nemotron_vlm.model import IMAGES
from examples.mimo.nemotron_vlm.placement import COLOCATED
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.models.mimo.encoding import with_embeddings
from megatron.core.models.mimo.module_groups import ModuleGroups, make_modules
from tests.unit_tests.models.mimo_models import (
    SAMPLES,
    SEQUENCE,
    build_mamba_moe,
    build_plain_moe_gpt,
    make_options,
    one_rank,
)
from tests.unit_tests.models.mimo_training import (
    BACKEND,
    initialized,
    microbatches,
    modules_of_one_rank,
)
from tests.unit_tests.test_utilities import Utils, requires_world_size

WORLD = 8
LANGUAGE_RANKS = 4
"""The first ones; the others would hold the encoder."""


def whole_run(build):
    """A colocated step on one rank: the batch, its image embeddings with their gradient, the loss.

    Returns:
        MimoModel's arguments but the images, [n, H] with ``grad``, the summed loss.
    """
    options = one_rank()
    with modules_of_one_rank() as modules, initialized(build, options, modules) as model:
        kept = []
        (encoder,) = model.modality_submodules[IMAGES].encoders.values()
        encoder.register_forward_hook(lambda module, inputs, output: kept.append(output))
        (batch,) = microbatches(options, modules, step=0)
        losses, loss_mask = model(**with_embeddings(model, batch))
        (images,) = kept
        images.retain_grad()
        loss = (losses * loss_mask).sum()
        loss.backward()
    del batch["modality_inputs"], batch["host_tokens"]
    return batch, images, loss.item()


def disjoint_modules(language: Layout) -> dict[str, ModuleGroups]:
    """The language model on the first ranks, the encoder on the others."""
    encoder = Layout(dp=WORLD - LANGUAGE_RANKS, etp=1)
    layouts = {IMAGES: (encoder, LANGUAGE_RANKS), LANGUAGE: (language, 0)}
    return make_modules(layouts, BACKEND)


def run_stage(model, batch, images, groups, sequence: int):
    """Forward and backward of this rank's pipeline stage.

    Args:
        images: [n, H], used by the first stage.
        sequence: tokens of a rank's hidden states.

    Returns:
        The summed loss of this rank's tokens (0 before the last stage) and the sharded loss mask.
    """
    ranks, stage = dist.get_process_group_ranks(groups.pp), groups.pp.rank()
    first, last = stage == 0, stage == groups.pp.size() - 1
    shape = (sequence, batch["input_ids"].shape[0], images.shape[1])
    hidden = torch.empty(shape, device=Utils.device)
    if not first:
        dist.recv(hidden, ranks[stage - 1])
    inputs = {IMAGES: images} if first else {LANGUAGE: hidden.requires_grad_()}
    model.set_input_tensor(inputs)
    output, loss_mask = model(**batch)
    if last:
        loss = (output * loss_mask).sum()
        loss.backward()
    else:
        loss = torch.zeros((), device=Utils.device)
        dist.send(output[LANGUAGE].detach(), ranks[stage + 1])
        gradient = torch.empty(shape, device=Utils.device)
        dist.recv(gradient, ranks[stage + 1])
        output[LANGUAGE].backward(gradient)
    if not first:
        dist.send(hidden.grad, ranks[stage - 1])
    return loss.detach(), loss_mask


@requires_world_size(WORLD)
class TestLanguageRole:
    def setup_method(self, method):
        Utils.initialize_distributed()

    @pytest.mark.parametrize("build", [build_plain_moe_gpt, build_mamba_moe])
    @pytest.mark.parametrize(
        "language",
        [
            Layout(tp=2, cp=2, dp=1, ep=2, etp=1),
            Layout(cp=2, pp=2, dp=1, ep=2, etp=1),
            Layout(tp=2, pp=2, dp=1, ep=2, etp=1),
        ],
        ids=str,
    )
    def test_equals_one_rank(self, build, language):
        """The loss, and the gradient that would go back to the encoder."""
        batch, whole_images, whole_loss = whole_run(build)
        modules = disjoint_modules(language)
        groups = modules[LANGUAGE].groups
        options = make_options(
            "", str(language), LANGUAGE_RANKS, micro_size=SAMPLES, placement=COLOCATED
        )
        options.configs.language.variable_seq_lengths = True
        if Utils.rank < LANGUAGE_RANKS:
            with initialized(build, options, modules) as model:
                images = whole_images.detach().clone().requires_grad_()
                tokens = SEQUENCE // language.cp
                loss, loss_mask = run_stage(model, batch, images, groups, tokens // language.tp)
            assert loss_mask.shape[1] == tokens
            if groups.pp.rank() == groups.pp.size() - 1:
                dist.all_reduce(loss, group=groups.cp)
                assert loss.item() == pytest.approx(whole_loss, rel=1e-5)
            if groups.pp.rank() == groups.cp.rank() == groups.tp.rank() == 0:  # who sends it back
                torch.testing.assert_close(images.grad, whole_images.grad, rtol=1e-4, atol=1e-5)
        for module in modules.values():
            module.grid.destroy()
