# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Images of samples as tiles, or whole.

Tiling is dynamic: an image becomes a grid of square tiles, and a thumbnail of the whole. The grid
is the one of InternVL 1.5 (Chen et al. 2024, arXiv:2404.16821, section 3.2), which NVLM (Dai et al.
2024, arXiv:2409.11402, section 4.2.1) takes as well: of all grids of at most ``max_tiles`` tiles,
the one whose aspect ratio is closest to the image's; of grids with the same ratio (1×1, 2×2, …) the
largest of which the image's own pixels fill more than half. The number of tiles follows from the
image's size alone.
"""

import io
import warnings
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from PIL import Image, ImageOps
from PIL.ExifTags import Base

from examples.mimo.nemotron_vlm.energon.errors import BadMedium
from examples.mimo.nemotron_vlm.model.media_sizes import PatchGrids

FORMATS = {
    suffix.removeprefix("."): name
    for suffix, name in Image.registered_extensions().items()
    if name in Image.OPEN and Image.MIME.get(name, "").startswith("image/")
}
"""Formats of images that Pillow reads, by suffix; PostScript, which runs programs, is none."""

TURNED = range(5, 9)
"""Orientations of EXIF that turn an image by a quarter."""
PHOTOMETRIC = 262
"""Tag of TIFF that is 0 if 0 is white, as in X-rays; Pillow heeds it up to 8 bits."""
LONGEST = (1 << 15) - 1
"""Most patches of a side of an image or a frame, and most tubelets of a clip."""


@dataclass(frozen=True)
class Tiling:
    """Settings of how images are cut into tiles.

    tile: height and width of a tile in pixels. max_tiles: tiles that an image's grid may have, the
    thumbnail not counted. thumbnail: whether the whole image follows as one more tile if the grid
    has several. tokens: image tokens of a tile.
    """

    tile: int
    max_tiles: int = 12
    thumbnail: bool = True
    tokens: int = 1

    def __post_init__(self) -> None:
        if self.max_tiles < 1:
            raise ValueError(f"{self.max_tiles} tiles of an image are too few; it needs 1")

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return the columns and rows of the grid of an image, whose size is in pixels."""
        return _closest_grid(width, height, self.tile, self.max_tiles)

    def size_of(self, width: int, height: int) -> int:
        """Return the number of tiles of an image, thumbnail included; its size is in pixels."""
        columns, rows = self.grid(width, height)
        return columns * rows + (self.thumbnail and columns * rows > 1)

    def cut(self, image: Image.Image) -> torch.Tensor:
        """Return the tiles row by row, then the thumbnail, uint8 [n, 3, tile, tile]."""
        columns, rows = self.grid(*image.size)
        size = self.tile
        whole = np.array(image.resize((columns * size, rows * size), Image.Resampling.BICUBIC))
        tiles = whole.reshape(rows, size, columns, size, 3).transpose(0, 2, 4, 1, 3)
        tiles = torch.from_numpy(np.ascontiguousarray(tiles).reshape(-1, 3, size, size))
        if not self.thumbnail or len(tiles) == 1:
            return tiles
        small = np.array(image.resize((size, size), Image.Resampling.BICUBIC))
        return torch.cat([tiles, torch.from_numpy(small).permute(2, 0, 1)[None]])

    def rows(self, sizes: np.ndarray) -> np.ndarray:
        """Return the tokens that images of some sizes become."""
        return sizes * self.tokens

    def join(self, images: list[torch.Tensor]) -> torch.Tensor:
        """Return the inputs of a sample: the tiles of all images, uint8 [n, 3, tile, tile]."""
        return torch.cat([torch.empty(0, 3, self.tile, self.tile, dtype=torch.uint8), *images])


@dataclass(frozen=True)
class Resizing:
    """Settings of how images are resized, which are encoded whole; the methods are `Tiling`'s."""

    grids: PatchGrids

    def size_of(self, width: int, height: int) -> int:
        """Return the size of an image, as `PatchGrids` codes it.

        Raises:
            BadMedium: it is so long that its size has no code.
        """
        if max(self.grids.grid_of(height, width)) > LONGEST:
            raise BadMedium(f"{width} × {height} pixels are too long a strip")
        return self.grids.size_of(height, width)

    def cut(self, image: Image.Image) -> torch.Tensor:
        """Return the patches of an image, as `PatchGrids.cut` does."""
        return self.grids.cut(torch.from_numpy(np.array(image)).permute(2, 0, 1))

    def rows(self, sizes: np.ndarray) -> np.ndarray:
        """Return the tokens that images of some sizes become."""
        return self.grids.rows(sizes)


def open_image(data: bytes, small: bool = False) -> tuple[Image.Image, tuple[int, int]]:
    """Return an image as a viewer shows it, in RGB: its first frame, upright, on white; and its
    width and height.

    It is turned as EXIF says. Greys of 16 bits are scaled to 8, as libpng and torchcodec do.

    Args:
        small: whether all bytes of a JPEG are decoded, but to an eighth of its width and height.

    Raises:
        BadMedium: it is in none of `FORMATS`, without pixels, or in greys of 32 bits, which do not
            say what is white.
        Exception: Pillow finds it damaged, or of more than its ``MAX_IMAGE_PIXELS``.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            file = Image.open(io.BytesIO(data), formats=sorted(set(FORMATS.values())))
        except Image.UnidentifiedImageError as error:
            line = "damaged, or in a format that is not read: Pillow finds no image"
            raise BadMedium(line) from error
        if 0 in file.size:
            raise BadMedium(f"{file.width} × {file.height} pixels")
        size = file.size[::-1] if file.getexif().get(Base.Orientation) in TURNED else file.size
        is_smaller = small and file.draft(None, (1, 1))
        image = ImageOps.exif_transpose(file)
        size = size if is_smaller else image.size
    if image.mode.startswith("I;16") or (image.mode == "I" and file.format in ("PNG", "PPM")):
        return _of_16_bits(image, getattr(file, "tag_v2", {}).get(PHOTOMETRIC) == 0), size
    if image.mode in "IF":
        raise BadMedium(f"Pillow's mode {image.mode}: convert its greys of 32 bits to 8 or 16 bits")
    if image.mode.endswith(("A", "a")) or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB"), size


def _of_16_bits(image: Image.Image, is_negative: bool) -> Image.Image:
    greys = np.asarray(image).astype(np.int32)
    greys = 65535 - greys if is_negative else greys
    shown = ((greys + 128) // 257).astype(np.uint8)
    if (transparent := image.info.get("transparency")) is not None:
        shown[greys == transparent] = 255
    return Image.fromarray(shown).convert("RGB")


@lru_cache(maxsize=65536)
def _closest_grid(width: int, height: int, tile: int, max_tiles: int) -> tuple[int, int]:
    def preference(grid: tuple[int, int]) -> tuple[float, bool, int]:
        columns, rows = grid
        tiles = columns * rows
        filled = 2 * width * height > tile * tile * tiles
        return abs(width / height - columns / rows), not filled, -tiles if filled else tiles

    sizes = range(1, max_tiles + 1)
    grids = ((columns, rows) for columns in sizes for rows in sizes if columns * rows <= max_tiles)
    return min(grids, key=preference)
