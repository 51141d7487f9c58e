# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Tiles of an image: the grid, their order, and images that cannot be decoded."""

import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from examples.mimo.nemotron_vlm.energon.images import BadImage, Tiling, open_image
from tests.unit_tests.examples.nemotron_vlm.energon.digits_data import image


def published_grid(width: int, height: int, tile: int, most: int) -> tuple[int, int]:
    """InternVL's own loops (find_closest_aspect_ratio), over all grids."""
    grids = [(i, j) for i in range(1, most + 1) for j in range(1, most + 1) if i * j <= most]
    best_difference, best = float("inf"), (1, 1)
    for grid in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        difference = abs(width / height - grid[0] / grid[1])
        if difference < best_difference:
            best_difference, best = difference, grid
        elif difference == best_difference and width * height > 0.5 * tile**2 * grid[0] * grid[1]:
            best = grid
    return best


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


class TestGrid:
    @settings(deadline=None, max_examples=300)
    @given(
        st.integers(1, 3000), st.integers(1, 3000), st.sampled_from([16, 448]), st.integers(1, 12)
    )
    def test_is_the_published_one(self, width, height, tile, most):
        """They differ only for two ratios equally far with as many tiles: any order is right."""
        grids = Tiling(tile, most).grid(width, height), published_grid(width, height, tile, most)
        assert len({abs(width / height - columns / rows) for columns, rows in grids}) == 1
        assert len({columns * rows for columns, rows in grids}) == 1

    @pytest.mark.parametrize(
        ("size", "grid", "tiles"),
        [
            ((800, 1300), (2, 3), 7),  # figure 4 of the InternVL 1.5 paper
            ((448, 448), (1, 1), 1),
            ((1000, 1000), (3, 3), 10),  # 3×3 is filled by more than half, 4×4 has too many tiles
            ((5000, 100), (12, 1), 13),
            ((100, 5000), (1, 12), 13),
            ((1, 1), (1, 1), 1),
        ],
    )
    def test_of_known_sizes(self, size, grid, tiles):
        assert Tiling(448).grid(*size) == grid
        assert Tiling(448).size_of(*size) == tiles
        assert Tiling(448, thumbnail=False).size_of(*size) == grid[0] * grid[1]


class TestTiles:
    @settings(deadline=None, max_examples=30)
    @given(st.integers(1, 90), st.integers(1, 90), st.booleans())
    def test_are_as_many_as_the_size_says(self, width, height, thumbnail):
        tiling = Tiling(16, thumbnail=thumbnail)
        tiles = tiling.cut(Image.new("RGB", (width, height)))
        assert tiles.shape == (tiling.size_of(width, height), 3, 16, 16)
        assert tiles.dtype == torch.uint8

    def test_come_row_by_row_and_the_thumbnail_last(self):
        image = Image.new("RGB", (48, 32))
        for place in range(6):
            left, top = 16 * (place % 3), 16 * (place // 3)
            image.paste((40 * place, 7, 200), (left, top, left + 16, top + 16))
        tiles = Tiling(16, max_tiles=6).cut(image)
        assert tiles.shape[0] == 7
        for place in range(6):
            assert tiles[place, 0].unique().tolist() == [40 * place]
        assert tiles[6, 0, 0, 0] < tiles[6, 0, 15, 15]
        assert (tiles[:, 1] == 7).all() and (tiles[:, 2] == 200).all()

    @pytest.mark.parametrize("mode", ["L", "P", "RGBA", "LA", "1"])
    def test_have_three_channels_of_any_image(self, mode):
        assert Tiling(16).cut(open_image(png(Image.new(mode, (16, 16))))).shape == (1, 3, 16, 16)

    @pytest.mark.parametrize("kind", ["WEBP", "BMP", "GIF", "TIFF"])
    def test_are_of_any_format_that_pillow_reads(self, kind):
        assert Tiling(16).cut(open_image(image(16, 32, kind))).shape == (3, 3, 16, 16)

    def test_are_not_of_nothing_postscript_or_a_file_cut_short(self):
        with pytest.raises(ValueError, match="0 tiles"):
            Tiling(16, max_tiles=0)
        noise = png(Image.effect_noise((64, 64), 90))
        with pytest.raises(BadImage, match="Pillow finds no image"):
            open_image(image(8, 8, "EPS"))
        with pytest.raises(BadImage):
            Tiling(16).cut(open_image(noise[: len(noise) // 2]))
