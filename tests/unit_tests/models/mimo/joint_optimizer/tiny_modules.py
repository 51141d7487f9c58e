# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Modules of a few parameters with known gradients, for tests of the optimizer alone.

A module has a weight that TP splits, a norm that TP ranks hold twice, and maybe experts. Initial
values and gradients are functions of the parameter's name and the element's place in the whole.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.mimo.config.encoder_schedule import EncoderSchedule
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.models.mimo.optimizer import MimoOptimizer, get_mimo_optimizer
from megatron.core.optimizer import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.utils import unwrap_model
from tests.unit_tests.test_utilities import Utils

IMAGES = "images"
ROWS, COLUMNS, EXPERTS = 8, 4, 4
DIMS = ["tp", "cp", "dp", "pp"]

ADAM = dict(lr=0.1, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-3, weight_decay=0.1)


@dataclass(frozen=True)
class Place:
    """Place a module by its axes' sizes and its first rank; ``ep`` 0 means without experts."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 0
    offset: int = 0
    instances: int = 1

    def grid(self) -> HyperCommGrid:
        grid = HyperCommGrid([self.tp, self.cp, self.dp, 1], DIMS, self.offset)
        if self.ep:
            grid.register_view(
                "expert",
                [1, self.ep, grid.size // self.ep, 1],
                ["expt_tp", "ep", "expt_dp", "pp"],
                shared_dims=["pp"],
            )
        return grid


def whole(name: str, kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A whole parameter's initial value or gradient; a few gradients are zero."""
    rng = torch.Generator().manual_seed(zlib.crc32(f"{kind} {name}".encode()))
    values = torch.randn(shape, generator=rng)
    return values * (values.abs() > 0.1) if kind == "gradient" else values


def shapes(module: str, experts: bool) -> dict[str, tuple[int, ...]]:
    """Whole parameters of a module, by global name."""
    found = {f"{module}.weight": (ROWS, COLUMNS), f"{module}.norm": (COLUMNS,)}
    if experts:
        found |= {f"{module}.expert{i}": (COLUMNS, 3) for i in range(EXPERTS)}
    return found


class Tiny(MegatronModule):
    """Parameters without a forward."""

    def __init__(self, name: str, place: Place, groups: ProcessGroupCollection) -> None:
        config = TransformerConfig(
            num_layers=1,
            hidden_size=COLUMNS,
            num_attention_heads=4,
            tensor_model_parallel_size=place.tp,
            context_parallel_size=place.cp,
            num_moe_experts=EXPERTS if place.ep else None,
            expert_model_parallel_size=place.ep or 1,
            expert_tensor_parallel_size=1,
            add_bias_linear=False,
            calculate_per_token_loss=True,
        )
        super().__init__(config)
        self.name, self.pg_collection = name, groups
        rows = slice(groups.tp.rank() * ROWS // place.tp, (groups.tp.rank() + 1) * ROWS // place.tp)
        self.windows: dict[str, tuple[str, slice]] = {}
        self._add("weight", f"{name}.weight", (ROWS, COLUMNS), rows)
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)
        self._add("norm", f"{name}.norm", (COLUMNS,), slice(None))
        if place.ep:
            each = EXPERTS // place.ep
            for i in range(each):
                number = groups.ep.rank() * each + i
                self._add(f"expert{i}", f"{name}.expert{number}", (COLUMNS, 3), slice(None))
                getattr(self, f"expert{i}").allreduce = False

    def _add(self, local: str, name: str, shape: tuple[int, ...], window: slice) -> None:
        part = whole(name, "value", shape)[window].clone().to(Utils.device)
        setattr(self, local, torch.nn.Parameter(part))
        self.windows[local] = (name, window)

    def parts(self) -> Iterator[tuple[torch.nn.Parameter, str, slice]]:
        """Each parameter with its whole's name and where it lies there."""
        for local, parameter in self.named_parameters():
            yield parameter, *self.windows[local]


@dataclass
class Model:
    """Stands in for a MimoModel."""

    mimo_config: SimpleNamespace
    modality_submodules: dict[str, DistributedDataParallel]
    language_model: DistributedDataParallel | None
    modules: dict[str, DistributedDataParallel] = field(default_factory=dict)

    def fill_gradients(self) -> None:
        """Give each parameter the gradient that reduction over its replicas would have given."""
        for ddp in self.modules.values():
            for parameter, name, window in unwrap_model(ddp).parts():
                if parameter.requires_grad:
                    shape = shapes(unwrap_model(ddp).name, experts=True)[name]
                    parameter.main_grad.copy_(whole(name, "gradient", shape)[window])

    def parameter(self, module: str, local: str) -> torch.nn.Parameter | None:
        """This rank's part of a parameter; None where it holds no such module."""
        ddp = self.modules.get(module)
        return None if ddp is None else getattr(unwrap_model(ddp), local)


@contextlib.contextmanager
def model_of(places: dict[str, Place], frozen: tuple[str, ...] = ()) -> Iterator[Model]:
    """Build the modules on their ranks; their groups end with the block.

    Args:
        places: by module name, the language model's included.
        frozen: global names of parameters that are not trained, or prefixes of such names.
    """
    grids = {name: place.grid() for name, place in places.items()}
    collections = {
        name: ProcessGroupCollection.from_hyper_comm_grid(grids[name], place.instances)
        for name, place in places.items()
    }
    modules = {}
    for name, place in places.items():
        if collections[name] is None:
            continue
        tiny = Tiny(name, place, collections[name]).to(Utils.device)
        for parameter, key, _ in tiny.parts():
            parameter.requires_grad_(not key.startswith(frozen or ("-",)))
        modules[name] = DistributedDataParallel(
            tiny.config,
            DistributedDataParallelConfig(
                use_distributed_optimizer=True,
                num_distributed_optimizer_instances=place.instances,
            ),
            tiny,
            pg_collection=collections[name],
        )
    yield Model(
        SimpleNamespace(
            module_to_grid_map=grids,
            encoder_schedule=EncoderSchedule(),
            optimizer_overrides=None,
        ),
        {name: module for name, module in modules.items() if name != LANGUAGE},
        modules.get(LANGUAGE),
        modules,
    )
    for grid in grids.values():
        grid.destroy()


def optimizer_of(model: Model, **options) -> MimoOptimizer:
    """Make the optimizer under test; ``options`` are fields of its configuration."""
    settings = ADAM | dict(clip_grad=1.0) | options
    config = OptimizerConfig(optimizer="adam", use_distributed_optimizer=True, **settings)
    return get_mimo_optimizer(model, config)


def initial_weights(modules: dict[str, bool]) -> dict[str, torch.Tensor]:
    """Whole parameters of modules by name; the values say whether one has experts."""
    named = {n: s for m, experts in modules.items() for n, s in shapes(m, experts).items()}
    return {name: whole(name, "value", shape) for name, shape in named.items()}


@dataclass(frozen=True)
class Expected:
    """One step on one process, by PyTorch's AdamW on whole parameters."""

    grad_norm: float
    zeros: int
    weights: dict[str, torch.Tensor]


def expected_step(
    modules: dict[str, bool],
    clip_grad: float = 1.0,
    frozen: tuple[str, ...] = (),
) -> Expected:
    """The oracle.

    Args:
        modules: by name, whether they have experts.
        frozen: as in :func:`model_of`.
    """
    parameters = {n: torch.nn.Parameter(w) for n, w in initial_weights(modules).items()}
    trained = {n: p for n, p in parameters.items() if not n.startswith(frozen or ("-",))}
    for name, parameter in trained.items():
        parameter.grad = whole(name, "gradient", tuple(parameter.shape))
    zeros = sum(int((p.grad == 0).sum()) for p in trained.values())
    clip = clip_grad or float("inf")
    norm = torch.nn.utils.clip_grad_norm_(trained.values(), clip).item()
    torch.optim.AdamW(
        trained.values(),
        lr=ADAM["lr"],
        betas=(ADAM["adam_beta1"], ADAM["adam_beta2"]),
        eps=ADAM["adam_eps"],
        weight_decay=ADAM["weight_decay"],
    ).step()
    return Expected(norm, zeros, {n: p.detach() for n, p in parameters.items()})


def assert_weights(model: Model, expected: dict[str, torch.Tensor]) -> None:
    """Assert that every part that this rank holds is its window of the expected whole."""
    for ddp in model.modules.values():
        for parameter, name, window in unwrap_model(ddp).parts():
            torch.testing.assert_close(
                parameter.detach().cpu(), expected[name][window], rtol=1e-5, atol=1e-6, msg=name
            )
