# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Run the encoders' forward and backward on several microbatches at once.

A *macro-batch* is a run of microbatches whose inputs go through one forward of the encoders, and
whose rows cross the bridge at once. The language model consumes the rows microbatch by microbatch:
views of them are leaves of its graph, whose gradients accumulate in one buffer. When the buffer has
the gradients of the whole macro-batch, it crosses the bridge back and the encoders run their
backward.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from megatron.core.models.mimo.bridge.bridge import Bridge
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY
from megatron.core.models.mimo.forward.encoding import bridge_rows, encode
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.partition.language_batch import packed_parameters
from megatron.core.token_layout import Moving, Route

Microbatch = dict[str, object]


class MacroBatch:
    """Encoder outputs of one macro-batch, from their forward to their backward.

    Construction runs the encoders and starts sending their rows over the bridge. It and the methods
    are collective over all ranks of the model, in this order.

    Args:
        microbatches: its microbatches, which are changed.
        recompute, skipped: as :func:`encode` takes them.
    """

    def __init__(
        self,
        model: MimoModel,
        microbatches: list[Microbatch],
        recompute: int | None,
        skipped: Collection[str] = (),
    ) -> None:
        self.microbatches, self._model = microbatches, model
        shares, plans = [], []
        for microbatch in microbatches:
            shares.append(microbatch.pop("modality_inputs", None))
            plans.append(microbatch.pop("batch_plan", None))
            packing, lengths = microbatch.get("packing_kwargs"), plans[-1] and plans[-1].lengths
            microbatch["packing_kwargs"] = packed_parameters(packing, lengths)
        input_ids = [microbatch["input_ids"] for microbatch in microbatches]
        self._made = encode(model, shares, recompute, skipped)
        self._counts: dict[str, list[int]] = {}
        self._routes: dict[str, tuple[Route, Route] | None] = {}
        self._moving: dict[str, Moving] = {}
        self._grads: dict[str, Tensor] = {}
        for name, rows in self._made.items():
            encoded, consumed, self._counts[name] = bridge_rows(model, name, rows, plans, input_ids)
            bridge, self._routes[name] = self._bridge(name), None
            if bridge is not None:
                routes = bridge.plan_routes(len(rows), encoded, consumed, rows.device)
                self._routes[name] = routes
            if self._routes[name] is not None:
                self._moving[name] = bridge.begin(rows.detach(), routes[0])

    def receive(self) -> None:
        """Wait for the rows and give each microbatch its own, on the first stage.

        Views ``[its rows, H]`` are leaves, whose gradients are views of one buffer ``[rows, H]``.
        """
        is_first = self._model.role.is_first_stage(MIMO_LANGUAGE_MODULE_KEY)
        leaves = [{} for _ in self.microbatches]
        for name, rows in self._made.items():
            whole = self._moving.pop(name).finish() if name in self._moving else rows.detach()
            if rows.requires_grad:
                self._grads[name] = torch.zeros_like(whole)
            if not is_first:
                continue
            counts = self._counts[name]  # they add up to len(whole)
            for found, leaf in zip(leaves, whole.split(counts), strict=True):
                found[name] = leaf
            if rows.requires_grad:
                for found, part in zip(leaves, self._grads[name].split(counts), strict=True):
                    found[name].requires_grad_().grad = part
        for microbatch, found in zip(self.microbatches, leaves, strict=True):
            microbatch["encoder_embeddings"] = found
        self._made = {name: self._made[name] for name in self._grads}

    def backward(self) -> None:
        """Send the rows' gradients back, after the backward of all its microbatches, and run the
        encoders' backward, if they take gradients."""
        for name in self._made:
            if self._routes[name] is not None:
                gradient, (_, back) = self._grads.pop(name), self._routes[name]
                self._moving[name] = self._bridge(name).begin(gradient, back)
        arrived = {name: moving.finish() for name, moving in self._moving.items()}
        gradients = [arrived.get(name, self._grads.get(name)) for name in self._made]
        self._moving, self._grads = {}, {}
        if gradients:
            torch.autograd.backward(list(self._made.values()), gradients)

    def _bridge(self, name: str) -> Bridge | None:
        return self._model.colocated_comms.get((name, MIMO_LANGUAGE_MODULE_KEY))
