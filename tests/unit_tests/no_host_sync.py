# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A guard within which nothing may make the host wait for a tensor's values."""

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit_tests.test_utilities import HAVE_CUDA


class _RefuseWaiting(TorchDispatchMode):
    waiting = (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "unique",
        "repeat_interleave.Tensor",
    )
    by_mask = ("aten::index.", "aten::index_put")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        waits = any(name in func.name() for name in self.waiting)
        waits &= "nonzero_static" not in func.name()  # its size is known
        fills = "index_put" in func.name() and args[2].numel() == 1  # one value: masked_fill
        if func.name().startswith(self.by_mask) and not fills:
            waits |= any(index is not None and index.dtype is torch.bool for index in args[1])
        # A change of dtype does not wait; a copy to another device may.
        moves = "_to_copy" in func.name() and kwargs.get("device") is not None
        assert not (waits or moves), func.name()
        return func(*args, **kwargs)


@contextlib.contextmanager
def no_host_sync() -> Iterator[None]:
    """On a GPU, CUDA reports every synchronisation; on a CPU, the operations that cause them do."""
    if HAVE_CUDA:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return
    # On the CPU, these read memory without dispatching.
    with _RefuseWaiting(), _refused("tolist"), _refused("cpu"), _values_stay_on_the_host():
        yield


def _values_stay_on_the_host():
    """Refuse GPU tensors from values, which are copies that wait; `torch.full` does not wait."""
    tensor = torch.tensor

    def on_the_host(*args, device=None, **kwargs):
        assert device is None, "torch.tensor(values, device=…)"
        return tensor(*args, **kwargs)

    return patch.object(torch, "tensor", on_the_host)


def _refused(method: str):
    return patch.object(torch.Tensor, method, side_effect=AssertionError(method))
