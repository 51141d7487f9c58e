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
from contextlib import closing, contextmanager
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
    """Pieces of one group's parameters that are stepped together, of one type.

    Attributes:
        size: elements of the pieces.
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

    A part has at most ``most`` elements. All parts of a group have the group's settings and number
    of steps.

    Args:
        fraction: how much of the parameters has its state on the host; FusedAdam alone.

    Attributes:
        pieces: what has a state: a parameter, or views of ``most`` elements and a rest of a larger
            one. FP8 and fp16 state has a scale for each piece.
        is_whole: False from a step's or load's beginning to its end, and after one that failed.
    """

    def __init__(self, inner: torch.optim.Optimizer, most: int, fraction: float = 0.0) -> None:
        self._inner, self.is_whole = inner, True
        params = [param for group in inner.param_groups for param in group["params"]]
        self._cut = {p: p.detach().view(-1).split(most) for p in params if p.numel() > most}
        self.pieces = {param: self._cut.get(param, (param,)) for param in params}
        self.parts = _parts(inner.param_groups, self.pieces, most, fraction)
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
            for piece in part.params:
                if not adam.state[piece]:
                    in_halves = adam.store_param_remainders and piece.dtype == torch.bfloat16
                    adam.initialize_state(piece, in_halves)
            if part.on_host and part.held is None:
                part.hold(adam.state)

    @contextmanager
    def on_device(self, piece: Tensor) -> Iterator[None]:
        """Have the state of one piece on the device inside the block."""
        tensors = tensors_of(self._inner.state[piece]) if piece in self._held else []
        before = [tensor.data for tensor in tensors]
        for tensor in tensors:
            tensor.data = tensor.data.to(piece.device, copy=True)
        try:
            yield
        finally:
            for tensor, memory in zip(tensors, before, strict=True):
                memory.copy_(tensor.data)
                tensor.data = memory

    def check(self) -> None:
        """Raise RuntimeError if a step or load has failed."""
        if not self.is_whole:
            raise RuntimeError(
                "the optimizer failed in a step or load, and is of two states: load a checkpoint"
            )

    def step(self) -> None:
        """Step all parts, after a `check`."""
        self.check()
        self.is_whole = False
        for param, pieces in self._cut.items():
            name = "decoupled_grad" if hasattr(param, "decoupled_grad") else "grad"
            gradients = getattr(param, name).view(-1).split(len(pieces[0]))
            for piece, gradient in zip(pieces, gradients, strict=True):
                setattr(piece, name, gradient)
        groups, stepped = self._inner.param_groups, {}
        try:
            with closing(self._streamed()) as streamed:
                for part in itertools.chain(streamed, self._on_device):
                    stepped[part.group] = {**groups[part.group], "params": part.params}
                    self._inner.param_groups = [stepped[part.group]]
                    self._inner.step()
        finally:
            self._inner.param_groups = groups
        for number, settings in stepped.items():
            groups[number] |= {**settings, "params": groups[number]["params"]}
        self.is_whole = True

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
        try:
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
        finally:
            part.place(part.held)  # a step that failed leaves its part in a slot
            current.wait_stream(into)
            current.wait_stream(back)


def _parts(
    groups: list[dict], pieces: dict[Tensor, tuple[Tensor, ...]], most: int, fraction: float
) -> list[Part]:
    found: list[Part] = []
    left = fraction * sum(param.numel() for param in pieces)
    for number, group in enumerate(groups):
        for piece in itertools.chain.from_iterable(pieces[param] for param in group["params"]):
            kind = number, piece.dtype, left > 0
            last = found[-1] if found else None
            if (
                not last
                or (last.group, last.dtype, last.on_host) != kind
                or last.size + piece.numel() > most
            ):
                last = Part(*kind)
                found.append(last)
            last.params.append(piece)
            last.size += piece.numel()
            left -= piece.numel()
    return found
