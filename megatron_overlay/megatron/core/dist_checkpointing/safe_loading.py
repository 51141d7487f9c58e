# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Read a distributed checkpoint without running code from it.

PyTorch's reader unpickles the metadata, and its planner the objects, without restriction; a pickle
can name any function to call.
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
    "pathlib": "PosixPath",
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


class SafeReader(FileSystemReader):
    """PyTorch's reader of a checkpoint, whose metadata may only name its own classes."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the metadata.

        Raises:
            CheckpointingException: it is damaged, or names anything else.
        """
        with self.fs.create_stream(self._get_metadata_path(), "rb") as stream:
            try:
                metadata = _Unpickler(stream).load()
            except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError) as e:
                raise CheckpointingException(f"the metadata is damaged: {e}") from e
        if not isinstance(metadata, Metadata):
            raise CheckpointingException(
                f"the checkpoint's metadata is a {type(metadata).__name__}"
            )
        metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


@contextlib.contextmanager
def no_code_from_checkpoints() -> Iterator[None]:
    """Inside, `SafeReader` and Megatron's loading, which uses it, run no code from a checkpoint.

    PyTorch's own switch makes ``torch.load`` read objects and the common state with
    ``weights_only``; ``torch.serialization.add_safe_globals`` allows further classes.

    Raises:
        CheckpointingException: an object of a checkpoint names anything else.
    """
    switch = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(switch)
    os.environ[switch] = "1"
    try:
        yield
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise CheckpointingException(f"an object is refused: {reason}") from error
    finally:
        del os.environ[switch]
        os.environ |= {} if before is None else {switch: before}
