# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Options of Megatron's that are refused wherever they are set, by reason."""

from examples.mimo.common.rules import on_cpu, refused

ONE_MODEL = "it knows one model on one grid, and this one has a grid for each module"
DATA = "--data gives the samples"
GRAPHS = "only --cuda-graph-impl local captures layers of several modules"
WEIGHTS = (
    "initial weights follow from the seed and each parameter's name, so that no layout changes them"
)

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
    "--optimizer-cpu-offload keeps Adam's state on the host, and steps on the GPU": """
        --use-torch-optimizer-for-cpu-offload --overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads
        --no-pin-cpu-params""",
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

FAMILIES = [
    *(refused(option, why) for why, names in WHEREVER_SET.items() for option in names.split()),
    *map(on_cpu, NEEDS_GPU.split()),
]
"""Rules whose options a test walks by Megatron's parser, with a value of each."""
