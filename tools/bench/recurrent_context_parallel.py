# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Print the traffic and the efficiency of context parallelism in recurrent layers.

Usage, with the checkout on PYTHONPATH, on GPUs or (with --small) on CPU ranks:
torchrun --nproc-per-node N tools/bench/recurrent_context_parallel.py [--layer mamba|gdn] [--cp N]

Each step is forward and backward of four layers of the published width. Efficiency is tokens per
second and rank, over those of the same layers on one rank with the whole sequence, in the same run:
1 is ideal. The modes are state passing on contiguous tokens (in a stack that keeps them so), state
passing with conversion from zigzag and back in each layer, heads distributed by all-to-all, and
gathering all tokens.

Four layers launch hundreds of kernels, which takes the host 20 ms or more: with short shards, the
host's time is what is measured. --cuda-graphs captures every mode's step to measure the GPU.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from ranks import start, take_turns
from torch import Tensor, nn

from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.token_layout import (
    PaddedLengths,
    gather_tokens,
    zigzag_layout,
)

PUBLISHED = {"hidden_size": 2688, "mamba_num_heads": 64, "mamba_head_dim": 64,
             "mamba_num_groups": 8, "mamba_state_dim": 128, "linear_num_key_heads": 16,
             "linear_num_value_heads": 32, "linear_key_head_dim": 128,
             "linear_value_head_dim": 128}  # fmt: skip
SMALL = {"hidden_size": 64, "mamba_num_heads": 16, "mamba_head_dim": 16,
         "mamba_num_groups": 4, "mamba_state_dim": 16, "linear_num_key_heads": 8,
         "linear_num_value_heads": 16, "linear_key_head_dim": 16,
         "linear_value_head_dim": 16}  # fmt: skip

MODES = {
    "one rank": ("headwise", "zigzag"),
    "state passing": ("chunkwise", "contiguous"),
    "state passing, zigzag": ("chunkwise", "zigzag"),
    "head-parallel": ("headwise", "zigzag"),
    "gather": ("headwise", "zigzag"),
}
WHOLE = ("one rank", "gather")
"""Modes in which a rank's layers have all tokens."""


class ReceivedBytes:
    """Counts the bytes that this rank receives from others in collectives, while active."""

    def __enter__(self) -> ReceivedBytes:
        self.count = 0
        names = ("all_gather_into_tensor", "all_to_all_single", "reduce_scatter_tensor")
        self._originals = {name: getattr(dist, name) for name in names}
        for name, original in self._originals.items():
            setattr(dist, name, self._counting(name, original))
        return self

    def __exit__(self, *exception) -> None:
        for name, original in self._originals.items():
            setattr(dist, name, original)

    def _counting(self, name: str, original: Callable) -> Callable:
        def counted(output: Tensor, input: Tensor, *args, **kwargs):
            group = kwargs.get("group")
            size, rows = dist.get_world_size(group), output.shape[0]
            if name == "reduce_scatter_tensor":
                foreign = output.numel() * (size - 1)
            elif name == "all_gather_into_tensor":
                foreign = output.numel() - input.numel()
            else:
                splits = kwargs.get("output_split_sizes") or [rows // size] * size
                own = splits[dist.get_rank(group)]
                foreign = output.numel() // max(rows, 1) * (rows - own)
            self.count += foreign * output.element_size()
            return original(output, input, *args, **kwargs)

        return counted


def make_layers(mode: str, options: argparse.Namespace, groups, device) -> nn.ModuleList:
    """Build the layers of the kind that options ask for, over ``groups``, on ``device``."""
    import torch.nn.functional as F

    from megatron.core.models.hybrid.hybrid_local_specs import get_hybrid_local_stack_spec
    from megatron.core.ssm.state_passing.layer_tokens import tokens_are_contiguous
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import build_module

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    passing, tokens = MODES[mode]
    config = TransformerConfig(
        num_layers=options.layers,
        num_attention_heads=4,
        normalization="RMSNorm",
        activation_func=F.silu,
        hidden_dropout=0.0,
        add_bias_linear=False,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=device.type == "cpu",
        linear_cp_mode=passing,
        **(SMALL if options.small else PUBLISHED),
    )
    stack = get_hybrid_local_stack_spec().submodules
    spec = stack.mamba_layer if options.layer == "mamba" else stack.gdn_layer
    layers = [
        build_module(spec, config=config, layer_number=number + 1, pg_collection=groups)
        for number in range(options.layers)
    ]
    layers = nn.ModuleList(layers).to(device)
    if tokens == "contiguous":
        tokens_are_contiguous(layers)
    return layers


def run(layers: nn.ModuleList, hidden: Tensor) -> Tensor:
    """Run all layers, one after another."""
    for layer in layers:
        out = layer(hidden_states=hidden, attention_mask=None)
        hidden = out[0] if isinstance(out, tuple) else out
    return hidden


def make_step(mode: str, layers, length: int, group, device) -> Callable[[], None]:
    """Return a function that runs forward and backward of one sample of ``length`` tokens."""
    hidden_size, dtype = layers[0].config.hidden_size, next(layers.parameters()).dtype
    lengths = PaddedLengths((length,), (length,))
    size, rank = group.size(), group.rank()
    held = length if mode == "one rank" else length // size
    hidden = torch.randn(held, 1, hidden_size, device=device, dtype=dtype, requires_grad=True)
    layout = zigzag_layout(lengths, size).to(device)
    own = layout.tokens[rank] if mode == "gather" else None

    def step() -> None:
        layers.zero_grad(set_to_none=True)
        x = hidden
        for layer in layers:
            if mode == "gather":
                whole = gather_tokens(x, layout, group)
                x = run([layer], whole).index_select(0, own)
            else:
                x = run([layer], x)
        x.backward(torch.ones_like(x))

    return step


def captured(steps: dict[str, Callable[[], None]]) -> dict[str, Callable[[], None]]:
    """Capture each step as a CUDA graph, collectives included; keep the steps, whose tensors it
    uses.

    The graphs share as much memory as the largest step needs; nothing else may run between them.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for step in steps.values():
            for _ in range(3):
                step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    memory, replays = torch.cuda.graph_pool_handle(), {}
    for mode, step in steps.items():
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog thread may query events during the capture.
        with torch.cuda.graph(graph, memory, capture_error_mode="thread_local"):
            step()
        replays[mode] = graph.replay
    return replays


def measure_length(
    options: argparse.Namespace, layers: dict[str, nn.ModuleList], length: int, group, device
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return, by mode, the MB that a rank receives in each layer, and the seconds of each round."""
    steps = {mode: make_step(mode, layers[mode], length, group, device) for mode in options.modes}
    received = {}
    for mode, step in steps.items():
        step()
        with ReceivedBytes() as counter:
            step()
        received[mode] = counter.count / options.layers / 1e6
    timed = captured(steps) if options.cuda_graphs else steps
    seconds = take_turns(list(timed.values()), device, options.rounds)
    return received, dict(zip(timed, seconds, strict=True))


def measure(options: argparse.Namespace, device: torch.device) -> None:
    """Measure all modes and lengths, and print the table."""
    world, cp = dist.get_world_size(), options.cp or dist.get_world_size()
    grids = [
        HyperCommGrid(shape, ["tp", "cp", "dp", "pp"])
        for shape in ([1, cp, world // cp, 1], [1, 1, world, 1])
    ]
    shared, alone = (ProcessGroupCollection.from_hyper_comm_grid(grid) for grid in grids)
    layers = {
        mode: make_layers(mode, options, alone if mode in WHOLE else shared, device)
        for mode in options.modes
    }
    if dist.get_rank() == 0:
        print(f"{options.layers} {options.layer} layers, cp={cp}, {device.type}")
        print(
            "| tokens | mode | MB received, rank, layer | step, ms | efficiency "
            "| slowest / fastest round |\n|---:|---|---:|---:|---:|---:|"
        )
    for length in options.lengths:
        received, seconds = measure_length(options, layers, length, shared.cp, device)
        one_rank = statistics.median(seconds["one rank"])
        if dist.get_rank() == 0:
            for mode in options.modes:
                median = statistics.median(seconds[mode])
                ranks = 1 if mode == "one rank" else cp
                print(
                    f"| {length} | {mode} | {received[mode]:.2f} | {1e3 * median:.1f} "
                    f"| {one_rank / median / ranks:.3f} "
                    f"| {max(seconds[mode]) / min(seconds[mode]):.2f} |",
                    flush=True,
                )
    # Communicators end only after the graphs that use them, and those are left to the collector.
    gc.collect()
    for grid in grids:
        grid.destroy()


def main() -> None:
    """Parse the command line, start the process group, and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layer", choices=["mamba", "gdn"], default="mamba")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--cp", type=int, default=0, help="ranks of a sample; all when left out")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 32768, 131072])
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cuda-graphs", action="store_true", help="without the host's time")
    parser.add_argument("--small", action="store_true", help="narrow layers, for CPU ranks")
    options = parser.parse_args()
    if options.cuda_graphs and not torch.cuda.is_available():
        parser.error("--cuda-graphs needs GPUs")
    if "one rank" not in options.modes:
        options.modes = ["one rank", *options.modes]

    if not torch.cuda.is_available():
        from megatron.core.cpu_runtime import install

        install()
    device = start()
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1, tp_rank=0, ep_rank=0, etp_rank=0)
    measure(options, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
