# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Hugging Face directories of whole VLMs: the model's parts and their sizes, and safetensors files,
read by rows and written file by file.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from conversion.rows import LANGUAGE, Shape, check_tensors, parts_of
from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.model.encoders.hugging_face import Part, check_values
from examples.mimo.nemotron_vlm.model.presets import VLMPreset

VLM = "nemotron_h_omni"
"""``model_type`` of a VLM's configuration."""

RELEASED = "NemotronH_Nano_Omni_Reasoning_V3"
"""``model_type`` of the released VLM's configuration, which AutoConfig does not know."""


INDEX = "model.safetensors.index.json"

FILE_BYTES = 4 * 1000**3
"""Bytes of a safetensors file; about twice as many are in memory. A larger tensor has its own
file."""


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


class Published:
    """A directory of a whole VLM, with or without its tensors.

    preset: the model of ``base`` with the directory's sizes, without encoders that it lacks.

    Raises:
        UserError: the directory has no such model, or one with a size or option that ours does not
            support; the message names it.
    """

    def __init__(self, directory: Path, base: VLMPreset) -> None:
        self.files = TensorFiles(directory)
        config = config_of(directory)
        check_values("the VLM", config, {"downsample_ratio": 0.5})
        if config.force_image_size:
            config.vision_config.image_size = config.force_image_size

        def described(part: Part) -> Any:
            return getattr(config, part.config) if part.config else config

        def sized(sizes: Any, parts: Iterable[Part]) -> Any:
            for part in parts:
                sizes = part.sizes(sizes, described(part), self.files)
            return sizes

        held = [e for e in base.encoders if e.parts() and None not in map(described, e.parts())]
        self.preset = replace(
            base,
            name="converted",
            language=sized(base.language, [LANGUAGE]),
            encoders=tuple(sized(each, each.parts()) for each in held),
        )

    def left_out(self, wanted: Mapping[str, Shape]) -> list[str]:
        """Return the names of the files' tensors that the model can do without.

        Args:
            wanted: shapes of the tensors that it needs, by name.

        Raises:
            UserError: tensors of its parts are missing, surplus or misshapen, or it cannot do
                without their values.
        """
        parts, found = [part for part, _ in parts_of(self.preset)], self.files.shapes
        prefixes = tuple(part.theirs for part in parts)
        unneeded = {name for part in parts for name in part.not_held(self.files)}
        unneeded |= {name for name in found if not name.startswith(prefixes)}
        left_out = sorted(unneeded - wanted.keys())
        kept = {name: shape for name, shape in found.items() if name not in left_out}
        check_tensors(wanted, kept, self.files.directory)
        return left_out


def config_of(directory: Path) -> Any:
    """Read a directory's configuration, as transformers' own class.

    Raises:
        UserError: it has none, or one of another model.
    """
    from transformers.models.nemotron_h_omni import NemotronH_Omni_Reasoning_V3_Config as Config

    try:
        read, _ = Config.get_config_dict(directory, local_files_only=True)
        kind = read["model_type"]
        if kind not in (VLM, RELEASED):
            raise UserError(f"{directory}/config.json: model_type is {kind}, wanted {VLM}")
        if kind == RELEASED and read.get("sound_config"):
            read["sound_config"].pop("model_type", None)  # "parakeet": transformers 5.24 refuses it
        return Config.from_dict(read | {"model_type": VLM})
    except (ValueError, OSError, KeyError) as error:
        raise UserError(f"{directory}/config.json: {error}") from error
