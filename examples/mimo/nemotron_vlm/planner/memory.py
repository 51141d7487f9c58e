# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Memory of a rank of every pipeline stage: state + activations × microbatches in flight.

The peak is at the beginning of a backward, when all activations are kept; layers' temporary tensors
are freed before. The loss's are freed before a layer runs again. Of the data's rows, those with the
largest images count.
"""

import math

import numpy as np

from examples.mimo.common.layout import Layout
from examples.mimo.nemotron_vlm.model.part_settings import LANGUAGE
from examples.mimo.nemotron_vlm.planner.layers import RECOMPUTED, language_layer, tokens_of
from examples.mimo.nemotron_vlm.planner.parameters import chunks_of, held
from examples.mimo.nemotron_vlm.planner.plan import Plan, Stage, stages_of_pipeline


def memory_of(plan: Plan) -> dict[str, dict[str, float]]:
    """Return the bytes of a rank of each pipeline stage, by the stage's name and by part."""
    memory, task, layouts = {}, plan.task, plan.layouts
    for stage in stages_of_pipeline(layouts):
        kept = _language_kept(plan, stage.number) if stage.is_language else {}
        encoder = _encoders_kept(plan, stage)
        if plan.schedule.recompute:  # recomputed when the language model's are freed
            encoder = max(0.0, encoder - sum(kept.values()))
        state = {
            "parameters": task.machine.precision * sum(held(task, layouts, stage)),
            "gradients": task.state.gradient * sum(held(task, layouts, stage, trained=True)),
            "optimizer": task.state.optimizer * _shard(plan, stage, trained=True),
        }
        others = {"encoder activations": encoder, "reserved": task.machine.reserved_bytes}
        memory[stage.name] = state | kept | others
    return memory


def peak(plan: Plan) -> float:
    """Return the bytes of the rank that needs most."""
    return max(sum(parts.values()) for parts in memory_of(plan).values())


def host_memory_of(plan: Plan) -> list[dict[str, float]]:
    """Return the bytes in host memory for a rank of each stage: the optimizer's state, which is
    there between steps, and what a save copies from the GPU and from that state.

    With adapters, a checkpoint has no frozen weights.
    """
    task, hosts = plan.task, []
    for stage in stages_of_pipeline(plan.layouts):
        shard = _shard(plan, stage, trained=True)
        saved = shard if task.options.adapters else _shard(plan, stage, trained=False)
        in_save = task.state.saved * shard + task.machine.precision * saved
        hosts.append({"state": task.state.on_host * shard, "save": in_save})
    return hosts


def _shard(plan: Plan, stage: Stage, trained: bool) -> float:
    """Return a rank's share of the parameters that `held` counts, which replicas divide."""
    lay, numbers = plan.layouts.language, held(plan.task, plan.layouts, stage, trained)
    replicas = *(each.dp for each in plan.layouts.encoders), lay.dp * lay.cp, lay.expt_dp
    return sum(number / copies for number, copies in zip(numbers, replicas, strict=True))


def _encoders_kept(plan: Plan, stage: Stage) -> float:
    """Return the bytes of encoders' activations on a rank of a stage."""
    encoders = [plan.encoders[place] for place in stage.encoders]
    microbatches, number = min(plan.schedule.recompute or math.inf, plan.encoded_at_once), 0
    if not stage.is_language:
        ((_, own),), number = encoders, stage.number
        in_flight = own.pp + plan.layouts.language.pp - number
        microbatches = min(in_flight, plan.layouts.num_microbatches)
    return plan.task.machine.precision * sum(
        inputs.most_kept(own, microbatches * plan.rows(own), plan.task.inert, number)
        for inputs, own in encoders
    )


def _language_kept(plan: Plan, stage: int) -> dict[str, float]:
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
    in_chunks = [sum(map(kept.get, chunk)) for chunk in chunks]
    number = plan.layouts.num_microbatches
    logits = tokens_of(lay, batch) * p.vocab_size * (stage == lay.pp - 1)
    in_turn = {"loss": plan.task.state.logit * logits, "recomputed layer": width * max(running)}
    larger = max(in_turn, key=in_turn.get)
    in_flight = width * most_in_flight(stage, lay, number, in_chunks)
    return {"language activations": in_flight, larger: in_turn[larger]}


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
