# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The rules for Megatron's options in training programs of MIMO models."""

from importlib.util import find_spec
from signal import SIGTERM
from typing import Any

from examples.mimo.common.refused_options import DATA, GRAPHS, ONE_MODEL, WEIGHTS
from examples.mimo.common.rules import (
    ON_ENGINE,
    Rule,
    if_set,
    if_set_to,
    not_local,
    on_cpu,
    unless_set_to,
    value,
    with_graphs,
)
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols

POSITIONS = "a hybrid model has none, learned_absolute, rope and yarn"
NUMBERS_OF_ADAM = {"main-grads": "bf16", "main-params": "fp16"}
NUMBERS_OF_ADAM |= {"exp-avg": "bf16", "exp-avg-sq": "bf16"}
"""Numbers that only the precision-aware optimizer keeps in other types than fp32, and one such."""


LOCAL = "--device cuda --transformer-impl local"


def _weight_shards(prefix: str, size: str) -> Rule:
    option = f"--{prefix}tensor-parallel-num-weight-shards"
    return Rule(
        option,
        lambda r: value(r, option) not in (None, value(r, size)),
        ONE_MODEL,
        example=f"{option} 4",
    )


def _types_of_aware_optimizer(option: str, other: str) -> Rule:
    return Rule(
        f"{option} other than fp32",
        lambda r: (
            not r.args.use_precision_aware_optimizer
            and str(value(r, option)) not in ("fp32", "torch.float32")
        ),
        "it needs --use-precision-aware-optimizer",
        example=f"{option} {other}",
    )


def _only_predicts(run: Any) -> bool:
    return bool(getattr(run.args, "dry_run", 0) or getattr(run.args, "plan", 0))


def _balances_by(run: Any, way: str) -> bool:
    return way in run.args.moe_router_load_balancing_type


OF_MEGATRON = [
    on_cpu("--use-nccl-ub", lambda r: r.args.nccl_ub),
    on_cpu("--fp8-format", lambda r: r.args.fp8, example="--fp8-format hybrid"),
    on_cpu("--fp4-format", lambda r: r.args.fp4, example="--fp4-format e2m1"),
    on_cpu(
        "--moe-token-dispatcher-type flex", lambda r: r.args.moe_token_dispatcher_type == "flex"
    ),
    on_cpu(
        "--transformer-impl",
        lambda r: r.args.transformer_impl != "local",
        "Transformer Engine's layers need a GPU: --device cuda",
        "--transformer-impl transformer_engine",
    ),
    not_local("--window-size", lambda r: r.args.window_size is not None, "--window-size 4,0"),
    if_set_to(
        "--softmax-type learnable",
        "no rule gives its offsets initial values, and the gradient norm would have those of one "
        "TP rank alone",
    ),
    not_local(
        "--softmax-type", lambda r: r.args.softmax_type != "vanilla", "--softmax-type off-by-one"
    ),
    not_local("--qk-layernorm", lambda r: r.args.qk_layernorm),
    not_local("--moe-latent-size", lambda r: r.args.moe_latent_size, "--moe-latent-size 16"),
    not_local(
        "--cp-comm-type",
        lambda r: set(r.args.cp_comm_type) - {"p2p", "all_gather"},
        "--cp-comm-type a2a",
    ),
    Rule(
        "--use-precision-aware-optimizer",
        lambda r: (
            r.args.use_precision_aware_optimizer
            and not r.args.optimizer_cpu_offload
            and not _only_predicts(r)
            and find_spec("transformer_engine") is None
        ),
        "Transformer Engine, whose Adam it takes, is not installed",
        example=None,
    ),
    *(
        _types_of_aware_optimizer(f"--{name}-dtype", other)
        for name, other in NUMBERS_OF_ADAM.items()
    ),
    Rule(
        "--transformer-impl inference_optimized",
        lambda r: r.args.transformer_impl == "inference_optimized",
        "its layers are not trained",
        example="--device cuda --bf16 --transformer-impl inference_optimized",
    ),
    Rule("--no-initialization", lambda r: not r.args.perform_initialization, WEIGHTS),
    if_set_to(
        "--moe-flex-dispatcher-backend ncclep",
        "it needs --moe-expert-rank-capacity-factor, which is not taken either",
    ),
    Rule(
        "--fp8-recipe delayed with a pipeline",
        lambda r: (
            r.args.fp8
            and r.args.fp8_recipe == "delayed"
            and (r.layouts.non_colocated or r.layouts.language.pp > 1)
        ),
        "without groups of Megatron's own, its maxima are taken over all ranks, and those of "
        "another stage have other layers",
        "choose tensorwise, blockwise or mxfp8",
        f"{ON_ENGINE} --bf16 --fp8-format hybrid --fp8-recipe delayed --language pp=2",
    ),
    not_local("--fp8-format", lambda r: r.args.fp8, f"{LOCAL} --bf16 --fp8-format hybrid"),
    not_local("--fp4-format", lambda r: r.args.fp4, f"{LOCAL} --bf16 --fp4-format e2m1"),
    unless_set_to("--moe-layer-freq", 1, "--hybrid-layer-pattern gives the layers", "2"),
    unless_set_to("--dataloader-type", "external", DATA, "cyclic"),
    if_set_to("--cuda-graph-impl full_iteration", GRAPHS),
    if_set_to("--cuda-graph-impl transformer_engine", GRAPHS),
    on_cpu("--cuda-graph-impl local", lambda r: r.args.cuda_graph_impl == "local"),
    on_cpu(
        "--num-distributed-optimizer-instances with --overlap-grad-reduce",
        lambda r: r.args.num_distributed_optimizer_instances > 1 and r.args.overlap_grad_reduce,
        "a GPU's stream orders the sums within and between instances, and a CPU has none",
        "--num-distributed-optimizer-instances 2 --overlap-grad-reduce",
    ),
    not_local(
        "--cuda-graph-impl",
        lambda r: r.args.cuda_graph_impl == "local",
        f"{LOCAL} --cuda-graph-impl local",
    ),
    with_graphs(
        "--step-batch-size-schedule",
        lambda r: r.args.step_batch_size_schedule is not None,
        "steps run graphs of one size",
        "--step-batch-size-schedule 0:32",
    ),
    unless_set_to(
        "--optimizer", "adam", "only adam has a state that can be saved for any layout", "muon"
    ),
    unless_set_to(
        "--ckpt-format",
        "torch_dist",
        "only torch_dist saves parameters by name, for any layout",
        "torch",
    ),
    Rule(
        "--cross-entropy-loss-fusion without --bf16",
        lambda r: r.args.cross_entropy_loss_fusion and not r.args.bf16,
        "it rounds the gradients of the logits to bfloat16",
        example="--cross-entropy-loss-fusion --device cuda --fp16",
    ),
    Rule(
        "--log-straggler",
        lambda r: r.args.log_straggler and r.args.device == "cuda" and find_spec("pynvml") is None,
        "PyTorch has no temperature of a GPU without nvidia-ml-py: pip install nvidia-ml-py",
        example=None,
    ),
    Rule(
        "--wandb-project",
        lambda r: r.args.wandb_project and find_spec("wandb") is None,
        "wandb is not installed: pip install wandb",
        example=None,
    ),
    Rule(
        "--optimizer-cpu-offload with --async-save",
        lambda r: r.args.async_save and r.args.optimizer_cpu_offload,
        "training would change the state on the host while it is written",
        example=f"{LOCAL} --optimizer-cpu-offload --use-precision-aware-optimizer --async-save",
    ),
    Rule(
        "--exit-signal SIGTERM with --async-save",
        lambda r: (
            r.args.async_save and r.args.exit_signal_handler and r.args.exit_signal == SIGTERM
        ),
        "it ends the process that writes the last save, too",
        "add --exit-signal SIGUSR1",
        f"{LOCAL} --exit-signal SIGTERM --exit-signal-handler --async-save",
    ),
    if_set_to("--position-embedding-type relative", POSITIONS),
    if_set_to("--position-embedding-type mrope", POSITIONS),
    Rule(
        "--apply-layernorm-1p",
        lambda r: r.args.layernorm_zero_centered_gamma,
        "norms begin with weights of one, to which it would add one",
    ),
    Rule(
        "--moe-apply-probs-on-input",
        lambda r: r.args.moe_apply_probs_on_input and r.args.moe_router_topk > 1,
        "it needs --moe-router-topk 1",
    ),
    Rule(
        "--moe-router-load-balancing-type sinkhorn",
        lambda r: _balances_by(r, "sinkhorn"),
        "it balances the tokens of a rank's microbatch, so that the layout decides their experts",
    ),
    Rule(
        "--moe-router-load-balancing-type quantile_balancing",
        lambda r: _balances_by(r, "quantile_balancing"),
        "no rule gives the initial values of its thresholds",
    ),
    Rule(
        "--quick-geglu",
        lambda r: r.args.quick_geglu and (r.args.squared_relu or r.args.swiglu),
        "--squared-relu or --swiglu would take its place",
        "add --no-squared-relu",
    ),
    Rule(
        "--enable-ft-package",
        lambda r: r.args.enable_ft_package and find_spec("nvidia_resiliency_ext") is None,
        "nvidia-resiliency-ext, which watches the ranks, is not installed",
    ),
    _weight_shards("", "--tensor-model-parallel-size"),
    _weight_shards("expert-", "--expert-tensor-parallel-size"),
]
"""Rules for Megatron's options in every program, in the order in which they are checked."""

IN_OTHERS = [
    if_set_to(
        "--cuda-graph-impl local", "only pretrain_nemotron_vlm.py prepares its modules for graphs"
    ),
    if_set("--log-straggler", "its detector times parts of pretrain_nemotron_vlm.py's steps alone"),
    Rule(
        "--mtp-num-layers",
        lambda r: (
            r.args.mtp_num_layers or Symbols.MTP_SEPARATOR in (r.args.hybrid_layer_pattern or "")
        ),
        "only pretrain_nemotron_vlm.py has shown its loss to be the same in every layout",
    ),
]
"""Rules of other programs than pretrain_nemotron_vlm.py."""
