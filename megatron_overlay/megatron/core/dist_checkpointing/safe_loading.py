# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Read a distributed checkpoint without running code from it.

PyTorch's reader unpickles the metadata, and its planner the objects, without restriction; a pickle
can name any function to call. Here the metadata may only name its own classes, and objects only
what ``torch.load`` accepts with ``weights_only``.
"""

import contextlib
import os
import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from megatron.core.dist_checkpointing.core import CheckpointingException

CHECKPOINT = "torch.distributed.checkpoint"

ALLOWED = {
    "collections": "OrderedDict",
    "torch": "Size",
    "torch.serialization": "_get_layout",
    f"{CHECKPOINT}.filesystem": "_StorageInfo _StoragePrefix",
    f"{CHECKPOINT}.metadata": (
        "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta "
        "TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING"
    ),
    f"{CHECKPOINT}.planner": "BytesIOWriteData SavePlan TensorWriteData WriteItem WriteItemType",
}
"""Names, by module, that the metadata may have."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in ALLOWED.get(module, "").split():
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointingException(
            f"the checkpoint's metadata names {module}.{name}, which no checkpoint needs: it is "
            "not loaded"
        )


@contextlib.contextmanager
def no_code_from_checkpoints() -> Iterator[None]:
    """Inside, reading a distributed checkpoint runs no code from it, however it is read.

    PyTorch's own switch makes ``torch.load`` read objects and the common state with
    ``weights_only``; ``torch.serialization.add_safe_globals`` allows further classes.

    Raises:
        CheckpointingException: a checkpoint read inside names anything else.
    """
    switch = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before, read_metadata = os.environ.get(switch), FileSystemReader.read_metadata
    os.environ[switch] = "1"
    FileSystemReader.read_metadata = _read_metadata
    try:
        yield
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise CheckpointingException(f"an object is refused: {reason}") from error
    finally:
        FileSystemReader.read_metadata = read_metadata
        del os.environ[switch]
        if before is not None:
            os.environ[switch] = before


def _read_metadata(reader: FileSystemReader, *_: Any, **__: Any) -> Metadata:
    with reader.fs.create_stream(reader._get_metadata_path(), "rb") as stream:
        try:
            metadata = _Unpickler(stream).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError) as error:
            raise CheckpointingException(f"the metadata is damaged: {error}") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointingException(f"the checkpoint's metadata is a {type(metadata).__name__}")
    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = StorageMeta()
    metadata.storage_meta.load_id = reader.load_id
    return metadata
