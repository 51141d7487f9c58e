# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""MimoOptimizer: colocated and non-colocated modules step like one process would."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.models.mimo.joint_optimizer.state import leaves
from tests.unit_tests.models.mimo.joint_optimizer.tiny_modules import (
    IMAGES,
    Place,
    assert_weights,
    expected_step,
    initial_weights,
    model_of,
    optimizer_of,
)
from tests.unit_tests.no_host_sync import no_host_sync
from tests.unit_tests.test_utilities import Utils, requires_world_size

SOUND = "sound"

COLOCATED = {IMAGES: Place(tp=4), LANGUAGE: Place(tp=2, dp=2, ep=2)}
COLOCATED_CP = {IMAGES: Place(tp=2, dp=2), LANGUAGE: Place(cp=2, dp=2, ep=4)}
NON_COLOCATED = {IMAGES: Place(dp=2), LANGUAGE: Place(tp=2, ep=2, offset=2)}
UNEVEN = {IMAGES: Place(), LANGUAGE: Place(cp=3, ep=1, offset=1)}
TWO_ENCODERS = {IMAGES: Place(tp=2), SOUND: Place(dp=2), LANGUAGE: Place(dp=2, ep=2, offset=2)}
PLACES = pytest.mark.parametrize(
    "places",
    [COLOCATED, COLOCATED_CP, NON_COLOCATED, UNEVEN, TWO_ENCODERS],
    ids=["colocated", "colocated-cp", "non-colocated", "uneven", "two-encoders"],
)


def experts_in(places: dict[str, Place]) -> dict[str, bool]:
    return {name: place.ep > 0 for name, place in places.items()}


def same_on_all_ranks(value) -> bool:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return all(other == value for other in values)


class OnFourRanks:
    def setup_method(self, method):
        Utils.initialize_distributed()


@requires_world_size(4)
class TestStep(OnFourRanks):
    @PLACES
    @pytest.mark.parametrize("clip_grad", [0.0, 1.0])
    def test_equals_adam_on_one_process(self, places, clip_grad):
        """Norm, zeros and clipping are global: each parameter counts once, wherever it is."""
        expected = expected_step(experts_in(places), clip_grad)
        with model_of(places) as model:
            optimizer = optimizer_of(model, clip_grad=clip_grad, log_num_zeros_in_grad=True)
            model.fill_gradients()
            stepped, grad_norm, zeros = optimizer.step()
            assert stepped
            assert grad_norm == pytest.approx(expected.grad_norm, rel=1e-6)
            assert zeros == expected.zeros > 0
            assert_weights(model, expected.weights)

    def test_above_the_threshold_of_the_norm_is_skipped_by_all(self):
        before = initial_weights(experts_in(NON_COLOCATED))
        with model_of(NON_COLOCATED) as model:
            optimizer = optimizer_of(model, grad_norm_skip_threshold=1.0)
            model.fill_gradients()
            stepped, grad_norm, _ = optimizer.step()
            assert not stepped and grad_norm > 1
            assert_weights(model, before)


@requires_world_size(4)
class TestFreezing(OnFourRanks):
    @PLACES
    @pytest.mark.parametrize(
        "frozen", [(IMAGES,), (LANGUAGE,), ("images.weight", "language.expert")], ids=str
    )
    def test_leaves_the_rest_training(self, places, frozen):
        """The norm is that of the trained parameters, also on ranks that train nothing."""
        expected = expected_step(experts_in(places), frozen=frozen)
        with model_of(places, frozen) as model:
            optimizer = optimizer_of(model)
            model.fill_gradients()
            stepped, grad_norm, _ = optimizer.step()
            assert stepped and grad_norm == pytest.approx(expected.grad_norm, rel=1e-6)
            assert_weights(model, expected.weights)

    def test_leaves_one_loss_scale_also_where_nothing_is_trained(self):
        """The language model's ranks scale the loss from which the encoder's gradients come."""
        with model_of(NON_COLOCATED, (LANGUAGE,)) as model:
            optimizer = optimizer_of(model, initial_loss_scale=4.0, hysteresis=1, fp16=True)
            assert same_on_all_ranks(optimizer.get_loss_scale().item())
            assert optimizer.get_loss_scale() == 4
            with no_host_sync():  # the loop asks after each microbatch
                optimizer.get_loss_scale()
            model.fill_gradients()
            for ddp in model.modules.values():
                ddp.scale_gradients(torch.inf)
            assert optimizer.step() == (False, None, None)
            assert optimizer.get_loss_scale() == 2
            assert same_on_all_ranks(optimizer.get_loss_scale().item())

    def test_of_all_but_one_module_leaves_no_state_of_the_others(self):
        with model_of(COLOCATED, (LANGUAGE,)) as model:
            optimizer = optimizer_of(model)
            model.fill_gradients()
            optimizer.step()
            assert set(optimizer._optimizers) == {IMAGES}
            assert optimizer.state_dict()[LANGUAGE] is None


@requires_world_size(4)
class TestBadGradients(OnFourRanks):
    @pytest.mark.parametrize(
        "places", [COLOCATED, NON_COLOCATED], ids=["colocated", "non-colocated"]
    )
    @pytest.mark.parametrize(
        ("precision", "bad"), [("fp32", torch.nan), ("fp32", torch.inf), ("fp16", torch.inf)]
    )
    @pytest.mark.parametrize(
        ("module", "parameter"),
        [(IMAGES, "weight"), (LANGUAGE, "norm"), (LANGUAGE, "expert0")],
        ids=["split", "repeated", "expert"],
    )
    def test_on_one_rank_make_all_skip(self, places, precision, module, parameter, bad):
        """The step is skipped everywhere, weights stay, and the next good step is as the first.

        The rank is the last that holds a part of the parameter; reduction has made the part bad on
        its replicas as well, but not on the other TP ranks, also of a parameter that TP repeats.
        """
        before = initial_weights(experts_in(places))
        after = expected_step(experts_in(places))
        scaling = dict(initial_loss_scale=4.0, hysteresis=1, fp16=True)
        with model_of(places) as model:
            optimizer = optimizer_of(model, **scaling if precision == "fp16" else {})
            model.fill_gradients()
            scale = optimizer.get_loss_scale().item()
            part = model.parameter(module, parameter)
            if part is not None:
                groups = model.modules[module].module.pg_collection
                replicas = groups.expt_dp if parameter == "expert0" else groups.dp_cp
                last = places[module].grid().size + places[module].offset - 1
                if last in dist.get_process_group_ranks(replicas):
                    part.main_grad.view(-1).fill_(bad)
            assert optimizer.step() == (False, None, None)
            assert_weights(model, before)
            assert same_on_all_ranks(optimizer.get_loss_scale().item())
            scales = {leaf.get_loss_scale().item() for leaf in optimizer._leaves}
            assert scales == {scale / 2 if precision == "fp16" else scale}

            model.fill_gradients()
            for ddp in model.modules.values():
                ddp.scale_gradients(optimizer.get_loss_scale().item())
            stepped, grad_norm, _ = optimizer.step()
            assert stepped and grad_norm == pytest.approx(after.grad_norm, rel=1e-6)
            assert_weights(model, after.weights)

    def test_a_failed_step_of_one_module_is_known_to_all(self, monkeypatch):
        with model_of(NON_COLOCATED) as model:
            optimizer = optimizer_of(model)
            model.fill_gradients()
            if dist.get_rank() == 3:
                (first, *_) = leaves(optimizer.module_infos[LANGUAGE].optimizer)
                monkeypatch.setattr(first, "step_with_ready_grads", lambda: False)
            stepped, _, _ = optimizer.step()
            assert not stepped


@requires_world_size(4)
class TestParameterGroups(OnFourRanks):
    def test_are_those_of_the_module_wherever_it_is(self):
        """An encoder has no groups for experts in either placement, so its state can move."""
        counts = []
        for places in (COLOCATED, NON_COLOCATED):
            with model_of(places) as model:
                optimizer = optimizer_of(model)
                images = optimizer.module_infos[IMAGES].optimizer
                counts.append([0] * 4)
                dist.all_gather_object(counts[-1], images and len(images.param_groups))
        assert counts == [[2, 2, 2, 2], [2, 2, None, None]]

    def test_state_is_keyed_by_module(self):
        with model_of(NON_COLOCATED) as model:
            optimizer = optimizer_of(model)
            model.fill_gradients()
            optimizer.step()
            own = LANGUAGE if dist.get_rank() >= 2 else IMAGES
            assert set(optimizer._optimizers) == {own}
            states = optimizer.state_dict()
            assert set(states) == {IMAGES, LANGUAGE}
            assert [name for name, state in states.items() if state] == [own]

    def test_state_of_another_module_is_refused(self):
        with model_of(COLOCATED) as model:
            optimizer = optimizer_of(model)
            with pytest.raises(ValueError, match="no optimizer state of images: .* language"):
                optimizer.load_state_dict({LANGUAGE: {"optimizer": {}}})


@requires_world_size(4)
class TestOptimizerInstances(OnFourRanks):
    @pytest.mark.parametrize(
        "places",
        [
            {IMAGES: Place(tp=2, dp=2, instances=2), LANGUAGE: Place(dp=4, ep=2, instances=2)},
            {IMAGES: Place(dp=4, instances=4), LANGUAGE: Place(cp=2, dp=2, ep=1, instances=2)},
            {IMAGES: Place(dp=2), LANGUAGE: Place(dp=2, ep=1, offset=2, instances=2)},
        ],
        ids=["tp+ep", "four", "non-colocated"],
    )
    def test_step_like_one(self, places):
        """Each rank contributes a part of the gradient, so that DDP's reduction is tested too."""
        expected = expected_step(experts_in(places))
        with model_of(places) as model:
            optimizer = optimizer_of(model)
            model.fill_gradients()
            for ddp in model.modules.values():
                groups = ddp.module.pg_collection
                for parameter, name, _ in ddp.module.parts():
                    replicas = groups.expt_dp if ".expert" in name else groups.dp_cp
                    parameter.main_grad.div_(replicas.size())
                ddp.finish_grad_sync()
            stepped, grad_norm, _ = optimizer.step()
            assert stepped and grad_norm == pytest.approx(expected.grad_norm, rel=1e-6)
            assert_weights(model, expected.weights)

    def test_hold_the_state_once_each(self):
        sizes = []
        for instances in (1, 2):
            places = {
                IMAGES: Place(dp=4, instances=instances),
                LANGUAGE: Place(dp=4, instances=instances),
            }
            with model_of(places) as model:
                optimizer = optimizer_of(model)
                model.fill_gradients()
                optimizer.step()
                states = [
                    state for leaf in optimizer._leaves for state in leaf.optimizer.state.values()
                ]
                size = torch.tensor(
                    sum(state["exp_avg"].numel() for state in states), device=Utils.device
                )
                dist.all_reduce(size)
                sizes.append(size.item())
        assert sizes[1] == 2 * sizes[0]

    def test_that_do_not_divide_the_ranks_are_refused(self):
        places = {IMAGES: Place(dp=4), LANGUAGE: replace(Place(dp=4), instances=3)}
        with pytest.raises(ValueError, match="3 optimizer instances must divide dp = 4"):
            with model_of(places):
                pass
