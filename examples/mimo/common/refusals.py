# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Megatron's options that training programs of MIMO models refuse, and the reasons."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from signal import SIGTERM
from typing import NamedTuple

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import COLOCATED
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols

ONE_MODEL = "it knows one model on one grid, and this one has a grid for each module"
DATA = "--data gives the samples"
GRAPHS = "only --cuda-graph-impl local captures layers of several modules"
POSITIONS = "a hybrid model has none, learned_absolute, rope and yarn"
WEIGHTS = (
    "initial weights follow from the seed and each parameter's name, so that no layout changes them"
)
ENGINE = "it needs --transformer-impl transformer_engine"
GPU = "it needs a GPU: --device cuda"

WHEREVER_SET = {
    ONE_MODEL: """
        --use-megatron-fsdp --use-torch-fsdp2 --log-params-norm --qk-clip --log-max-attention-logit
        --check-weight-hash-across-dp-replicas-interval --gpu-sniff-test-interval
        --moe-use-upcycling --save-wgrads-interval --save-dgrads-interval --save-params-interval
        --save-activations-interval --save-tokens-per-expert-interval --use-tp-pp-dp-mapping
        --overlap-param-gather-with-optimizer-step --reuse-grad-buf-for-mxfp8-param-ag
        --hybrid-context-parallel --hierarchical-context-parallel-sizes --tp-comm-overlap
        --iterations-to-skip --result-rejected-tracker-filename --logits-save-dir --logits-load-dir
        --dump-param-to-param-group-map --config-logger-dir --fsdp-manual-registration
        --tp-only-amax-red""",
    "--hybrid-layer-pattern gives the layers": """
        --linear-attention-freq --experimental-attention-variant
        --heterogeneous-layers-config-path --heterogeneous-layers-config-encoded-json""",
    "no layer of a hybrid model reads it": """
        --cpu-offloading-num-layers --apply-residual-connection-post-layernorm
        --use-grouped-gemm-for-dense-mlp""",
    "--recompute-granularity has taken its place": "--checkpoint-activations",
    "it calls pretrain() again, before which groups are made; torchrun --max-restarts works": """
        --inprocess-restart""",
    "it asks a scheduler of NVIDIA's own cluster": "--adlr-autoresume",
    "it looks for the layers of one model": """
        --moe-expert-rank-capacity-factor --moe-paged-stash""",
    "the norm of all modules' gradients is read on the host in each step": "--optimizer-cuda-graph",
    "it exchanges tokens in Megatron's own TP group, not its module's": """
        --use-grouped-gemm-for-shared-expert""",
    "tensor parallelism brings sequence parallelism, which all-reduces no activations": """
        --symmetric-ar-type""",
    "process groups are made from the modules' grids": """
        --nccl-communicator-config-path --use-sharp --sharp-enabled-group --lazy-mpu-init
        --high-priority-stream-groups --create-all-gather-group --fake-process-group""",
    WEIGHTS: """
        --data-parallel-random-init --init-method-xavier-uniform --init-model-with-meta-device
        --embedding-init-method-std --use-mup --fp8-param-gather --fp4-param-gather""",
    "no layer here has latent keys and values": "--multi-latent-attention",
    "it is another training loop": "--perform-rl-step --vision-pretraining",
    DATA: """
        --sft --data-path --train-data-path --mock-data --data-args-path --per-split-data-args-path
        --valid-data-path --test-data-path --split --reset-position-ids --reset-attention-mask
        --eod-mask-loss --dataloader-inter-document-masking --phase-transition-iterations
        --decoder-seq-length --fim-data""",
    "no schedule of these modules does that work later": """
        --overlap-moe-expert-parallel-comm --delay-wgrad-compute --defer-embedding-wgrad-compute""",
    GRAPHS: "--enable-cuda-graph --external-cuda-graph",
    "options come from the command line": """
        --yaml-cfg --use-checkpoint-args --use-mp-args-from-checkpoint-args""",
    "checkpoints are of one format, torch_dist": "--ckpt-convert-format",
    "weights that the optimizer keeps are loaded with its state, or made of the model's": """
        --load-main-params-from-ckpt""",
    "a hybrid model does not scale its rotary embeddings": "--use-rope-scaling",
    "it counts batches over groups that this model does not make": "--full-validation",
    "--data has one held-out set": "--multiple-validation-sets",
    "ranks exchange what they read in one module's groups": "--ckpt-fully-parallel-load",
    "gradients are sums over tokens, divided once": "--ddp-average-in-collective",
    "Megatron's loop reads --step-batch-size-schedule": "--rampup-batch-size",
    "--transformer-impl chooses the layers": "--spec",
    "--freeze names the parts": "--freeze-all-layers",
    "gradients of all parts are clipped by one norm": "--mtp-detach-heads",
    "a hybrid model has all layers of later tokens on its last stage": "--mtp-standalone --mtp-hsm",
    "copies between checkpoints were dropped; --save-interval with --save-retain-interval keeps "
    "the newest and every N-th checkpoint": """
        --non-persistent-ckpt-type --non-persistent-save-interval --non-persistent-local-ckpt-dir
        --non-persistent-global-ckpt-dir --replication --replication-jump""",
    "--language vpp=… gives virtual stages": """
        --num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank""",
}
"""Options that are refused wherever they are set, by reason."""

ONLY_ON_MAIN = ("--mtp-hsm", "--save-tokenizer-assets", "--tp-only-amax-red")
"""Refused options that upstream's main has, and its releases do not."""

NEEDS_GPU = """
    --async-save --moe-grouped-gemm --moe-permute-fusion --moe-router-fusion
    --use-precision-aware-optimizer --optimizer-cpu-offload --fine-grained-activation-offloading
    --moe-shared-expert-overlap --record-memory-history --log-memory-to-tensorboard
    --log-device-memory-used"""

ADAM_TYPES = "main-grads main-params exp-avg exp-avg-sq"
"""Numbers that only the precision-aware optimizer keeps in other types than fp32."""


class Refusal(NamedTuple):
    """An option, the condition under which it is refused, and the reason."""

    option: str
    applies: Callable[[Namespace], object]
    reason: str


def _value(args: Namespace, option: str) -> object:
    # Megatron removes some deprecated options once it has read them.
    return getattr(args, option.removeprefix("--").replace("-", "_"), None)


def _set(option: str, reason: str) -> Refusal:
    return Refusal(option, lambda args: _value(args, option), reason)


def _set_to(text: str, reason: str) -> Refusal:
    option, refused = text.split()
    return Refusal(text, lambda args: _value(args, option) == refused, reason)


def _takes_only(option: str, taken: object, reason: str) -> Refusal:
    return Refusal(option, lambda args: _value(args, option) not in (None, taken), reason)


def _on_cpu(refusal: Refusal) -> Refusal:
    return refusal._replace(applies=lambda args: args.device == "cpu" and refusal.applies(args))


def not_local(option: str, applies: Callable[[Namespace], object]) -> Refusal:
    return Refusal(option, lambda args: args.transformer_impl == "local" and applies(args), ENGINE)


def with_graphs(option: str, applies: Callable[[Namespace], object], reason: str) -> Refusal:
    return Refusal(
        f"--cuda-graph-impl local with {option}",
        lambda args: args.cuda_graph_impl == "local" and applies(args),
        reason,
    )


def _needs_aware_optimizer(option: str) -> Refusal:
    return Refusal(
        f"{option} other than fp32",
        lambda args: (
            not args.use_precision_aware_optimizer
            and str(_value(args, option)) not in ("fp32", "torch.float32")
        ),
        "it needs --use-precision-aware-optimizer",
    )


def _only_predicts(args: Namespace) -> bool:
    return bool(getattr(args, "dry_run", 0) or getattr(args, "plan", 0))


def _has_stages(args: Namespace) -> bool:
    """Return whether ranks hold different layers; False until the layout is known."""
    is_apart = getattr(args, "placement", COLOCATED) != COLOCATED
    return is_apart or (args.pipeline_model_parallel_size or 1) > 1


REFUSALS = [
    *(_set(option, reason) for reason, names in WHEREVER_SET.items() for option in names.split()),
    *(_on_cpu(_set(option, GPU)) for option in NEEDS_GPU.split()),
    _on_cpu(Refusal("--use-nccl-ub", lambda args: args.nccl_ub, GPU)),
    _on_cpu(Refusal("--fp8-format", lambda args: args.fp8, GPU)),
    _on_cpu(Refusal("--fp4-format", lambda args: args.fp4, GPU)),
    _on_cpu(_set_to("--moe-token-dispatcher-type flex", GPU)),
    _on_cpu(
        _takes_only(
            "--transformer-impl", "local", "Transformer Engine's layers need a GPU: --device cuda"
        )
    ),
    not_local("--window-size", lambda args: args.window_size is not None),
    _set_to(
        "--softmax-type learnable",
        "no rule gives its offsets initial values, and the gradient norm would have those of one "
        "TP rank alone",
    ),
    not_local("--softmax-type", lambda args: args.softmax_type != "vanilla"),
    not_local("--qk-layernorm", lambda args: args.qk_layernorm),
    not_local("--moe-latent-size", lambda args: args.moe_latent_size),
    not_local("--cp-comm-type", lambda args: set(args.cp_comm_type) - {"p2p", "all_gather"}),
    Refusal(
        "--use-precision-aware-optimizer",
        lambda args: (
            args.use_precision_aware_optimizer
            and not args.optimizer_cpu_offload
            and not _only_predicts(args)
            and find_spec("transformer_engine") is None
        ),
        "Transformer Engine, whose Adam it takes, is not installed",
    ),
    *(_needs_aware_optimizer(f"--{name}-dtype") for name in ADAM_TYPES.split()),
    _set_to("--transformer-impl inference_optimized", "its layers are not trained"),
    Refusal("--no-initialization", lambda args: not args.perform_initialization, WEIGHTS),
    _set_to(
        "--moe-flex-dispatcher-backend ncclep",
        "it needs --moe-expert-rank-capacity-factor, which is not taken either",
    ),
    Refusal(
        "--fp8-recipe delayed with a pipeline",
        lambda args: args.fp8 and args.fp8_recipe == "delayed" and _has_stages(args),
        "without groups of Megatron's own, its maxima are taken over all ranks, and those of "
        "another stage have other layers; choose tensorwise, blockwise or mxfp8",
    ),
    not_local("--fp8-format", lambda args: args.fp8),
    not_local("--fp4-format", lambda args: args.fp4),
    _takes_only("--moe-layer-freq", 1, "--hybrid-layer-pattern gives the layers"),
    _takes_only("--dataloader-type", "external", DATA),
    _set_to("--cuda-graph-impl full_iteration", GRAPHS),
    _set_to("--cuda-graph-impl transformer_engine", GRAPHS),
    _on_cpu(_set_to("--cuda-graph-impl local", GPU)),
    _on_cpu(
        Refusal(
            "--num-distributed-optimizer-instances with --overlap-grad-reduce",
            lambda args: args.num_distributed_optimizer_instances > 1 and args.overlap_grad_reduce,
            "a GPU's stream orders the sums within and between instances, and a CPU has none",
        )
    ),
    not_local("--cuda-graph-impl", lambda args: args.cuda_graph_impl == "local"),
    with_graphs(
        "--step-batch-size-schedule",
        lambda args: args.step_batch_size_schedule is not None,
        "steps run graphs of one size",
    ),
    _takes_only("--optimizer", "adam", "only adam has a state that can be saved for any layout"),
    _takes_only(
        "--ckpt-format", "torch_dist", "only torch_dist saves parameters by name, for any layout"
    ),
    Refusal(
        "--cross-entropy-loss-fusion without --bf16",
        lambda args: args.cross_entropy_loss_fusion and not args.bf16,
        "it rounds the gradients of the logits to bfloat16",
    ),
    Refusal(
        "--log-straggler",
        lambda args: args.log_straggler and args.device == "cuda" and find_spec("pynvml") is None,
        "PyTorch has no temperature of a GPU without nvidia-ml-py: pip install nvidia-ml-py",
    ),
    Refusal(
        "--wandb-project",
        lambda args: args.wandb_project and find_spec("wandb") is None,
        "wandb is not installed: pip install wandb",
    ),
    Refusal(
        "--optimizer-cpu-offload with --async-save",
        lambda args: args.async_save and args.optimizer_cpu_offload,
        "training would change the state on the host while it is written",
    ),
    Refusal(
        "--exit-signal SIGTERM with --async-save",
        lambda args: args.async_save and args.exit_signal_handler and args.exit_signal == SIGTERM,
        "it ends the process that writes the last save, too; add --exit-signal SIGUSR1",
    ),
    _set_to("--position-embedding-type relative", POSITIONS),
    _set_to("--position-embedding-type mrope", POSITIONS),
    Refusal(
        "--apply-layernorm-1p",
        lambda args: args.layernorm_zero_centered_gamma,
        "norms begin with weights of one, to which it would add one",
    ),
    Refusal(
        "--moe-apply-probs-on-input",
        lambda args: args.moe_apply_probs_on_input and args.moe_router_topk > 1,
        "it needs --moe-router-topk 1",
    ),
    Refusal(
        "--moe-router-load-balancing-type sinkhorn",
        lambda args: "sinkhorn" in args.moe_router_load_balancing_type,
        "it balances the tokens of a rank's microbatch, so that the layout decides their experts",
    ),
    Refusal(
        "--quick-geglu",
        lambda args: args.quick_geglu and (args.squared_relu or args.swiglu),
        "--squared-relu or --swiglu would take its place; add --no-squared-relu",
    ),
    Refusal(
        "--enable-ft-package",
        lambda args: args.enable_ft_package and find_spec("nvidia_resiliency_ext") is None,
        "nvidia-resiliency-ext, which watches the ranks, is not installed",
    ),
    Refusal(
        "--moe-router-load-balancing-type quantile_balancing",
        lambda args: "quantile_balancing" in args.moe_router_load_balancing_type,
        "no rule gives the initial values of its thresholds",
    ),
    Refusal(
        "--tensor-parallel-num-weight-shards",
        lambda args: (
            args.tensor_parallel_num_weight_shards not in (None, args.tensor_model_parallel_size)
        ),
        ONE_MODEL,
    ),
    Refusal(
        "--expert-tensor-parallel-num-weight-shards",
        lambda args: (
            args.expert_tensor_parallel_num_weight_shards
            not in (None, args.expert_tensor_parallel_size)
        ),
        ONE_MODEL,
    ),
]

IN_OTHERS = [
    _set_to(
        "--cuda-graph-impl local", "only pretrain_nemotron_vlm.py prepares its modules for graphs"
    ),
    _set("--log-straggler", "its detector times parts of pretrain_nemotron_vlm.py's steps alone"),
    Refusal(
        "--mtp-num-layers",
        lambda args: (
            args.mtp_num_layers or Symbols.MTP_SEPARATOR in (args.hybrid_layer_pattern or "")
        ),
        "only pretrain_nemotron_vlm.py has shown its loss to be the same in every layout",
    ),
]
"""Refusals of other programs than pretrain_nemotron_vlm.py."""


def refuse(args: Namespace, refusals: Sequence[Refusal] = REFUSALS) -> None:
    """Refuse options that do not go with these programs.

    Args:
        args: parsed arguments, or validated ones, some of which Megatron has derived from others.

    Raises:
        UserError: an option is refused; the message has the first one and the reason.
    """
    for option, applies, reason in refusals:
        if applies(args):
            raise UserError(f"{option} is not taken here: {reason}")
