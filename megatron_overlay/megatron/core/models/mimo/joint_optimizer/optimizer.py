# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""One optimizer over all modules of a MimoModel, whichever ranks they are on.

Each module is optimized over its own process groups. All ranks of the world agree on whether there
is an inf or NaN, on the gradient norm and on the outcome of the step, so that all modules clip
alike, and step or skip alike.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from megatron.core.models.mimo import optimizer as upstream
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY
from megatron.core.models.mimo.joint_optimizer.gradients import (
    clip,
    gradients_of,
    max_over_ranks,
    of_one_type,
    square,
    total_norm,
    unscale,
)
from megatron.core.models.mimo.joint_optimizer.leaf import module_optimizer
from megatron.core.models.mimo.joint_optimizer.state import (
    leaves,
    restore_common_state,
    sharded_optimizer_state,
)
from megatron.core.optimizer import get_standard_config_overrides
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig, ParamKey
from megatron.core.optimizer_param_scheduler import ParamGroupOverride
from megatron.core.utils import unwrap_model

if TYPE_CHECKING:
    from megatron.core.models.mimo.model.base import MimoModel


class MimoOptimizer(upstream.MimoOptimizer):
    """The optimizers of all modules as one; replaces upstream's class of the same name.

    It adds one verdict on inf or NaN and on the success of a step, frozen modules, loss scales, and
    a checkpoint that fits every layout.

    Methods that say "collective" are called by every rank of the world, also by ranks on which all
    modules are frozen.

    Args:
        module_infos: optimizer and groups by module name, the same names in the same order on
            every rank.
        expert_biases: expert biases of the routers on this rank. The schedule updates them from
            the experts' loads; `launch` takes that back until the step succeeds, so that a step
            that is skipped, repeated or never taken does not move them.

    Attribute ``takes_saved_rates``: whether a checkpoint's learning rates and weight decay replace
    this run's; False by default.
    """

    def __init__(
        self,
        module_infos: dict[str, upstream.ModuleOptimizerInfo],
        config: OptimizerConfig,
        expert_biases: Sequence[torch.Tensor] = (),
    ) -> None:
        super().__init__(module_infos, config)
        self._expert_biases = [(bias, bias.clone()) for bias in expert_biases]
        self._biases_wait = False
        self._loss_scale = 1.0
        self._launched: torch.Tensor | None = None
        self._gradients: list[list[torch.Tensor]] = []
        self.takes_saved_rates = False
        self._agree_on_loss_scale()

    def get_loss_scale(self) -> torch.Tensor:
        """Return the loss scale, fp32 ``[1]`` on the device, also where nothing is trained."""
        # Filled on the device: the loop asks after each microbatch, and a copy would make it wait.
        return torch.full((1,), self._loss_scale, device=torch.cuda.current_device())

    def _gather_weights(self) -> None:
        """Give all data-parallel ranks the loaded weights; collective over each module's ranks.

        Whole master weights of a file are rounded with ties to even, but a shard that keeps halves
        rounds ties away from zero.
        """
        if self.config.use_precision_aware_optimizer:
            for stage in {id(c): c for leaf in self._leaves for c in leaf.model_chunks}.values():
                stage.start_param_sync(force_sync=True)

    def _agree_on_loss_scale(self) -> None:
        """Take the loss scale from a rank that has one; collective if loss scaling is on.

        All scalers have the same scale, as they are updated by the same verdicts.
        """
        if self.config.fp16 or self.config.loss_scale:
            scalers = [getattr(leaf, "grad_scaler", None) for leaf in self._leaves]
            own = [float(scaler.scale) for scaler in scalers if scaler is not None]
            self._loss_scale = float(max_over_ranks([max(own, default=0.0)]))

    @property
    def _optimizers(self) -> dict[str, MegatronOptimizer]:
        """The optimizers of this rank's modules that have something to train."""
        return {
            name: info.optimizer
            for name, info in self.module_infos.items()
            if info.is_active and info.optimizer is not None
        }

    @property
    def _leaves(self) -> list[MegatronOptimizer]:
        """Members of :attr:`_optimizers`' chains: one each for dense and expert parameters."""
        return [leaf for opt in self._optimizers.values() for leaf in leaves(opt)]

    @torch.no_grad()
    def launch(self) -> None:
        """Launch what a step reads of the reduced gradients: the verdict and the norm. Collective.

        `finalize_mimo_grads` calls it before the host waits for the gradients: the device works
        while the host goes through all parameters. The host waits for loss scalers alone.
        """
        if not self._biases_wait:
            self._biases_wait = True
            self._swap_biases()
        found = [unscale(leaf) for leaf in self._leaves]
        self._launched = max_over_ranks([sum(found), *self._squares()])
        own = [gradient for leaf in self._leaves for _, gradient in gradients_of(leaf)]
        self._gradients = of_one_type(own)

    def _swap_biases(self) -> None:
        """Exchange the expert biases before and after this step's update."""
        for bias, other in self._expert_biases:
            held = bias.clone()
            bias.copy_(other)
            other.copy_(held)

    def _squares(self) -> list[float | torch.Tensor]:
        """Return the squares of the modules' norms, in the order of their names; zero for others'
        modules, as each rank of a module knows its square. Collective in each module."""
        own = {name: square(optimizer) for name, optimizer in self._optimizers.items()}
        return [own.get(name, 0.0) for name in sorted(self.module_infos)]

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Unscale the gradients and return whether any rank found an inf or NaN. Collective."""
        return bool(self._read()[0])

    def _read(self) -> list[float]:
        """Wait for what `launch` has launched, and update the loss scales by the common verdict, so
        that they stay the same in all modules. Collective."""
        if self._launched is None:
            self.launch()
        numbers, self._launched = self._launched.tolist(), None
        for leaf in self._leaves:
            if getattr(leaf, "grad_scaler", None) is not None:
                leaf.grad_scaler.update(bool(numbers[0]))
        self._agree_on_loss_scale()
        return numbers

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, int | None]:
        """Clip by the global gradient norm and step every module, or none. Collective.

        Verdict and norm are those of the gradients at the last `launch` since `zero_grad`.

        Returns:
            Whether all modules stepped; the gradient norm before clipping, None if it is not
            finite; the number of zero gradients, None unless ``log_num_zeros_in_grad``. The same
            on every rank.
        """
        result = self._step()
        if result[0] and self._biases_wait:
            self._swap_biases()
        self._biases_wait = False
        return result

    def _step(self) -> tuple[bool, float | None, int | None]:
        found_inf, *squares = self._read()
        grad_norm = total_norm(squares)
        if found_inf or not math.isfinite(grad_norm):
            return False, None, None
        for gradients in self._gradients:
            clip(gradients, self.config.clip_grad, grad_norm)
        zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else None
        if grad_norm > self.config.grad_norm_skip_threshold:
            return False, grad_norm, zeros
        any_failed = bool(max_over_ranks([not self.step_with_ready_grads()]))
        return not any_failed, grad_norm, zeros

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear this rank's gradients, and note the expert biases before the step."""
        self._launched, self._gradients, self._biases_wait = None, [], False
        for bias, before in self._expert_biases:
            before.copy_(bias)
        super().zero_grad(set_to_none)

    def sharded_state_dict(
        self, model_sharded_state_dict: dict, is_loading: bool = False, **kwargs
    ) -> dict[str, dict]:
        """Return the optimizer states of this rank's modules by name, for a distributed checkpoint.

        State that a module's ranks share is saved as sharded objects of the module. Rank 0 writes
        the common part of a checkpoint, and does not hold every module.
        """
        return {
            name: sharded_optimizer_state(
                name,
                opt,
                self.module_infos[name].pg_collection,
                model_sharded_state_dict,
                is_loading,
                **kwargs,
            )
            for name, opt in self._optimizers.items()
        }

    def load_state_dict(self, state_dict: dict[str, dict | list | None]) -> None:
        """Load the result of :meth:`state_dict`, or a checkpoint of :meth:`sharded_state_dict`.

        Raises:
            ValueError: the state of a module that this rank trains is missing or has other
                parameter groups; raised before anything is loaded.
        """
        missing = [name for name in self._optimizers if not state_dict.get(name)]
        if missing:
            raise ValueError(
                f"no optimizer state of {', '.join(missing)}: the state is of "
                f"{', '.join(name for name, state in state_dict.items() if state) or 'no module'}"
            )
        for name, opt in self._optimizers.items():
            restore_common_state(name, state_dict[name], opt, self.takes_saved_rates)
        for name, opt in self._optimizers.items():
            opt.load_state_dict(state_dict[name])
            for leaf in leaves(opt):
                # Without Transformer Engine all parameters share one loaded step tensor, which
                # each of them would increment.
                for state in leaf.optimizer.state.values():
                    if "step" in state:
                        state["step"] = state["step"].clone()
        self._gather_weights()
        self._agree_on_loss_scale()


def get_mimo_optimizer(
    mimo_model: MimoModel | list[MimoModel],
    config: OptimizerConfig,
    config_overrides: dict[ParamKey, ParamGroupOverride] | None = None,
) -> MimoOptimizer:
    """Make the optimizer of a MimoModel whose modules are wrapped in DDP.

    Collective over the world; each module's groups are those it was built with. Parameters that
    don't require grad are frozen. A module whose DDP config asks for several distributed-optimizer
    instances needs a collection with the groups of as many.

    Args:
        config_overrides: settings of single parameters, as in ``get_megatron_optimizer``; the
            model's ``optimizer_overrides``, by module, take precedence. Parameter names are those
            within a module.
    """
    models = mimo_model if isinstance(mimo_model, list) else [mimo_model]
    grids = models[0].mimo_config.module_to_grid_map
    own = models[0].mimo_config.optimizer_overrides or {}
    if own and config_overrides is None:
        config_overrides = get_standard_config_overrides(config)
    infos, found = {}, []
    for name, grid in grids.items():
        infos[name] = upstream.ModuleOptimizerInfo(None, grid, None, grid.is_current_rank_in_grid())
        if infos[name].is_active:
            stages = _stages(models, name)
            infos[name].pg_collection = unwrap_model(stages[0]).pg_collection
            overrides = config_overrides
            if name in own:
                overrides = {**(config_overrides or {}), **own[name]}
            infos[name].optimizer = module_optimizer(
                config, stages, infos[name].pg_collection, overrides
            )
            found += [getattr(m, "expert_bias", None) for stage in stages for m in stage.modules()]
    optimizer = MimoOptimizer(infos, config, [bias for bias in found if bias is not None])
    models[0].optimizer = weakref.ref(optimizer)
    return optimizer


def _stages(models: list[MimoModel], name: str) -> list[torch.nn.Module]:
    if name == MIMO_LANGUAGE_MODULE_KEY:
        return [model.language_model for model in models]
    return [models[0].modality_submodules[name]]
