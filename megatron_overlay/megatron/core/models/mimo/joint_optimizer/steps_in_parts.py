# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Step an optimizer part by part; parts on the host come to the device for their step alone.

Transformer Engine's FusedAdam makes fp32 copies of 16-bit state for all parameters of a group
before it steps the first: of two moments 8 bytes a parameter, more than fp32 moments would add.

With ``--optimizer-cpu-offload``, the state of the first parts is in pinned host memory between
steps. A step copies one part in, steps another and copies a third out, at the same time. The device
still computes every step, with the same kernel, so results have the same bits.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

KINDS = ("exp_avg", "exp_avg_sq", "master_param")
"""Names of the tensors that FusedAdam keeps of a parameter."""

SLOTS = 3
"""Places on the device for state of the host: one is copied in, one stepped, one copied out."""


@dataclass(eq=False)
class Part:
    """Parameters of one group that are stepped together, of one type.

    Attributes:
        size: elements of the parameters.
        held: memory on the host with all their state, uint8; None for parts on the device.
        tensors: the state's tensors, in the order in which they lie in ``held``.
    """

    group: int
    dtype: torch.dtype
    on_host: bool
    params: list[Tensor] = field(default_factory=list)
    size: int = 0
    held: Tensor | None = None
    tensors: list[Tensor] = field(default_factory=list)

    def hold(self, state: dict[Tensor, dict[str, Tensor]]) -> None:
        """Move the state, which lies in memory of its own, to the host."""
        self.tensors = [tensor for param in self.params for tensor in tensors_of(state[param])]
        self.tensors.sort(key=lambda tensor: -tensor.itemsize)  # each is aligned to its type
        size = sum(tensor.nbytes for tensor in self.tensors)
        self.held = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        values = [tensor.data for tensor in self.tensors]
        self.place(self.held)
        for tensor, value in zip(self.tensors, values, strict=True):
            tensor.copy_(value)

    def place(self, memory: Tensor) -> None:
        """Let the state's tensors be those in ``memory``, uint8."""
        start = 0
        for tensor in self.tensors:
            end = start + tensor.nbytes
            tensor.data = memory[start:end].view(tensor.dtype).view(tensor.shape)
            start = end


def tensors_of(state: dict[str, Tensor]) -> list[Tensor]:
    """Return the tensors that a parameter's state consists of; FP8 ones have theirs inside."""
    return [getattr(state[kind], "_data", state[kind]) for kind in KINDS if kind in state]


class StepsInParts:
    """An optimizer that steps parts of its groups one after the other.

    A part has at most ``most`` elements, or one parameter. All parts of a group have the group's
    settings and number of steps.

    Args:
        fraction: how much of the parameters has its state on the host; FusedAdam alone.
    """

    def __init__(self, inner: torch.optim.Optimizer, most: int, fraction: float = 0.0) -> None:
        self._inner = inner
        self.parts = _parts(inner.param_groups, most, fraction)
        self._on_host = [part for part in self.parts if part.on_host]
        self._on_device = [part for part in self.parts if not part.on_host]
        self._held = {param for part in self._on_host for param in part.params}
        if self._on_host:
            self._into, self._back = torch.cuda.Stream(), torch.cuda.Stream()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def allocate(self) -> None:
        """Make the state that the first step would make, and move parts to the host."""
        adam = self._inner
        for part in self.parts:
            for param in part.params:
                if not adam.state[param]:
                    in_halves = adam.store_param_remainders and param.dtype == torch.bfloat16
                    adam.initialize_state(param, in_halves)
            if part.on_host and part.held is None:
                part.hold(adam.state)

    @contextmanager
    def on_device(self, param: Tensor) -> Iterator[None]:
        """Have the state of one parameter on the device inside the block."""
        tensors = tensors_of(self._inner.state[param]) if param in self._held else []
        before = [tensor.data for tensor in tensors]
        for tensor in tensors:
            tensor.data = tensor.data.to(param.device, copy=True)
        try:
            yield
        finally:
            for tensor, memory in zip(tensors, before, strict=True):
                memory.copy_(tensor.data)
                tensor.data = memory

    def step(self) -> None:
        """Step all parts."""
        groups, stepped = self._inner.param_groups, {}
        try:
            for part in itertools.chain(self._streamed(), self._on_device):
                stepped[part.group] = {**groups[part.group], "params": part.params}
                self._inner.param_groups = [stepped[part.group]]
                self._inner.step()
        finally:
            self._inner.param_groups = groups
        for number, settings in stepped.items():
            groups[number] |= {**settings, "params": groups[number]["params"]}

    def _streamed(self) -> Iterator[Part]:
        """Yield the host's parts with their state on the device, the next one on its way there, and
        the one before on its way back."""
        if not self._on_host:
            return
        if self._on_host[-1].held is None:
            self.allocate()
        current, into, back = torch.cuda.current_stream(), self._into, self._back
        most = max(part.held.numel() for part in self._on_host)
        most += -most % 256  # each slot begins where any type may
        slots = torch.empty(SLOTS, most, dtype=torch.uint8, device=torch.cuda.current_device())
        into.wait_stream(current)
        freed: list[torch.cuda.Event] = []

        def bring(number: int) -> tuple[Tensor, torch.cuda.Event]:
            held = self._on_host[number].held
            memory = slots[number % SLOTS][: held.numel()]
            if number >= SLOTS:
                into.wait_event(freed[number - SLOTS])
            with torch.cuda.stream(into):
                memory.copy_(held, non_blocking=True)
            return memory, into.record_event()

        coming = bring(0)
        for number, part in enumerate(self._on_host):
            memory, is_there = coming
            if number + 1 < len(self._on_host):
                coming = bring(number + 1)
            current.wait_event(is_there)
            part.place(memory)
            yield part
            back.wait_stream(current)
            with torch.cuda.stream(back):
                part.held.copy_(memory, non_blocking=True)
            part.place(part.held)
            freed.append(back.record_event())
        current.wait_stream(back)


def _parts(groups: list[dict], most: int, fraction: float) -> list[Part]:
    found: list[Part] = []
    left = fraction * sum(param.numel() for group in groups for param in group["params"])
    for number, group in enumerate(groups):
        for param in group["params"]:
            kind = number, param.dtype, left > 0
            last = found[-1] if found else None
            if (
                not last
                or (last.group, last.dtype, last.on_host) != kind
                or last.size + param.numel() > most
            ):
                last = Part(*kind)
                found.append(last)
            last.params.append(param)
            last.size += param.numel()
            left -= param.numel()
    return found
