# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Adam's state on the host between steps, and master weights in halves, change no bit of a run.

All layers are trained, Mamba-2's rates in fp32 among bf16 weights. Adam is a stand-in for
Transformer Engine's; tests/gpu has the engine's own.
"""

import io
import itertools
from collections.abc import Callable
from functools import partial
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch.profiler import profile

from megatron.core import optimizer as factory
from megatron.core.dist_checkpointing.serialization import load
from megatron.core.models.mimo.joint_optimizer import leaf as leaf_optimizer
from megatron.core.models.mimo.joint_optimizer.remainders import (
    Masters,
    split_masters,
)
from megatron.core.optimizer import distrib_optimizer
from megatron.training import training
from tests.unit_tests.examples.nemotron_vlm.runs import trainer
from tests.unit_tests.models.mimo.joint_optimizer.fused_adam import FusedAdam
from tests.unit_tests.test_utilities import requires_world_size

OPTIONS = """--bf16 --hybrid-layer-pattern ME*E --global-batch-size 8 --micro-batch-size 2
    --lr 1e-3""".split()
SEVERAL_PARTS, WHOLE_GROUPS = 60_000, 2**40
"""Most elements that Adam steps at once."""
LAYOUTS = (
    ("--encoder", "dp=2", "--language", "dp=2,ep=2"),
    ("--encoder", "tp=2", "--language", "pp=2"),
)


@pytest.fixture
def engine(monkeypatch):
    """Return a function that chooses how Adam's state is kept, for runs that begin after it."""
    make = training.get_megatron_optimizer_config
    for module in (factory, distrib_optimizer):
        monkeypatch.setattr(module, "Adam", FusedAdam)
    monkeypatch.setattr(factory, "USING_PYTORCH_OPTIMIZER", False)
    monkeypatch.setattr(factory, "is_te_min_version", lambda _: True)
    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)
    monkeypatch.setattr(distrib_optimizer, "USING_TE_OPTIMIZER", True)

    def keep(fraction: float, in_halves=True, moments=torch.bfloat16, most=SEVERAL_PARTS):
        def config_of(args):
            config, overrides = make(args)
            config.use_precision_aware_optimizer = True
            config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
            config.store_param_remainders = in_halves
            config.exp_avg_dtype = config.exp_avg_sq_dtype = moments
            config.optimizer_cpu_offload = fraction > 0
            config.optimizer_offload_fraction = fraction or 1.0  # Megatron's default
            return config, overrides

        monkeypatch.setattr(training, "get_megatron_optimizer_config", config_of)
        monkeypatch.setattr(leaf_optimizer, "MOST", most)

    return keep


def held(run) -> float:
    """Return the share of the parameters whose state is in memory of the host."""
    parts = [part for leaf in run.optimizer._leaves for part in leaf._in_parts.parts]
    on_host = sum(part.size for part in parts if part.held is not None)
    for part in parts:
        if part.held is not None:
            assert part.held.nbytes <= SEVERAL_PARTS
            memory = part.held.untyped_storage().data_ptr()
            assert all(each.untyped_storage().data_ptr() == memory for each in part.tensors)
    return on_host / sum(part.size for part in parts)


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def state_of(run, clone: bool = True) -> list[torch.Tensor]:
    """Return what Adam keeps, but not of fp32 weights, whose copy keeps its first value; and the
    number of its steps. A copy is on the host, as parts of a run with other parts there may be."""
    groups = [group for leaf in run.optimizer._leaves for group in leaf.optimizer.param_groups]
    return [torch.tensor(group["step"]) for group in groups] + [
        tensor.to("cpu", copy=True) if clone else tensor
        for leaf in run.optimizer._leaves
        for part in leaf._in_parts.parts
        for piece in part.params
        for kind, tensor in leaf.optimizer.state[piece].items()
        if kind != "master_param" or piece.dtype != torch.float32
    ]


def weights_of(run) -> list[torch.Tensor]:
    return [p.detach().clone() for stage in run.stages for p in stage.parameters()]


@pytest.mark.parametrize(
    ("layout", "fraction", "in_halves"),
    [
        *(
            pytest.param((), fraction, in_halves, marks=requires_world_size(1))
            for fraction in (0.5, 1.0)
            for in_halves in (True, False)
        ),
        pytest.param(LAYOUTS[0], 0.5, True, marks=requires_world_size(2)),
    ],
)
def test_steps_are_those_of_a_state_on_the_device(layout, fraction, in_halves, engine):
    options = *OPTIONS, *layout
    engine(0.0, in_halves=False, most=WHOLE_GROUPS)
    with trainer(*options) as run:
        before = weights_of(run)
        losses = [run.train_step()["loss"] for _ in range(4)]
        expected = weights_of(run)
        trained = [
            not torch.equal(*pair)
            for pair in zip(before, expected, strict=True)
            if pair[0].dtype == torch.float32
        ]
        assert trained and all(trained)  # Mamba-2's rates
    engine(fraction, in_halves)
    with trainer(*options) as run:
        assert [run.train_step()["loss"] for _ in range(4)] == losses
        assert held(run) == pytest.approx(fraction, abs=0.2)
        assert state_of(run)[0] == 4  # steps, by which Adam corrects its moments
        assert equal(weights_of(run), expected)


@requires_world_size(2)
@pytest.mark.parametrize("moments", [torch.bfloat16, torch.float32], ids=str)
def test_state_keeps_its_bits_through_another_layout(moments, engine, shared_path):
    """A run saves, a run in another layout goes on and saves at once, and the first layout goes
    on from there; in between, moments are fp32 and master weights whole.

    Each master weight lies halfway between two bf16 weights. The run with whole ones has the even
    weight, and halves the one away from zero, also on ranks that have another rank's weight."""
    first, second = (shared_path / name for name in ("first", "second"))
    engine(0.5, True, moments)
    with trainer(*OPTIONS, *LAYOUTS[0]) as run:
        for _ in range(2):
            run.train_step()
        for tensor in state_of(run, clone=False):
            if tensor.dtype == torch.int16:
                tensor.fill_(-0x8000)
        run.save(first)
        expected = weights_of(run) + state_of(run)
    engine(1.0, False, torch.float32)
    with trainer(*OPTIONS, *LAYOUTS[1], "--load", str(first)) as run:
        for parameter in (p for stage in run.stages for p in stage.parameters()):
            if parameter.dtype == torch.bfloat16:
                parameter.data.view(torch.int16).bitwise_and_(-2)
        run.save(second)
    engine(0.3, True, moments)
    with trainer(*OPTIONS, *LAYOUTS[0], "--load", str(second)) as run:
        assert equal(weights_of(run) + state_of(run), expected)


def sharded_state(run, is_loading: bool) -> dict:
    metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
    model = run.stages[0].sharded_state_dict()
    return run.optimizer.sharded_state_dict(model, is_loading, metadata=metadata)


def most_added(work: Callable[[], object], *again: Callable[[], object]) -> int:
    """Return the most bytes that tensors take at once, beside what was there before.

    The least of several measurements: on a busy machine the profiler's times are out of order.
    """
    most = []
    for each in (work, *again):
        with profile(profile_memory=True) as found:
            each()
        events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
        events.sort(key=lambda event: event.start_ns())
        most.append(max(itertools.accumulate(event.nbytes() for event in events)))
    return min(most)


@requires_world_size(1)
@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_saves_and_loads_copy_no_state_on_the_device(fraction, engine, shared_path, monkeypatch):
    """A save has 8 bytes a parameter to write, and weights. A load reads them to the host, and then
    makes the state and its own copies of one parameter."""
    if not fraction:  # to the writer, master weights are on a device
        other = {"dtype": torch.float32, "device": "meta"}
        make = lambda cls, half, _: torch.Tensor._make_wrapper_subclass(cls, half.shape, **other)  # noqa: E731
        monkeypatch.setattr(Masters, "__new__", staticmethod(make))
    engine(fraction)
    with trainer(*OPTIONS) as run:
        run.train_step()
        count = sum(parameter.numel() for parameter in run.stages[0].parameters())
        # Factories number the elements of the largest parameter.
        for is_loading in (False, True):
            build = partial(sharded_state, run, is_loading=is_loading)
            assert most_added(build, build) < count
        saves = [partial(run.save, shared_path / number) for number in "12"]
        assert most_added(*saves) < (2 + 8 + 1) * count
        expected = weights_of(run) + state_of(run)
    take, added = training.load_checkpoint, []

    def load_checkpoint(*rest, **named) -> tuple[int, int]:
        result = []
        load = lambda: result.append(take(*rest, **named))  # noqa: E731
        added.append(most_added(load, load))
        return result[0]

    monkeypatch.setattr(training, "load_checkpoint", load_checkpoint)
    with trainer(*OPTIONS, "--load", str(shared_path / "2")) as run:
        assert added[0] < (2 + 8 + 6 + 1) * count
        assert equal(weights_of(run) + state_of(run), expected)


@requires_world_size(1)
def test_state_is_not_used_after_a_step_that_failed(engine, shared_path, monkeypatch):
    """Until a checkpoint is loaded. No state is left in a slot."""
    engine(1.0)
    with trainer(*OPTIONS) as run:
        run.train_step()
        run.save(shared_path)
        expected = weights_of(run) + state_of(run)
        step, parts = FusedAdam._step, []

        def fail_at_third(*rest) -> None:
            parts.append(rest)
            if len(parts) == 3:
                raise ValueError("no third")
            step(*rest)

        with monkeypatch.context() as patch, pytest.raises(ValueError, match="no third"):
            patch.setattr(FusedAdam, "_step", fail_at_third)
            run.train_step()
        assert held(run) == 1
        for use in (run.train_step, lambda: run.save(shared_path / "broken")):
            with pytest.raises(RuntimeError, match="failed in a step"):
                use()
        state = sharded_state(run, is_loading=True)
        run.optimizer.load_state_dict(load(state, str(shared_path / "iter_0000001")))
        assert equal(weights_of(run) + state_of(run), expected)
        assert not run.train_step()["skipped"]


def test_masters_are_made_when_copied_to_the_host_or_another_process():
    """Not by what a writer does before: views, and a look at where they are."""
    masters = torch.randn(12)
    weights, remainders = split_masters(masters)
    assert torch.equal(weights, masters.bfloat16())
    lazy = Masters(weights, remainders)
    part = lazy[2:8].view(2, 3).detach()
    assert isinstance(part, Masters) and part.is_contiguous() and not part.is_pinned()
    assert type(lazy[torch.tensor([1, 3])]) is Masters
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(part)
    sent = ForkingPickler.loads(buffer.getvalue())
    assert type(sent) is Masters
    for each in (part.clone(), sent.to("cpu", copy=True)):
        assert type(each) is torch.Tensor and torch.equal(each, masters[2:8].view(2, 3))
