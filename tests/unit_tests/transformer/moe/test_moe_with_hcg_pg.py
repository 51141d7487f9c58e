# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A MoE GPT that trains on the groups of a HyperCommGrid alone, against one rank's training."""

import functools
import gc
import hashlib
import re
from dataclasses import dataclass, fields, replace

import pytest
import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.sequence_parallel_norm import SequenceParallelNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.unit_tests.test_utilities import Utils, requires_world_size

WORLD = 8
STEPS = 3
GLOBAL_BATCH = 8
SEQ_LENGTH = 8
VOCAB = 32
EXPERTS = 8
# fp32 sums in another order differ by 1e-7 a step; Adam and the router amplify that over ten.
RTOL = 1e-4
# The key biases have no gradient but rounding; a smaller eps would turn that into full steps.
ADAM_EPS = 1e-5


@dataclass(frozen=True)
class Layout:
    """Degrees on the ranks of one module; dp and expert-dp are what is left of the world."""

    tp: int = 1
    ep: int = 1
    etp: int = 1
    dispatcher: str = "alltoall"
    bias: bool = False
    experts: int = EXPERTS
    ranks: int = WORLD
    micro_batch: int = 1

    @property
    def dp(self) -> int:
        return self.ranks // self.tp

    @property
    def edp(self) -> int:
        return self.ranks // (self.ep * self.etp)


ONE_RANK = Layout(ranks=1, micro_batch=GLOBAL_BATCH)
LAYOUTS = [
    Layout(2, 4, 2, "alltoall"),
    Layout(2, 8, 1, "allgather"),
    Layout(2, 2, 1, "alltoall"),
    Layout(1, 4, 1, "allgather"),
    Layout(1, 2, 2, "alltoall"),
    Layout(1, 1, 2, "allgather"),
    Layout(1, 1, 1, "alltoall"),
]
"""Each dispatcher with every tp; each expert layout once."""


def layout_id(layout: Layout) -> str:
    return f"tp{layout.tp}-ep{layout.ep}-etp{layout.etp}-{layout.dispatcher}"


def module_grid(layout: Layout) -> HyperCommGrid:
    grid = HyperCommGrid([layout.tp, 1, layout.dp, 1], ["tp", "cp", "dp", "pp"])
    grid.register_view(
        "expert",
        [layout.etp, layout.ep, layout.edp, 1],
        ["expt_tp", "ep", "expt_dp", "pp"],
        shared_dims=["pp"],
    )
    return grid


def collection_of_one_rank() -> tuple[HyperCommGrid, ProcessGroupCollection]:
    """Make a collection whose every field is a group of this rank alone, as in a one-rank run."""
    grid = HyperCommGrid([1, WORLD], ["alone", "others"])
    alone = grid.create_pg("alone")
    unused = ("hcp", "inter_dist_opt", "dp_cp_ag", "expt_dp_ag")
    names = (f.name for f in fields(ProcessGroupCollection))
    return grid, ProcessGroupCollection(**{n: None if n in unused else alone for n in names})


def model_config(layout: Layout) -> TransformerConfig:
    return TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=32,
        moe_ffn_hidden_size=16,
        num_moe_experts=layout.experts,
        moe_router_topk=2,
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=0.01,
        moe_token_dispatcher_type=layout.dispatcher,
        add_bias_linear=layout.bias,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        sequence_parallel=layout.tp > 1,
        use_cpu_initialization=Utils.device.type == "cpu",
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )


def build_model(layout: Layout, pgs: ProcessGroupCollection) -> GPTModel:
    config = model_config(layout)
    layer = get_gpt_layer_local_spec(num_experts=layout.experts, moe_grouped_gemm=False)
    norm = SequenceParallelNorm
    layer.submodules = replace(layer.submodules, input_layernorm=norm, pre_mlp_layernorm=norm)
    spec = TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=norm)
    model = GPTModel(config, spec, VOCAB, SEQ_LENGTH, pg_collection=pgs).to(Utils.device)
    model.model_type = ModelType.encoder_or_decoder
    return model


def global_name(name: str, layout: Layout, pgs: ProcessGroupCollection) -> str:
    """The name of a parameter in the one-rank model: local experts count from the first global."""
    first = pgs.ep.rank() * (layout.experts // layout.ep)
    return re.sub(
        r"local_experts\.(\d+)", lambda m: f"local_experts.{first + int(m[1])}", name
    ).removeprefix("module.")


def shard(full: torch.Tensor, name: str, param, pgs: ProcessGroupCollection) -> torch.Tensor:
    """The part of a one-rank parameter that this rank holds."""
    group = pgs.expt_tp if "local_experts" in name else pgs.tp
    if not getattr(param, "tensor_model_parallel", False) or group.size() == 1:
        return full
    return full.chunk(group.size(), dim=param.partition_dim)[group.rank()]


def initial_weight(name: str, shape: torch.Size) -> torch.Tensor:
    """Weights are a function of the global name and index, never of the rank."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.2
    return 1.0 + noise if "layernorm" in name and name.endswith("weight") else noise


def initialize(model, layout: Layout, pgs, full_shapes: dict[str, torch.Size]) -> None:
    for name, param in model.named_parameters():
        key = global_name(name, layout, pgs)
        with torch.no_grad():
            param.copy_(shard(initial_weight(key, full_shapes[key]), key, param, pgs))


def batch_of(step: int) -> torch.Tensor:
    """Tokens and labels of one global batch, `[GLOBAL_BATCH, SEQ_LENGTH + 1]`."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(VOCAB, (GLOBAL_BATCH, SEQ_LENGTH + 1), generator=generator)


def forward_step(data, model):
    tokens = next(data).to(Utils.device)
    positions = torch.arange(SEQ_LENGTH, device=tokens.device).expand(1, -1)
    future = torch.ones(SEQ_LENGTH, SEQ_LENGTH, device=tokens.device).triu(1).bool()
    losses = model(tokens[:, :-1], positions, future[None, None], labels=tokens[:, 1:])
    return losses, lambda out: (out.mean(), {"loss": out.mean().detach()})


@dataclass
class Run:
    """Loss and grad norm of each step, and the weights after the last, by their global names."""

    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, torch.Tensor]
    model: torch.nn.Module | None


def train(layout: Layout, pgs: ProcessGroupCollection, full_shapes=None, steps=STEPS) -> Run:
    parallel_state._set_global_memory_buffer()  # a scratch buffer, no group
    try:
        model_parallel_cuda_manual_seed(
            0, tp_rank=pgs.tp.rank(), ep_rank=pgs.ep.rank(), etp_rank=pgs.expt_tp.rank()
        )
        model = build_model(layout, pgs)
        if full_shapes is not None or layout.ranks == 1:
            shapes = full_shapes or {n: p.shape for n, p in model.named_parameters()}
            initialize(model, layout, pgs, shapes)
        ddp = DistributedDataParallel(
            model.config,
            DistributedDataParallelConfig(use_distributed_optimizer=True),
            model,
            pg_collection=pgs,
        )
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=5e-3,
                adam_eps=ADAM_EPS,
                clip_grad=1.0,
                use_distributed_optimizer=True,
            ),
            [ddp],
            use_gloo_process_groups=False,
            pg_collection=pgs,
        )
        local = GLOBAL_BATCH // layout.dp
        run = Run([], [], {}, ddp)
        for step in range(steps):
            ddp.zero_grad_buffer()
            optimizer.zero_grad()
            mine = batch_of(step)[pgs.dp.rank() * local :][:local]
            reduced = forward_backward_no_pipelining(
                forward_step_func=forward_step,
                data_iterator=iter(mine.split(layout.micro_batch)),
                model=ddp,
                num_microbatches=local // layout.micro_batch,
                seq_length=SEQ_LENGTH,
                micro_batch_size=layout.micro_batch,
                pg_collection=pgs,
            )
            success, grad_norm, _ = optimizer.step()
            assert success
            loss = torch.stack([r["loss"] for r in reduced]).mean()
            dist.all_reduce(loss, group=pgs.dp)
            run.losses.append(loss.item() / layout.dp)
            run.grad_norms.append(float(grad_norm))
        run.weights = {
            global_name(n, layout, pgs): p.detach().cpu() for n, p in ddp.named_parameters()
        }
        forget_last_forward(ddp)
        return run
    finally:
        parallel_state.destroy_global_memory_buffer()


def forget_last_forward(model: torch.nn.Module) -> None:
    """Drop the dispatchers, which keep the graph of the last forward.

    Its nodes hold DDP's hooks where Python's collector does not see them, so the model, and with it
    every group, would outlive the test (three threads a group under gloo).
    """
    for module in model.modules():
        if hasattr(module, "token_dispatcher"):
            module.token_dispatcher = None


@functools.lru_cache(None)
def one_rank_run(bias: bool = False) -> Run:
    """The oracle: each rank alone trains on the whole batch.

    All ranks do so because the optimizer's constructor gathers over the world.
    """
    grid, pgs = collection_of_one_rank()
    run = train(replace(ONE_RANK, bias=bias), pgs)
    grid.destroy()
    return replace(run, model=None)


def train_on_grid(layout: Layout) -> tuple[Run, Run, ProcessGroupCollection, HyperCommGrid]:
    expected = one_rank_run(layout.bias)
    grid = module_grid(layout)
    pgs = ProcessGroupCollection.from_hyper_comm_grid(grid)
    shapes = {name: weight.shape for name, weight in expected.weights.items()}
    return train(layout, pgs, shapes), expected, pgs, grid


def assert_same_training(run: Run, expected: Run, pgs: ProcessGroupCollection) -> None:
    assert run.losses == pytest.approx(expected.losses, rel=RTOL)
    assert run.grad_norms == pytest.approx(expected.grad_norms, rel=RTOL)
    params = dict(run.model.module.named_parameters())
    for (name, weight), param in zip(run.weights.items(), params.values(), strict=True):
        torch.testing.assert_close(
            weight, shard(expected.weights[name], name, param, pgs), rtol=1e-3, atol=2e-5, msg=name
        )


@requires_world_size(WORLD)
class TestMoEOnGridGroups:
    def setup_method(self, method):
        Utils.initialize_distributed()

    def teardown_method(self, method):
        assert not parallel_state.is_initialized()
        gc.collect()  # a model is a cycle; it keeps its groups

    @pytest.mark.parametrize("layout", LAYOUTS, ids=layout_id)
    def test_trains_like_one_rank(self, layout):
        """Compare loss, grad norm and every shard of the weights over the steps."""
        run, expected, pgs, grid = train_on_grid(layout)
        assert_same_training(run, expected, pgs)
        grid.destroy()

    @pytest.mark.parametrize("ep", [1, 4])
    def test_expert_biases_count_once_when_etp_differs_from_tp(self, ep):
        """An expert's output bias is not split over expert-TP, and differs on each TP rank."""
        run, expected, pgs, grid = train_on_grid(Layout(tp=2, ep=ep, etp=1, bias=True))
        assert_same_training(run, expected, pgs)
        grid.destroy()

    @pytest.mark.parametrize("experts", [8, 16])
    def test_training_makes_no_group_beyond_those_of_the_grid(self, experts):
        """The number of groups therefore does not grow with the experts."""
        layout = Layout(tp=2, ep=4, experts=experts)
        grid = module_grid(layout)
        before = len(dist.distributed_c10d._world.pg_map)
        pgs = ProcessGroupCollection.from_hyper_comm_grid(grid)
        made = len(dist.distributed_c10d._world.pg_map)
        assert made == before + 7  # this rank alone; tp; dp; dp·cp; all; ep; expt_dp
        train(layout, pgs, steps=1)
        assert len(dist.distributed_c10d._world.pg_map) == made
        grid.destroy()
