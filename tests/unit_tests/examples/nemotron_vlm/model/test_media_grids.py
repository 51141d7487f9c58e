# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Grids of images of any size and of clips, and rows of sounds, as those of Nemotron 3 Nano Omni.

That their rows are transformers', too, is in test_omni.py.
"""

import ast
import math
from collections.abc import Callable
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.models.nemotron_h_omni.processing_nemotron_h_omni import (
    NemotronH_Omni_Reasoning_V3Processor,
)
from transformers.models.nemotron_h_omni.video_processing_nemotron_h_omni import (
    NemotronH_Omni_Reasoning_V3VideoProcessor,
)
from transformers.video_utils import VideoMetadata, default_sample_indices_fn

from examples.mimo.nemotron_vlm.energon.videos import Watching
from examples.mimo.nemotron_vlm.model.media_sizes import (
    SHORTEST,
    ClipGrids,
    PatchGrids,
    grids_of,
    tubelets_of,
)
from examples.mimo.nemotron_vlm.model.presets import nano_omni_30b_a3b
from tests.unit_tests.test_utilities import requires_world_size

IMAGES = nano_omni_30b_a3b().with_images_of_any_size().images
SMALL = ClipGrids(4, 2, 3, 50)
SIDES = [*range(1, 200, 7), 128, 144, 160, 509, 512, 513, 720, 1024, 1080, 1920, 2050, 4000]

pytestmark = requires_world_size(1)


def _theirs() -> dict[str, Callable]:
    """The functions of transformers' image processing; its module needs torchvision."""
    package = find_spec("transformers.models.nemotron_h_omni").submodule_search_locations[0]
    tree = ast.parse(Path(package, "image_processing_nemotron_h_omni.py").read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    found = {"math": math, "torch": torch}
    exec(compile(tree, package, "exec"), found)
    return found


THEIRS = _theirs()


@pytest.mark.parametrize(
    "grids",
    [IMAGES.grids, PatchGrids(16, 2, 1, 10000), PatchGrids(4, 2, 50, 60)],
)
def test_an_image_has_their_grid(grids):
    limits = grids.patch, grids.pixel_shuffle, grids.min_patches, grids.max_patches
    for shape in product(SIDES, SIDES):
        if max(shape) <= 50 * min(shape):  # theirs divides by zero
            assert grids.grid_of(*shape) == THEIRS["get_patch_grid_size"](*shape, *limits)


def processor(grids: ClipGrids) -> NemotronH_Omni_Reasoning_V3VideoProcessor:
    """Theirs, whose frames are pixels divided by 255."""
    return NemotronH_Omni_Reasoning_V3VideoProcessor(
        norm_mean=[0.0] * 3,
        norm_std=[1.0] * 3,
        patch_size=grids.patch,
        video_target_num_patches=grids.patches,
        temporal_patch_size=grids.tubelet,
    )


@pytest.mark.parametrize("grids", [IMAGES.clips, SMALL])
def test_a_frame_has_their_grid(grids):
    theirs = processor(grids)
    for height, width in product(SIDES, SIDES):
        columns, rows = theirs._compute_target_patches(height, width)
        assert grids.grid_of(height, width) == (rows, columns)


@pytest.mark.parametrize(
    ("frames", "sides"), [(1, (16, 16)), (2, (37, 91)), (3, (8, 100)), (7, (37, 91))]
)
def test_a_clip_has_their_tubelets(frames, sides):
    clip = torch.randint(256, (frames, 3, *sides), dtype=torch.uint8)
    (theirs,) = processor(SMALL)._preprocess([clip])["pixel_values_videos"]
    ours, size = SMALL.cut(clip), np.array([SMALL.size_of(frames, *sides)])
    tubelets, rows, columns, features = ours.shape
    assert [tubelets, (rows, columns)] == [tubelets_of(size)[0], tuple(*grids_of(size))]
    patches = theirs.view(tubelets, features // 16, rows, 4, columns, 4)
    wanted = patches.permute(0, 2, 4, 1, 3, 5).reshape(ours.shape)
    assert (ours / 255 - wanted).abs().max() < 1e-6


def test_a_clip_has_the_frames_that_theirs_samples():
    for total, fps in product((1, 2, 9, 250, 1001), (24.0, 29.97)):
        video = VideoMetadata(total_num_frames=total, fps=fps)
        for wanted, wanted_fps in ((None, None), (1, None), (8, None), (None, 0.5), (None, 2.0)):
            ours = Watching(SMALL, wanted, wanted_fps).chosen(total, fps).tolist()
            if wanted and wanted > total:
                assert ours == list(range(total))
                continue  # theirs refuses it
            theirs = default_sample_indices_fn(video, wanted, wanted_fps)
            assert ours == theirs.tolist()


def test_a_sound_has_as_many_rows_as_theirs():
    entry = nano_omni_30b_a3b().encoders[1]
    sizes = np.array([SHORTEST, 1279, 1280, 5000, 3840, 1439, 20000])
    theirs = SimpleNamespace(audio_hop_length=160, audio_subsampling_factor=8)
    count = NemotronH_Omni_Reasoning_V3Processor._estimate_audio_num_embeddings
    assert entry.rows(sizes).tolist() == [count(theirs, size) for size in sizes]
