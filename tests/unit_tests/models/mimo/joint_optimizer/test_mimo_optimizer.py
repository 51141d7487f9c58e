# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Modules on different ranks agree before they step; rows.py has the steps by themselves."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.models.mimo.joint_optimizer import gradients, leaf, optimizer
from megatron.core.models.mimo.joint_optimizer.state import leaves
from megatron.core.models.mimo.schedule import grad_finalization
from megatron.core.optimizer import clip_grads
from megatron.core.utils import unwrap_model
from tests.unit_tests.examples.nemotron_vlm.loop.rows import APART, FLAT
from tests.unit_tests.examples.nemotron_vlm.runs import SMALL, Trainer, trainer
from tests.unit_tests.models.mimo.weights import assert_shards_equal, gather_weights
from tests.unit_tests.no_host_sync import no_host_sync
from tests.unit_tests.test_utilities import requires_world_size

IMAGES = "images"
FP16 = ("--fp16", "--initial-loss-scale", "8", "--hysteresis", "1")
COLOCATED = ("tp=4", FLAT, ())
NON_COLOCATED = ("tp=2", "tp=2,dp=1,ep=2,etp=1", APART)

pytestmark = requires_world_size(4)


def run_of(layout: tuple[str, str, tuple[str, ...]], *options: str):
    encoder, language, more = layout
    return trainer(*SMALL, "--encoder", encoder, "--language", language, *more, *options)


def on_all_ranks(value) -> list:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def step(run: Trainer) -> list[tuple[bool, float | None, int | None]]:
    """Take a step; what the optimizer returns on each rank: the record is the last rank's alone."""
    joint, found = run.optimizer, []
    take = joint.step
    joint.step = lambda: found.append(take()) or found[-1]
    run.train_step()
    del joint.step
    return on_all_ranks(found[0])


def scales(run: Trainer) -> set[float]:
    """Loss scales of the optimizer and of its members on all ranks."""
    own = [each.get_loss_scale().item() for each in run.optimizer._leaves]
    return set().union(*on_all_ranks({run.optimizer.get_loss_scale().item(), *own}))


def kind_of(parameter: torch.nn.Parameter) -> str:
    if not getattr(parameter, "allreduce", True):
        return "expert"
    return "split" if getattr(parameter, "tensor_model_parallel", False) else "repeated"


def spoil(run: Trainer, module: str, kind: str, bad: float) -> None:
    """Make a gradient bad on the last rank that holds a parameter of the kind.

    Reduction would make it bad on the parameter's replicas as well, but not on the other TP ranks,
    also of a parameter that TP repeats.
    """
    stage, grid = run.stages[0], run.session.modules[module].grid
    if not grid.is_current_rank_in_grid():
        return
    ddp = stage.language_model if module == LANGUAGE else stage.modality_submodules[module]
    groups = unwrap_model(ddp).pg_collection
    replicas = groups.expt_dp if kind == "expert" else groups.dp_cp
    if grid.rank_offset + grid.size - 1 in dist.get_process_group_ranks(replicas):
        next(p for p in ddp.parameters() if kind_of(p) == kind).main_grad.fill_(bad)


class TestBadGradients:
    @pytest.mark.parametrize(
        ("layout", "options", "bad", "module", "kind"),
        [
            (NON_COLOCATED, (), torch.nan, LANGUAGE, "repeated"),
            (NON_COLOCATED, (), torch.inf, LANGUAGE, "expert"),
            (COLOCATED, (), torch.nan, IMAGES, "split"),
            (NON_COLOCATED, FP16, torch.inf, IMAGES, "split"),
            (COLOCATED, FP16, torch.inf, LANGUAGE, "repeated"),
        ],
    )
    def test_on_one_rank_make_all_skip(self, layout, options, bad, module, kind, monkeypatch):
        """Weights and expert biases stay, and the next good step is taken by all."""
        with run_of(layout, *options) as run:
            before, launch = gather_weights(run.stages), run.optimizer.launch
            assert any(key.endswith("expert_bias") for key in before)
            (scale,) = scales(run)

            def launch_with_bad():
                spoil(run, module, kind, bad)
                launch()

            with monkeypatch.context() as patch:
                patch.setattr(run.optimizer, "launch", launch_with_bad)
                assert step(run) == [(False, None, None)] * 4
            assert_shards_equal(run.stages, before)
            assert scales(run) == {scale / 2 if options else scale}
            assert all(stepped for stepped, *_ in step(run))

    def test_a_failed_step_of_one_module_and_a_norm_above_the_threshold_are_known_to_all(
        self, monkeypatch
    ):
        with run_of(NON_COLOCATED) as run:
            run.optimizer.config.grad_norm_skip_threshold = 1e-3
            before, results = gather_weights(run.stages), step(run)
            assert not results[0][0] and results[0][1] > 1e-3
            assert results == results[:1] * 4
            assert_shards_equal(run.stages, before)
            run.optimizer.config.grad_norm_skip_threshold = torch.inf
            if dist.get_rank() == 3:
                (first, *_) = leaves(run.optimizer.module_infos[LANGUAGE].optimizer)
                monkeypatch.setattr(first, "step_with_ready_grads", lambda: False)
            assert not any(stepped for stepped, *_ in step(run))


def test_a_step_launches_the_norm_before_the_host_waits_for_the_gradients(monkeypatch):
    """Else the device idles while the host goes through all parameters."""
    launched = []
    with run_of(COLOCATED) as run:
        is_launched = lambda _: launched.append(run.optimizer._launched is not None)  # noqa: E731
        monkeypatch.setattr(grad_finalization, "check_step", is_launched)
        assert step(run)[0][0]
    assert launched == [True]


def test_norm_and_zeros_are_counted_once_wherever_parameters_are():
    """The step has clipped the gradients of all modules by their common norm."""
    results, clip = [], ("--clip-grad", "0.1")
    for layout in (COLOCATED, NON_COLOCATED):  # of one TP size, with which the vocabulary is padded
        with run_of(layout, "--log-num-zeros-in-grad", *clip) as run:
            results += step(run)
            assert run.optimizer.get_grad_norm() == pytest.approx(0.1, rel=1e-4)
    _, norm, zeros = results[0]
    assert zeros > 0 and norm > 0.2
    alike = pytest.approx(zeros, rel=1e-3)  # a few are zeros by rounding
    assert results == [(True, pytest.approx(norm, rel=1e-4), alike)] * 8


def test_one_loss_scale_also_where_nothing_is_trained():
    """The language model's ranks scale the loss from which the encoder's gradients come."""
    with run_of(NON_COLOCATED, "--freeze", "language", *FP16) as run:
        assert scales(run) == {8}
        with no_host_sync():  # the loop asks after each microbatch
            run.optimizer.get_loss_scale()


def test_optimizer_instances_hold_the_state_once_each_and_none_of_other_modules():
    sizes = []
    for count in ("1", "2"):
        options = ("--num-distributed-optimizer-instances", count)
        with run_of(("dp=4", "dp=4", ()), *options) as run:
            run.train_step()
            states = [s for each in run.optimizer._leaves for s in each.optimizer.state.values()]
            sizes.append(sum(on_all_ranks(sum(state["exp_avg"].numel() for state in states))))
            with pytest.raises(ValueError, match="no optimizer state of images: .* language"):
                run.optimizer.load_state_dict({LANGUAGE: {"optimizer": {}}})
    assert sizes[1] == 2 * sizes[0]


SKIPS = (*FP16, "--accumulate-allreduce-grads-in-fp32", "--initial-loss-scale", "4096")


def weights_after_steps(*options: str) -> tuple[list[torch.Tensor], list[float | None], bool]:
    """Return this rank's weights, the gradient norms, and whether all slices were kept."""
    with run_of(("dp=4", "tp=2,dp=2,ep=2,etp=1", ()), *options) as run:
        norms = [run.train_step()["grad_norm"] for _ in range(3)]
        weights = [p.detach().clone() for stage in run.stages for p in stage.parameters()]
        parts = run.optimizer._leaves
        copies = [copy for each in parts for copy in getattr(each, "_weights", None) or []]
        for destinations, sources in copies:
            assert len({to.dtype for to in destinations}) == len({of.dtype for of in sources}) == 1
        return weights, norms, all(getattr(each, "_gradients", None) for each in parts)


@pytest.mark.parametrize(
    ("options", "is_kept"),
    [
        (("--bf16",), True),
        (SKIPS, True),
        (("--bf16", "--grad-reduce-in-bf16"), False),
    ],
    ids=["bf16", "fp16-with-a-skipped-step", "bf16-sums"],
)
def test_weights_are_those_of_upstreams_transfers(options, is_kept, monkeypatch):
    weights, norms, was_kept = weights_after_steps(*options)
    monkeypatch.setattr(leaf.LeafOptimizer, "keeps_slices", False)
    expected, expected_norms, _ = weights_after_steps(*options)
    assert norms == expected_norms and was_kept == is_kept
    assert all(torch.equal(own, other) for own, other in zip(weights, expected, strict=True))


@pytest.mark.parametrize(("is_aware", "name"), [(False, "grad"), (True, "decoupled_grad")])
def test_a_bad_gradient_of_a_repeated_parameter_is_found_wherever_it_is_kept(is_aware, name):
    """The precision-aware optimizer has gradients of other types than its parameters."""
    parameter = torch.nn.Parameter(torch.ones(2))
    stub = SimpleNamespace(
        prepare_grads=lambda: False,
        get_parameters=lambda: [parameter],
        tp_group=SimpleNamespace(rank=lambda: 1),
        config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=is_aware),
    )
    setattr(parameter, name, torch.ones(2))
    assert not gradients.unscale(stub)
    setattr(parameter, name, torch.tensor([1, torch.nan]))
    assert gradients.unscale(stub)


def norm_in_the_type_of_the_first(_chunk, _overflow, lists, _per_tensor):
    """Read gradients as Transformer Engine's kernel does."""
    read = [each.view(lists[0][0].dtype)[: len(each)].float() for each in lists[0]]
    return torch.cat(read).norm().view(1), None


@requires_world_size(1)
def test_the_norm_is_that_of_gradients_of_several_types(monkeypatch):
    """Mamba-2's rates are fp32 in a model in bfloat16."""
    found = [torch.full((4,), 2.0, dtype=torch.bfloat16), torch.full((3,), 1 / 3)]
    stub = SimpleNamespace(
        get_grads_for_grad_norm=lambda: found, get_grad_stats_parallel_group=lambda: None
    )
    monkeypatch.setattr(clip_grads, "l2_norm_impl", norm_in_the_type_of_the_first)
    with trainer():  # for its process groups
        square = gradients.square(stub)
    assert square.item() == pytest.approx(16 + 1 / 3, rel=1e-6)


@requires_world_size(1)
def test_gradients_of_several_types_are_clipped_type_by_type(monkeypatch):
    types, mixed = [], [torch.ones(2, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    monkeypatch.setattr(optimizer, "gradients_of", lambda _: [(None, each) for each in mixed])
    monkeypatch.setattr(
        optimizer, "clip", lambda found, *_: types.append({each.dtype for each in found})
    )
    with trainer() as run:
        run.train_step()
    assert types == [{torch.bfloat16}, {torch.float32}]
