# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Adam's state on GPUs: resumed bit for bit, in another precision, in parts and on the host."""

from pathlib import Path

import pytest
import torch

from megatron.core.models.mimo.joint_optimizer import leaf as leaf_optimizer
from megatron.core.models.mimo.joint_optimizer.remainders import whole_masters
from tests.unit_tests.examples.nemotron_vlm.loop.models import ANY_SIZE, ENGINE
from tests.unit_tests.examples.nemotron_vlm.loop.rows_on_gpus import ADAPTED_IN_16_BITS, NO_OVERLAP
from tests.unit_tests.examples.nemotron_vlm.loop.trajectories import MOST
from tests.unit_tests.examples.nemotron_vlm.runs import trainer
from tests.unit_tests.test_utilities import requires_world_size


def optimizer_state(run) -> list[torch.Tensor]:
    """Master weights, moments and step counts of this rank, in the optimizer's order."""
    found = []
    for name in sorted(run.optimizer.module_infos):
        module = run.optimizer.module_infos[name].optimizer
        for leaf in module.chained_optimizers if module else ():
            in_parts = hasattr(leaf, "_in_parts")
            for group in leaf.optimizer.param_groups:
                for parameter in group["params"]:
                    pieces = leaf._in_parts.pieces[parameter] if in_parts else [parameter]
                    states = [leaf.optimizer.state[piece] for piece in pieces]
                    # The engine counts steps by group, PyTorch by parameter.
                    count = torch.as_tensor(states[0].get("step", group.get("step")))
                    kinds = ["exp_avg", "exp_avg_sq"]
                    kinds += ["master_param"] * (parameter.dtype == torch.bfloat16)
                    # With state on the host, the moments of some pieces lie there.
                    tensors = [torch.cat([state[kind].cpu() for state in states]) for kind in kinds]
                    found += [each.detach().cpu().clone() for each in (count, parameter, *tensors)]
    return found


def all_state(run) -> list[torch.Tensor]:
    """Weights, and what `optimizer_state` returns."""
    weights = [p.detach().cpu() for stage in run.stages for p in stage.parameters()]
    return weights + optimizer_state(run)


def saved_after_two_steps(options, path: Path, look) -> tuple[list[torch.Tensor], list[float]]:
    """Save a run; return what there is to look at then, and the losses of the next two steps."""
    with trainer(*options) as run:
        for _ in range(2):
            run.train_step()
        run.save(path)
        return look(run), [run.train_step()["loss"] for _ in range(2)]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def on_one_and_two_gpus(language: str) -> pytest.MarkDecorator:
    """Run a test with ``layout``, the options of one GPU, and of two with this language layout."""
    two = ("--encoder", "dp=2", "--language", language)
    layouts = [
        pytest.param((), marks=requires_world_size(1), id="one-gpu"),
        pytest.param(two, marks=requires_world_size(2), id="two-gpus"),
    ]
    return pytest.mark.parametrize("layout", layouts)


@on_one_and_two_gpus("tp=2,ep=2,etp=1")
def test_adam_resumes_bit_for_bit(layout, shared_path):
    options = (*layout, *ENGINE, "--bf16", "--micro-batch-size", "8")
    saved, (after, _) = saved_after_two_steps(options, shared_path, optimizer_state)
    with trainer(*options, "--load", str(shared_path)) as run:
        assert len(saved) > 10 and equal(optimizer_state(run), saved)
        assert run.train_step()["loss"] == after


AWARE = ("--use-precision-aware-optimizer",)
OFFLOAD = ("--optimizer-cpu-offload", "--optimizer-offload-fraction")


def master_weights(run) -> list[torch.Tensor]:
    """Return this rank's master weights, whole, in the optimizer's order."""
    found = []
    for leaf in run.optimizer._leaves:
        for group in leaf.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.dtype == torch.bfloat16:
                    half = leaf.optimizer.state[parameter]["master_param"]
                    parameter = whole_masters(parameter, half.to(parameter.device))
                found.append(parameter.detach().clone())
    return found


@requires_world_size(1)
@pytest.mark.parametrize(("before", "after"), [(AWARE, ()), ((), AWARE)], ids=["read", "written"])
def test_master_weights_in_files_are_whole(before, after, shared_path):
    """The precision-aware optimizer keeps half of each master weight, and Megatron's keeps all."""
    options = (*ENGINE, "--bf16", "--micro-batch-size", "8")
    expected, _ = saved_after_two_steps((*options, *before), shared_path, master_weights)
    with trainer(*options, *after, "--load", str(shared_path)) as run:
        found = master_weights(run)
    assert equal(found, expected)
    assert any(not torch.equal(each, each.bfloat16().float()) for each in found)


FP8_ALL = ("--fp8-format", "hybrid", "--fp8-recipe", "tensorwise")
FP8 = (*FP8_ALL, "--fp8-parts", "encoder")
TYPES = """--use-precision-aware-optimizer --main-grads-dtype bf16 --exp-avg-dtype bf16
    --exp-avg-sq-dtype bf16""".split()


@requires_world_size(1)
@pytest.mark.parametrize(
    ("before", "after", "sizes"),
    [((), FP8, ()), (FP8, (), ANY_SIZE), ((), TYPES, ()), (TYPES, (), ())],
    ids=["to-fp8", "from-fp8-of-any-size", "to-16-bit-state", "from-16-bit-state"],
)
def test_goes_on_in_another_precision(before, after, sizes, shared_path, capsys):
    options = (*ENGINE, "--bf16", "--micro-batch-size", "8", *sizes)
    _, expected = saved_after_two_steps((*options, *before), shared_path, lambda run: [])
    with trainer(*options, *after, "--load", str(shared_path)) as run:
        assert run.step == 2
        records = [run.train_step() for _ in range(2)]
    found = [record["loss"] for record in records]
    assert not any(record["skipped"] for record in records)
    assert "another precision: " in capsys.readouterr().err
    assert found == pytest.approx(expected, rel=2 * MOST)  # FP8 in all layers: 1 % over ten steps


@on_one_and_two_gpus("tp=2,ep=2,etp=1")
def test_adapters_train_on_a_base_in_fp8_as_in_bf16(layout, record_property):
    options = (*ENGINE, "--bf16", "--micro-batch-size", "8", *ADAPTED_IN_16_BITS, *layout)

    def records(*more: str) -> list[dict]:
        with trainer(*options, *more) as run:
            return [run.train_step() for _ in range(4)]

    expected, found = records(), records(*FP8_ALL)
    pairs = list(zip(found, expected, strict=True))
    apart = {k: [abs(own[k] / other[k] - 1) for own, other in pairs] for k in ("loss", "grad_norm")}
    record_property("found", apart)
    assert found[0]["loss"] != expected[0]["loss"]
    # The first step has the same weights. Adam's first updates are as large for any gradient, so
    # rounding then moves weights as well.
    first, *later = apart["loss"]
    assert first <= 2 * MOST and max(later) <= 5 * MOST and max(apart["grad_norm"]) <= 0.1, apart


def filled_gradients(run) -> None:
    """Give each step gradients that depend on its number alone."""
    launch, parameters = run.optimizer.launch, [p for s in run.stages for p in s.parameters()]
    random = torch.Generator(parameters[0].device).manual_seed(1)

    def launch_with_gradients() -> None:
        for parameter in parameters:
            parameter.main_grad.normal_(generator=random)
        launch()

    run.optimizer.launch = launch_with_gradients


@on_one_and_two_gpus("dp=2,ep=2")
def test_state_on_the_host_changes_no_bit(layout, shared_path, monkeypatch):
    """All is trained, Mamba-2 too. Half of the state is on the host, then all after a resume.

    With overlap, a rank has other ranks' new weights in the next step only.
    """
    options = (*ENGINE, "--bf16", "--micro-batch-size", "4", *layout, *TYPES, *NO_OVERLAP)
    monkeypatch.setattr(leaf_optimizer, "MOST", 30_000)  # tens of parts

    def states(*more: str) -> list[list[torch.Tensor]]:
        found = []
        with trainer(*options, *more) as run:
            filled_gradients(run)
            for _ in range(3):
                assert not run.train_step()["skipped"]
                found.append(all_state(run))
            parts = [part for leaf in run.optimizer._leaves for part in leaf._in_parts.parts]
            held = [part.held is not None and part.held.is_pinned() for part in parts]
            assert any(held) == bool(more) and len(held) > 10 and not all(held)
            if more:
                run.save(shared_path)
        return found

    expected, found = states(), states(*OFFLOAD, "0.5")
    assert all(map(equal, found, expected)) and len(found) == 3
    with trainer(*options, *OFFLOAD, "1", "--load", str(shared_path)) as run:
        assert equal(all_state(run), expected[-1])
        assert not run.train_step()["skipped"]


@requires_world_size(1)
@pytest.mark.parametrize("types", [[], TYPES], ids=["fp32-state", "16-bit-state"])
def test_kept_slices_and_steps_in_parts_change_no_bit(types, monkeypatch):
    """By Transformer Engine's Adam, and its copies of several types."""

    def state_after_steps() -> list[torch.Tensor]:
        with trainer(*ENGINE, "--bf16", "--micro-batch-size", "8", *types) as run:
            filled_gradients(run)
            assert not any(run.train_step()["skipped"] for _ in range(3))
            return all_state(run)

    monkeypatch.setattr(leaf_optimizer, "MOST", 100_000)
    found = state_after_steps()
    monkeypatch.setattr(leaf_optimizer, "MOST", 1 << 60)
    monkeypatch.setattr(leaf_optimizer.LeafOptimizer, "keeps_slices", False)
    expected = state_after_steps()
    assert len(found) > 10 and equal(found, expected)
