# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Run a colocated MimoModel's encoders, and send their output to the language model's ranks.

Both steps take one or more microbatches, which the language model then consumes one by one.
"""

import contextlib
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from megatron.core import tensor_parallel
from megatron.core.models.mimo.bridge.batch_plan import BatchPlan, BridgeRows, planned_rows
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY
from megatron.core.models.mimo.forward.random_states import RandomStates
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model

ModalityInputs = dict[str, dict[str, dict[str, object]] | None]
"""Keyword arguments by modality and encoder; None for a modality without input."""


def encode(
    model: MegatronModule,
    shares: Sequence[ModalityInputs | None],
    recompute: int | None = None,
    skipped: Collection[str] = (),
) -> dict[str, Tensor]:
    """Run every modality's encoders on this rank's part of the batch, the last modality's first.

    Images come first in a model, and have most of the work. The GPU is busy with them, before the
    others' forward and again before their backward, while the host starts the others' kernels.

    Args:
        shares: inputs in batch order; tensors and arrays are concatenated along the first dim.
        recompute: keep no activations; in the backward run the encoders again, this many shares at
            a time. ``None`` keeps them.
        skipped: modalities that are not run where they have no input.

    Returns:
        Rows ``[rows, H]`` by modality, for a bridge in the dtype of the language model's
        parameters. A modality without input has 0 rows if it has a bridge, and is left out
        otherwise. Rows require grad on all ranks or on none.

    Raises:
        ValueError: shares give an encoder different arguments, or different values of an argument
            that is not a tensor.
    """
    step = recompute or max(len(shares), 1)
    merged = [_merged(shares[i : i + step]) for i in range(0, len(shares), step)]
    rows = {}
    for name, submodule in reversed(model.modality_submodules.items()):
        trained = any(p.requires_grad for p in submodule.parameters())
        bridged = (name, MIMO_LANGUAGE_MODULE_KEY) in model.colocated_comms
        with _own_random_states(model, name):
            parts = [
                _encode_part(submodule, inputs[name], bool(recompute) and trained)
                for inputs in merged
                if inputs.get(name) is not None
                and not (name in skipped and _is_empty(inputs[name]))
            ]
        parts = [part for part in parts if part is not None]
        if not parts and not bridged:
            continue
        parts = parts or [model._empty_encoder_output(name).detach()]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        if bridged:  # all ranks send and receive one dtype, those without rows too
            joined = joined.to(model.config.params_dtype)
        rows[name] = joined.requires_grad_() if trained and torch.is_grad_enabled() else joined
    return rows


def communicate(
    model: MegatronModule, rows: dict[str, Tensor], input_ids: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Send rows of a batch without a plan to the language model's ranks; differentiable.

    Collective over all ranks of the model, including those without a row.

    Args:
        rows: the result of :func:`encode` for this rank's whole share.
        input_ids: as :func:`bridge_rows` takes them.

    Returns:
        Rows ``[rows consumed, H]`` by modality; 0 rows on later stages. Rows of a modality without
        a bridge are returned as they are.
    """
    moved = dict(rows)
    for name, tensor in rows.items():
        if bridge := model.colocated_comms.get((name, MIMO_LANGUAGE_MODULE_KEY)):
            encoded, consumed, _ = bridge_rows(model, name, tensor, [], input_ids)
            moved[name] = bridge.communicate(tensor, encoded, consumed)
    return moved


def bridge_rows(
    model: MegatronModule,
    name: str,
    rows: Tensor,
    plans: Sequence[BatchPlan | None],
    input_ids: Sequence[Tensor],
) -> BridgeRows:
    """Return the rows of modality ``name`` by which its bridge routes.

    Args:
        rows: ``[n, H]``, the modality's rows that this rank has encoded.
        plans: those of all microbatches whose rows cross the bridge at once. Without them every
            sample must have as many rows as any other, which the ranks tell each other; the
            gradients of all CP ranks are then added, and the host waits for the device.
        input_ids: ``[B, S]`` of the same microbatches, read only without plans; without either,
            nothing is checked.

    Raises:
        ValueError: without plans, samples have different numbers of rows; on all ranks alike.
    """
    if plans and None not in plans:
        return planned_rows(plans, name)
    token_id = model.special_token_ids[name]
    found = [(ids == token_id).sum() for ids in input_ids]
    counts = torch.stack(found).tolist() if found else []
    bridge = model.colocated_comms.get((name, MIMO_LANGUAGE_MODULE_KEY))
    if bridge is None:
        return BridgeRows(None, None, counts)
    if input_ids:
        bridge.check_equal(len(rows), sum(counts), rows.device)
    return BridgeRows(*bridge.equal_rows(len(rows)), counts)


def forward_all_modules(
    model: MegatronModule,
    embeddings: dict[str, Tensor] | None,
    input_ids: Tensor,
    position_ids: Tensor | None,
    attention_mask: None,
    loss_mask: Tensor | None,
    labels: Tensor | None,
    modality_inputs: ModalityInputs | None,
    packing: object = None,
) -> tuple[Tensor, Tensor | None]:
    """Run the forward of a colocated rank's stage: of the encoders too, on the first stage.

    Args:
        embeddings: what ``encode_and_communicate`` returned; then nothing is encoded.
    """
    if not model.role.is_first_stage(MIMO_LANGUAGE_MODULE_KEY):
        inputs = {MIMO_LANGUAGE_MODULE_KEY: model.input_tensors}
    elif embeddings is None:
        inputs = model.encode_and_communicate(modality_inputs, input_ids)
    else:
        inputs = embeddings
    return model._forward_language_module(
        input_ids, position_ids, None, loss_mask, labels, inputs, packing
    )


def note_split_sizes(
    model: MegatronModule, rows: Tensor, input_ids: Tensor | None, name: str
) -> None:
    """Note how many rows each sample has, for the bridge between modules on ranks of their own.

    Upstream's method refuses more encoder DP ranks than language DP ranks, which work here.
    """
    token_id = model.special_token_ids.get(name)
    if rows.ndim != 2 or input_ids is None or len(input_ids) == 1 or token_id is None:
        return
    sizes = (input_ids == token_id).sum(dim=1).tolist()
    if len(set(sizes)) > 1 and sum(sizes) == len(rows):  # equal ones are split alike without
        rows._mimo_bridge_split_sizes = sizes


def run_microbatch(
    model: MegatronModule, microbatch: dict[str, object]
) -> tuple[Tensor | dict[str, Tensor], Tensor | None]:
    """Run the forward of one microbatch, in any placement and schedule.

    Returns:
        MimoModel's output (losses or logits, or the next stage's input) and the loss mask.
    """
    output, loss_mask = model(**microbatch)
    if torch.is_grad_enabled() and isinstance(output, dict):
        for rows in output.values():
            if not rows.requires_grad:
                rows.requires_grad_()  # the pipeline sends a gradient to a frozen encoder too
    return output, loss_mask


def _own_random_states(model: MegatronModule, name: str) -> contextlib.AbstractContextManager:
    """Return the context in which a modality with a bridge draws from random states of its own.

    Without a bridge, or without a seeded RNG tracker, it changes nothing.
    """
    bridged = (name, MIMO_LANGUAGE_MODULE_KEY) in model.colocated_comms
    if not (bridged and get_cuda_rng_tracker().is_initialized()):
        return contextlib.nullcontext()
    if name not in model.random_states:
        groups = unwrap_model(model.modality_submodules[name]).pg_collection
        model.random_states[name] = RandomStates(name, groups)
    return model.random_states[name].in_use()


def _is_empty(inputs: dict[str, dict[str, object]]) -> bool:
    return not any(len(value) for given in inputs.values() for value in given.values())


def _encode_part(submodule, inputs: dict[str, dict[str, object]], recompute: bool) -> Tensor:
    if not (recompute and torch.is_grad_enabled()):
        return submodule(encoder_inputs=inputs)
    anchor = torch.empty(0, requires_grad=True)  # without a differentiable input: no backward
    return tensor_parallel.checkpoint(lambda _: submodule(encoder_inputs=inputs), False, anchor)


def _merged(shares: Sequence[ModalityInputs | None]) -> ModalityInputs:
    """Join the inputs of all shares by modality; a share may have none of a modality."""
    found: dict[str, list] = {}
    for share in shares:
        for name, inputs in (share or {}).items():
            if inputs is not None:
                found.setdefault(name, []).append(inputs)
    return {name: _joined(inputs, name) for name, inputs in found.items()}


def _joined(values: list, what: str):
    """Concatenate tensors and arrays, join dicts by key, and keep other values if all are equal."""
    first = values[0]
    if len(values) == 1:
        return first
    if isinstance(first, dict):
        if any(value.keys() != first.keys() for value in values):
            raise ValueError(f"the microbatches give {what} different arguments")
        return {key: _joined([value[key] for value in values], f"{what}.{key}") for key in first}
    if isinstance(first, Tensor):
        return torch.cat(values)
    if isinstance(first, np.ndarray):
        return np.concatenate(values)
    if any(value != first for value in values):
        raise ValueError(f"the microbatches give {what} different values, and no tensors")
    return first
