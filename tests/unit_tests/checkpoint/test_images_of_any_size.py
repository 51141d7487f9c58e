# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Whole images of any size, as Hugging Face's Nemotron 3 Nano Omni encodes them."""

import ast
import math
from collections.abc import Callable
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.mimo.nemotron_vlm.data.sample import IMAGES
from examples.mimo.nemotron_vlm.model.presets import nano_vl_30b_a3b, tiny
from megatron.core.utils import unwrap_model
from tests.unit_tests.checkpoint.conversions import TOLERANCE, convert_once
from tests.unit_tests.checkpoint.hugging_face import whole_vlm
from tests.unit_tests.checkpoint.program_logits import BATCH, RandomText, loading
from tests.unit_tests.examples.nemotron_vlm.runs import trainer
from tests.unit_tests.test_utilities import Utils, requires_world_size

PATCH = 4

GRIDS = [(2, 6), (8, 8), (4, 4), (2, 2), (6, 10), (14, 2), (4, 4)]
"""Rows and columns of patches; the model has positions for 8 by 8."""


def _theirs() -> dict[str, Callable]:
    """The functions of transformers' image processing; its module needs torchvision."""
    package = find_spec("transformers.models.nemotron_h_omni").submodule_search_locations[0]
    tree = ast.parse(Path(package, "image_processing_nemotron_h_omni.py").read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    found = {"math": math, "torch": torch}
    exec(compile(tree, package, "exec"), found)
    return found


THEIRS = _theirs()


@requires_world_size(1)
@pytest.mark.parametrize(
    ("preset", "bounds"),
    [(nano_vl_30b_a3b, (None, None)), (nano_vl_30b_a3b, (1, 10000)), (tiny, (50, 60))],
)
def test_an_image_has_their_grid(preset, bounds):
    images = preset().with_images_of_any_size(*bounds).images
    limits = images.min_patches, images.max_patches
    sides = [*range(1, 200, 7), 128, 144, 160, 509, 512, 513, 1000, 1024, 2050, 4000]
    for shape in product(sides, sides):
        if max(shape) > 50 * min(shape):
            continue  # theirs divides by zero
        assert images.grids.grid_of(*shape) == THEIRS["get_patch_grid_size"](
            *shape, images.patch, images.pixel_shuffle, *limits
        )


@requires_world_size(1)
def test_an_image_is_cut_into_their_patches():
    images = tiny().with_images_of_any_size(4, 1000).images
    image = torch.randint(256, (3, 3 * 8 * PATCH, 2 * 8 * PATCH), dtype=torch.uint8)
    wanted = THEIRS["convert_image_to_patches"](image[None].float(), PATCH)[0]
    assert images.grids.cut(image).flatten(0, 1).equal(wanted)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param((), marks=requires_world_size(1)),
        pytest.param(("--encoder", "tp=2"), marks=requires_world_size(2)),
    ],
)
def test_rows_are_theirs(layout, shared_path):
    model = whole_vlm()
    directory = convert_once(shared_path, lambda: model)
    rng = torch.Generator().manual_seed(1)
    shapes = [(rows, columns, 3 * PATCH**2) for rows, columns in GRIDS]
    images = [torch.rand(shape, generator=rng) * 300 - 20 for shape in shapes]  # overshoot
    any_size = ("--dynamic-resolution", "--dynamic-resolution-min-patches", "4", *layout)
    with (
        trainer(*loading(directory), *BATCH, *any_size, source=RandomText()) as run,
        torch.no_grad(),
    ):
        entry = run.session.options.preset.images
        stage = unwrap_model(run.stages[0].modality_submodules[IMAGES]).eval()

        def encode(parts):
            given = entry.collate(parts)
            given |= {name: given[name].to(Utils.device) for name in ("patches", "tubelets")}
            return stage(encoder_inputs={entry.key: given}).clone()

        nothing, seen = encode([]), []
        decoder = stage.encoders[entry.key].radio.decoder
        decoder.register_forward_pre_hook(lambda *given: seen.append(given[-1]), with_kwargs=True)
        ours = encode([images[:2], [], images[2:]])
    # Transformer Engine attends by these; Megatron's own layers, by lengths on the host.
    packed = seen[0]["packed_seq_params"]
    lengths = [rows * columns + entry.class_tokens for rows, columns in GRIDS]
    assert packed.cu_seqlens_q.diff().tolist() == packed.cu_seqlens_kv.diff().tolist() == lengths
    assert packed.max_seqlen_q == packed.max_seqlen_kv == max(lengths)
    patches = torch.cat([image.flatten(0, 1) for image in images])
    mean, std = (
        torch.tensor(values).repeat_interleave(PATCH**2)
        for values in (model.config.vision_config.norm_mean, model.config.vision_config.norm_std)
    )
    with torch.no_grad():
        wanted = model.get_image_features((patches / 255 - mean) / std, torch.tensor(GRIDS))
    wanted = torch.cat(wanted.pooler_output)
    sizes = np.array([entry.grids.size_of(r * PATCH, c * PATCH) for r, c in GRIDS])
    assert [len(wanted), 0] == [entry.rows(sizes).sum(), len(nothing)]
    assert wanted.std() > 0.3 and ours.shape == wanted.shape
    assert (ours.cpu() - wanted).abs().max() <= TOLERANCE
