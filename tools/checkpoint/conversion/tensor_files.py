# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Safetensors files of a Hugging Face directory, read by rows and written file by file."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from conversion.rows import Shape
from examples.mimo.common.errors import UserError

INDEX = "model.safetensors.index.json"

FILE_BYTES = 4 * 1000**3
"""Bytes of a safetensors file, of which about twice as many are in memory; a larger tensor has its
own file."""


class TensorFiles:
    """The tensors of a directory; only the requested rows are read.

    Args:
        directory: a directory with ``.safetensors`` files, or with none.

    Raises:
        UserError: a file is damaged, or two have a tensor of the same name.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, safe_open] = {}
        self.shapes: dict[str, Shape] = {}
        for path in sorted(directory.glob("*.safetensors")):
            try:
                file = safe_open(path, "pt")
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path}: {error}") from error
            for name in file.keys():
                if name in self._files:
                    raise UserError(f"{path}: {name} is in another file as well")
                self._files[name] = file
                self.shapes[name] = tuple(file.get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        first = self._files[name].get_slice(name)
        return first[:0].dtype if self.shapes[name] else self.read(name).dtype

    def rows(self, name: str, start: int, count: int) -> torch.Tensor:
        """Read ``count`` rows of a tensor, from ``start`` on."""
        return self._files[name].get_slice(name)[start : start + count]

    def read(self, name: str) -> torch.Tensor:
        """Read a whole tensor."""
        return self._files[name].get_tensor(name)


def write_file(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write tensors to a file that is as readable as its directory."""
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(path.parent.stat().st_mode & 0o666)  # save_file makes it private


def write_files(
    directory: Path,
    sizes: Mapping[str, int],
    make: Callable[[list[str]], dict[str, torch.Tensor]],
) -> None:
    """Write tensors to files, one file after another, and an index if there are several.

    Args:
        directory: the directory to write to.
        sizes: bytes of each tensor, by name.
        make: returns the tensors of a list of names, by name; called once per file.
    """
    split = split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=int,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=FILE_BYTES,
    )
    for file, names in split.filename_to_tensors.items():
        write_file(directory / file, make(names))
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
