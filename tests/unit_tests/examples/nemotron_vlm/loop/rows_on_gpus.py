# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Rows of `make test-gpu`: small models on one and two GPUs, with the kernels that production runs.

See rows.py.
"""

from tests.unit_tests.examples.nemotron_vlm.loop.rows import (
    ADAPTED,
    ALLGATHER,
    APART,
    EVALUATION,
    GRAPHS,
    RECOMPUTE,
    WORKERS,
    Row,
)
from tests.unit_tests.examples.nemotron_vlm.runs import LOCAL

ROUTER_GRAPHS = (*GRAPHS, "--cuda-graph-modules", "attn", "mamba", "moe_router")
ALLTOALL = ("--moe-token-dispatcher-type", "alltoall")
OFFLOAD = ("--optimizer-cpu-offload", "--use-precision-aware-optimizer")
NO_OVERLAP = ("--no-overlap-grad-reduce", "--no-overlap-param-gather")
ADAPTED_IN_16_BITS = (*ADAPTED, "--lr", "1e-4")

ON_ONE_GPU = [
    Row(1, "two digits", options=GRAPHS, common=EVALUATION, microbatches=4),
    Row(1, "bf16 two digits", options=GRAPHS),
    Row(1, "bf16 two digits", options=ROUTER_GRAPHS),
    Row(1, "bf16 any size", options=(*GRAPHS, "--recompute-encoder", "1")),
    Row(1, "bf16 packed, partly text", options=GRAPHS),
    Row(1, "bf16 two digits", options=GRAPHS, common=("--freeze", "encoder")),
    Row(1, "bf16 two digits", options=GRAPHS, common=("--freeze", "language")),
    Row(1, "two digits", options=GRAPHS, common=ADAPTED),
    Row(1, "bf16 packed", options=GRAPHS, common=ADAPTED_IN_16_BITS),
    Row(1, "bf16", options=OFFLOAD),
    Row(1, "bf16", options=OFFLOAD, common=ADAPTED_IN_16_BITS),
    Row(1, "engine", options=ALLGATHER),
    Row(1, "bf16", options=ALLTOALL),
    Row(1, "engine", options=RECOMPUTE),
    Row(1, "engine", options=NO_OVERLAP),
    Row(1, "engine", options=("--encoder-macro-batch", "4"), microbatches=4),
    Row(1, "bf16 any size", options=("--encoder-attention", "te")),
    Row(1, "engine", then=(("dp=1", "dp=1", LOCAL),)),
    Row(1, "engine", options=LOCAL, common=ADAPTED, then=(("dp=1", "dp=1", ()),)),
    Row(1, "bf16 any size", options=RECOMPUTE, common=ADAPTED_IN_16_BITS),
]

ON_TWO_GPUS = [
    Row(2, "engine", "tp=2", "tp=2"),
    Row(2, "engine", "dp=2", "pp=2,vpp=2", microbatches=4),
    Row(2, "engine", "dp=2", "dp=2,ep=2"),
    Row(2, "engine", "dp=2", "pp=2", RECOMPUTE),
    Row(2, "engine", "dp=2", "tp=2,ep=2,etp=1", LOCAL, then=(("tp=2", "pp=2", ()),)),
    Row(2, "engine", "tp=2", "dp=2,ep=2", then=(("dp=2", "cp=2", LOCAL),)),
    Row(2, "engine", "dp=2", "pp=2", then=(("dp=1", "dp=1", APART),)),
    Row(2, "engine", options=APART, then=(("dp=2", "tp=2", ()),)),
    Row(2, "local", "dp=2", "cp=2", RECOMPUTE),
    Row(2, "partly text", "tp=2", "pp=2"),
    Row(2, "partly text", options=APART),
    Row(2, "partly text local", "dp=2", "cp=2"),
    Row(2, "frozen encoder", "dp=2", "pp=2"),
    Row(2, "frozen language", "tp=2", "dp=2"),
    Row(2, "packed local", "dp=2", "cp=2", microbatches=8),
    Row(2, "packed local", "dp=2", "pp=2", microbatches=8),
    Row(2, "packed local", options=APART, microbatches=8),
    Row(2, "shards", "dp=2", "cp=2", WORKERS, then=(("tp=2", "dp=2", WORKERS),)),
    Row(2, "65 words on engine", "dp=2", "tp=2,ep=2,etp=1"),
    Row(2, "engine", "dp=2", "tp=2,ep=2,etp=1", common=ADAPTED),
    Row(2, "engine", "tp=2", "dp=2,ep=2", ALLGATHER, ADAPTED, then=(("dp=2", "pp=2", ()),)),
    Row(2, "engine", options=APART, common=ADAPTED),
    Row(2, "local", "dp=2", "cp=2", RECOMPUTE, ADAPTED),
    Row(2, "bf16", "dp=2", "tp=2,ep=2,etp=1", OFFLOAD),
    Row(2, "bf16", "tp=2", "cp=2"),
    Row(2, "bf16", "dp=2", "cp=2", RECOMPUTE),
    Row(2, "bf16", "dp=2", "pp=2", microbatches=4),
    Row(2, "bf16", options=APART),
    Row(2, "bf16 packed", "dp=2", "cp=2", microbatches=8),
    Row(2, "bf16 packed", options=APART, microbatches=8),
    Row(2, "any size local", "dp=2", "cp=2"),
    Row(2, "sound local", "images:tp=2 sound:dp=2", "cp=2"),
    Row(2, "bf16 any size", "tp=2", "dp=2"),
    Row(2, "fp16", "dp=2", "tp=2,ep=2,etp=1"),
    Row(2, "fp16", options=APART),
    Row(2, "two digits", "dp=2", "tp=2,ep=2,etp=1", GRAPHS),
    Row(2, "bf16 two digits", "dp=2", "tp=2", GRAPHS),
    Row(2, "engine", "dp=2", "dp=2,ep=2", ALLGATHER, then=(("dp=2", "dp=2", ()),)),
    Row(2, "bf16", "dp=2", "tp=2,ep=2,etp=1", ALLGATHER),
    Row(2, "bf16 two digits", "dp=2", "dp=2,ep=2", GRAPHS),
    Row(2, "bf16 two digits", "dp=2", "tp=2,ep=2,etp=1", GRAPHS),
    Row(2, "bf16 packed", "dp=2", "tp=2,ep=2,etp=1", GRAPHS),
    Row(2, "bf16", "dp=2", "tp=2,ep=2,etp=1", common=ADAPTED_IN_16_BITS),
    Row(2, "bf16 packed", "tp=2", "dp=2,ep=2", ALLGATHER, ADAPTED_IN_16_BITS, microbatches=4),
    Row(2, "bf16 packed", "tp=2", "dp=2,ep=2", GRAPHS, ADAPTED_IN_16_BITS),
    Row(2, "gated delta nets", "dp=2", "cp=2"),
    Row(2, "gated delta nets", "dp=2", "tp=2"),
]

AHEAD = [
    Row(2, "two digits", "tp=2", "dp=2", GRAPHS),
    Row(2, "two digits", "dp=2", "pp=2", GRAPHS, microbatches=4),
    Row(2, "bf16 two digits", "dp=2", "pp=2", GRAPHS, microbatches=4),
]
"""Rows on two GPUs with several connections to each, where the host runs ahead of the device.
Neither module has TP or CP, for which Megatron asks for a single connection."""
