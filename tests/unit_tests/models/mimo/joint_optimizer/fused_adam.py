# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's FusedAdam on CPU ranks: its interface and the types of its state.

Its own methods for the whole state are refused: they would make fp32 copies of everything.
"""

import torch
from torch import Tensor

from megatron.core.models.mimo.joint_optimizer.remainders import split_masters, whole_masters


class FusedAdam(torch.optim.Optimizer):
    """AdamW with master weights in its state; kept types are bf16 and fp32.

    Whole master weights are rounded as halves are; the engine rounds ties of whole ones to even.
    """

    def __init__(
        self,
        params,
        *,
        lr,
        betas,
        eps,
        weight_decay,
        exp_avg_dtype,
        exp_avg_sq_dtype,
        store_param_remainders,
        **others,
    ):
        assert others["master_weights"] and others["use_decoupled_grad"] and others["adam_w_mode"]
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self.types = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        self.store_param_remainders = store_param_remainders

    def initialize_state(self, param: Tensor, store_param_remainders: bool) -> None:
        moments = {kind: torch.zeros_like(param, dtype=self.types[kind]) for kind in self.types}
        master = torch.zeros_like(param, dtype=torch.int16)
        if not store_param_remainders:
            master = param.detach().float().clone()
        self.state[param] = {**moments, "master_param": master}

    def get_unscaled_state(self, param: Tensor, kind: str) -> Tensor:
        state = self.state[param][kind]
        return state if state.dtype == torch.int16 else state.float()

    def set_scaled_state(self, param: Tensor, kind: str, value: Tensor) -> None:
        state = self.state[param][kind]
        assert value.dtype == (torch.int16 if state.dtype == torch.int16 else torch.float32)
        state.copy_(value)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.decoupled_grad = None

    def state_dict(self) -> dict:
        assert not any(isinstance(key, Tensor) for key in self.state)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict) -> None:
        assert not any(isinstance(key, int) for key in state_dict["state"])
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if not self.state[param]:
                    in_halves = self.store_param_remainders and param.dtype == torch.bfloat16
                    self.initialize_state(param, in_halves)
                if param.decoupled_grad is not None:
                    self._step(param, self.state[param], group)

    def _step(self, param: Tensor, state: dict[str, Tensor], group: dict) -> None:
        (first, second), kept, step = group["betas"], state["master_param"], group["step"]
        gradient = param.decoupled_grad.float()
        mean = state["exp_avg"].float().lerp_(gradient, 1 - first)
        square = state["exp_avg_sq"].float().lerp_(gradient**2, 1 - second)
        state["exp_avg"].copy_(mean)
        state["exp_avg_sq"].copy_(square)
        in_halves = kept.dtype == torch.int16
        weight = whole_masters(param, kept) if in_halves else kept
        weight = param.clone() if param.dtype == torch.float32 else weight
        size = (square / (1 - second**step)).sqrt() + group["eps"]
        weight = weight - group["lr"] * (
            mean / (1 - first**step) / size + group["weight_decay"] * weight
        )
        if param.dtype == torch.float32:
            param.copy_(weight)  # the engine's copy keeps its first value
            return
        rounded, remainder = split_masters(weight)
        param.copy_(rounded)
        kept.copy_(remainder if in_halves else weight)
