# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The program's checkpoints, in Megatron's format ``torch_dist``, without ranks or groups.

Files are written one after another, as if each were another rank's; when loading, a rank reads the
parts that it needs from all of them.
"""

import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemWriter, load
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.data import seen_from
from examples.mimo.nemotron_vlm.loop.best import best_of
from megatron.core.dist_checkpointing import load_common_state_dict
from megatron.core.dist_checkpointing.core import (
    CheckpointingConfig,
    CheckpointingException,
    save_config,
)
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.parallel_manifest import save_manifest
from megatron.core.dist_checkpointing.safe_loading import SafeReader, no_code_from_checkpoints

FILE_BYTES = 2 * 1024**3
"""Approximate bytes of a file, which are in memory at a time."""

MODULE = re.compile(r"(language_model|modality_submodules\.\w+)\.")
"""Prefix of a module's names; in checkpoints the data-parallel wrapper's follows it."""

COMMON = "common_state/shard_0_1"
TRACKER = "latest_checkpointed_iteration.txt"


def saved_key(key: str) -> str:
    """Return the key in a checkpoint for a key of the bare model."""
    return MODULE.sub(r"\1.module.", key, count=1)


class _SavePlanner(DefaultSavePlanner):
    """Calls a function for each object when it is to be written; the state has these functions."""

    def lookup_object(self, index: MetadataIndex) -> object:
        return self.state_dict[index]()


class _Writer(FileSystemWriter):
    def storage_meta(self) -> StorageMeta:
        """Return no path: the program refuses to unpickle objects that no checkpoint needs."""
        return StorageMeta()


def write_checkpoint(
    directory: Path,
    parts: Mapping[str, ShardedTensor],
    dtypes: Mapping[str, torch.dtype],
    make: Callable[[str], torch.Tensor],
    args: Namespace | None = None,
) -> None:
    """Write a checkpoint of weights for the program's ``--load``, as a *release* of Megatron's.

    Args:
        directory: existing directory that ``--load`` will name.
        parts: the parts to write, by name. dtypes: their dtypes.
        make: returns the tensor of a part's name; called when it is to be written.
        args: options of a run, which are saved, too.
    """
    release = directory / "release"
    release.mkdir()
    common = MetadataIndex(COMMON)
    state = {"checkpoint_version": 3.0, "iteration": 0} | ({"args": args} if args else {})
    objects: dict[MetadataIndex, Callable[[], object]] = {common: lambda: [state]}
    plans, filled = [SavePlan([WriteItem(common, WriteItemType.BYTE_IO)])], 0
    for name, part in parts.items():
        sizes = torch.Size((1,) * part.prepend_axis_num + tuple(part.local_shape))
        box = ChunkStorageMetadata(torch.Size(part.global_offset), sizes)
        index = MetadataIndex(part.key, box.offsets)
        objects[index] = lambda name=name, sizes=sizes: make(name).view(sizes)
        properties = TensorProperties(dtype=dtypes[name])
        data = TensorWriteData(box, properties, torch.Size(part.global_shape))
        size = sizes.numel() * dtypes[name].itemsize
        if filled + size > FILE_BYTES:
            plans.append(SavePlan([]))
            filled = 0
        plans[-1].items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        filled += size
    writer = _Writer(release)
    writer.set_up_storage_writer(True)
    plans, metadata = create_default_global_save_plan(plans)
    plans = writer.prepare_global_plan([writer.prepare_local_plan(plan) for plan in plans])
    planner = _SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(objects)
    results = [writer.write_data(plan, planner).wait() for plan in plans]
    writer.finish(metadata, results)
    save_config(CheckpointingConfig("torch_dist", 1), str(release))
    save_manifest(str(release))
    (directory / TRACKER).write_text("release")


class Checkpoint:
    """A checkpoint that the program or a conversion wrote.

    tensors: its weights, without the optimizer's state, by key.

    Args:
        directory: as ``--load`` takes it, or the directory of one iteration; FOLDER/best for the
            best one in a folder.

    Raises:
        UserError: there is no such checkpoint.
    """

    def __init__(self, directory: Path) -> None:
        tracker = directory / TRACKER
        if directory.name == "best" and not directory.exists():
            directory = best_of(directory.parent)
        elif tracker.is_file():
            text = tracker.read_text().strip()
            if text != "release" and not text.isdecimal():
                raise UserError(f"{tracker} names no step")
            directory /= text if text == "release" else f"iter_{int(text):07}"
        self.directory = directory
        try:
            with no_code_from_checkpoints():
                metadata = SafeReader(directory).read_metadata()
        except (OSError, CheckpointingException) as error:
            raise UserError(f"{directory}: no checkpoint of the program: {error}") from error
        self.tensors = {
            key: value
            for key, value in metadata.state_dict_metadata.items()
            if isinstance(value, TensorStorageMetadata) and MODULE.match(key)
        }

    @property
    def options(self) -> Namespace:
        """Options of the run that saved it; its paths name the run's files from any folder.

        Raises:
            UserError: it is a converted one, which has none.
        """
        with no_code_from_checkpoints():
            args = load_common_state_dict(str(self.directory)).get("args")
        if args is None:
            raise UserError(
                f"{self.directory} is a converted checkpoint, without options and tokenizer: give "
                "the Hugging Face directory that it was made of"
            )
        if begun_in := getattr(args, "begun_in", None):
            seen_from(Path(begun_in), args)
        return args

    def whole(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        """Read whole tensors by their keys, and no others; what a tensor lacks is zero."""
        stored = {key: self.tensors[key] for key in keys}
        whole = {key: torch.zeros(s.size, dtype=s.properties.dtype) for key, s in stored.items()}
        with no_code_from_checkpoints():
            load(whole, storage_reader=SafeReader(self.directory), no_dist=True)
        return whole

    def read(self, parts: Mapping[str, ShardedTensor]) -> dict[str, torch.Tensor]:
        """Read the tensors of parts, by name."""
        whole = self.whole({part.key for part in parts.values()})
        return {name: whole[part.key][part.global_slice()] for name, part in parts.items()}
