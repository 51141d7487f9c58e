# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Memory of a rank of every pipeline stage: state + activations × microbatches in flight.

The peak is at the beginning of a backward, when all activations are kept; layers' temporary tensors
are freed before. Of the data's rows, those with the largest images count.
"""

from collections.abc import Sequence

import numpy as np

from examples.mimo.common.layout import Layout
from examples.mimo.nemotron_vlm.model.part_settings import LANGUAGE
from examples.mimo.nemotron_vlm.planner.layers import RECOMPUTED, language_layer, tokens_of
from examples.mimo.nemotron_vlm.planner.parameters import chunks_of, held
from examples.mimo.nemotron_vlm.planner.plan import Plan, Stage, stages_of_pipeline

Memory = dict[str, float]
"""Bytes of a rank, by part."""


def memory_of(plan: Plan) -> list[Memory]:
    """Return the bytes of a rank of each pipeline stage, by part."""
    reserved = {"reserved": plan.task.machine.reserved_bytes}
    return [
        _state(plan, stage)
        | (_language_stage if stage.encoder is None else _encoder_stage)(plan, stage)
        | reserved
        for stage in stages_of_pipeline(plan.layouts)
    ]


def peak(plan: Plan) -> float:
    """Return the bytes of the rank that needs most."""
    return max(sum(parts.values()) for parts in memory_of(plan))


def host_memory_of(plan: Plan) -> list[Memory]:
    """Return the bytes in host memory for a rank of each stage: the optimizer's state, which is
    there between steps, and what a save copies from the GPU and from that state.

    With adapters, a checkpoint has no frozen weights.
    """
    task, hosts = plan.task, []
    for stage in stages_of_pipeline(plan.layouts):
        every, trained = _held(plan, stage)
        shard, saved = (
            _shard(plan, n) for n in (trained, trained if task.options.adapters else every)
        )
        in_save = task.state.saved * shard + task.machine.precision * saved
        hosts.append({"state": task.state.on_host * shard, "save": in_save})
    return hosts


def _held(plan: Plan, stage: Stage) -> tuple[list[float], list[float]]:
    """Return the parameters that a rank holds, and the trained parameters among them."""
    run = plan.task.options
    every = held(run.preset, plan.layouts, stage, frozenset(), run.adapters)
    return every, held(run.preset, plan.layouts, stage, run.parts.frozen, run.adapters)


def _shard(plan: Plan, numbers: Sequence[float]) -> float:
    """Return a rank's share of parameters, which `held` counts, if replicas divide them."""
    lay = plan.layouts.language
    replicas = *(each.dp for each in plan.layouts.encoders), lay.dp * lay.cp, lay.expt_dp
    return sum(number / copies for number, copies in zip(numbers, replicas, strict=True))


def _state(plan: Plan, stage: Stage) -> Memory:
    """Return the bytes of parameters, and of trained ones' gradients and optimizer's shard."""
    state, (every, trained) = plan.task.state, _held(plan, stage)
    return {
        "parameters": plan.task.machine.precision * sum(every),
        "gradients": state.gradient * sum(trained),
        "optimizer": state.optimizer * _shard(plan, trained),
    }


def _encoder_stage(plan: Plan, stage: Stage) -> Memory:
    inputs, lay = plan.encoders[stage.encoder]
    n, number = stage.number, plan.layouts.num_microbatches
    rows = min(lay.pp + plan.layouts.language.pp - n, number) * plan.rows(lay)
    kept = inputs.most_kept(lay, rows, plan.task.inert, n == 0, n == lay.pp - 1)
    return {"encoder activations": plan.task.machine.precision * kept}


def _language_stage(plan: Plan, stage: Stage) -> Memory:
    """Return a language stage's bytes, with colocated encoders' activations."""
    parts, at_once = _language_kept(plan, stage.number), plan.encoded_at_once
    if plan.layouts.non_colocated:
        return parts
    kept = min(plan.schedule.recompute or at_once, at_once)
    encoder = plan.task.machine.precision * sum(
        inputs.most_kept(own, kept * plan.rows(own), plan.task.inert)
        for inputs, own in plan.encoders
    )
    if plan.schedule.recompute:  # recomputed when the language model's are freed
        encoder = max(0.0, encoder - sum(parts.values()))
    return parts | {"encoder activations": encoder}


def _language_kept(plan: Plan, stage: int) -> Memory:
    p, lay, batch = plan.task.preset.language, plan.layouts.language, plan.layouts.batch
    width, again = plan.task.machine.precision, RECOMPUTED[plan.recompute]
    chunks, kept, running = chunks_of(p.hybrid_layer_pattern, lay)[stage :: lay.pp], {}, [0.0]
    for kind in set("".join(chunks)):
        layer = language_layer(kind, p, lay, batch)
        kept[kind] = layer.kept - layer.for_weights * (LANGUAGE in plan.task.inert)
        if kind in again:
            # Fully recomputed, a layer keeps its input; in its backward it adds the gradients of
            # an operation's inputs and outputs to what it keeps.
            whole = tokens_of(lay, batch) * p.hidden_size
            kept[kind] = whole if plan.recompute == "full" else layer.norm
            running.append(layer.kept + 2 * layer.largest)
    in_chunks, number = (
        [sum(map(kept.get, chunk)) for chunk in chunks],
        plan.layouts.num_microbatches,
    )
    logits = tokens_of(lay, batch) * p.vocab_size * (stage == lay.pp - 1)
    return {
        "language activations": width * most_in_flight(stage, lay, number, in_chunks),
        "loss": (plan.task.state.logit or 8 + width) * logits,
        "recomputed layer": width * max(running),
    }


def most_in_flight(stage: int, lay: Layout, microbatches: int, kept: list[float]) -> float:
    """Return the most elements that a stage keeps at once in Megatron's order of microbatches.

    After a warm-up of forwards, a backward follows each forward. Virtual stages take turns with
    ``pp`` microbatches each, backwards in the opposite order.

    Args:
        kept: elements that each virtual stage keeps of one microbatch.
    """
    turns = np.arange(microbatches * lay.vpp) // lay.pp % lay.vpp
    warmup = (lay.pp - stage - 1) * min(2, lay.vpp) + (lay.vpp - 1) * lay.pp
    warmup = min(warmup, len(turns) - 1)
    freed = np.cumsum([0.0, *np.flip(kept)[turns]])
    return float((np.cumsum(np.array(kept)[turns])[warmup:] - freed[: len(turns) - warmup]).max())
