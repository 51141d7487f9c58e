# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Print the traffic and the efficiency of context parallelism in recurrent layers.

Usage, with the checkout on PYTHONPATH, on GPUs or on CPU ranks, whose layers are narrow:
torchrun --nproc-per-node N tools/bench/recurrent_context_parallel.py [--layer mamba|gdn]

Each step is forward and backward of four layers of the published width, with the sequence over all
ranks. Efficiency is tokens per second and rank, over those of the same layers on one rank with the
whole sequence, in the same run: 1 is ideal. The modes are state passing on contiguous tokens (in a
stack that keeps them so), state passing on zigzag tokens, heads distributed by all-to-all, and
gathering all tokens.

Four layers launch hundreds of kernels, which takes the host 20 ms or more: with short shards, the
host's time is what is measured. --cuda-graphs captures every mode's step to measure the GPU.
"""

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

ON_GPUS = torch.cuda.is_available()
"""Whether there are GPUs; without one, the CPU runtime takes the CPU for the device ``cuda``."""
LAYERS, ROUNDS = 4, 7
ONE_RANK, GATHER = "one rank", "gather"
MODES = {
    ONE_RANK: ("headwise", "zigzag"),
    "state passing": ("chunkwise", "contiguous"),
    "state passing, zigzag": ("chunkwise", "zigzag"),
    "head-parallel": ("headwise", "zigzag"),
    GATHER: ("headwise", "zigzag"),
}
"""How each mode's layers pass states, and which tokens they hold."""
SIZES = """hidden_size mamba_num_heads mamba_head_dim mamba_num_groups mamba_state_dim
    linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim""".split()


class Received(TorchDispatchMode):
    """Counts the bytes that this rank receives from others in the collectives inside it."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("_allgather_base_", "_reduce_scatter_base_", "alltoall_base_"):
            output, given, group, rest = args[0], args[1], ProcessGroup.unbox(args[2]), args[3:]
            if name == "_allgather_base_":
                elements = output.numel() - given.numel()
            elif name == "_reduce_scatter_base_":
                elements = output.numel() * (group.size() - 1)
            else:
                splits = rest[0] or [len(output) // group.size()] * group.size()
                elements = output[splits[group.rank()] :].numel()
            self.bytes += elements * output.element_size()
        return func(*args, **(kwargs or {}))


def make_layers(mode: str, kind: str, groups) -> nn.ModuleList:
    """Build the layers of a kind, mamba or gdn, over ``groups``."""
    from examples.mimo.nemotron_vlm.model.presets import find_preset
    from megatron.core.models.hybrid.hybrid_local_specs import get_hybrid_local_stack_spec
    from megatron.core.ssm.state_passing.layer_tokens import tokens_are_contiguous
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import build_module

    passing, tokens = MODES[mode]
    language = find_preset("nano-vl-30b-a3b" if ON_GPUS else "tiny-gdn").language
    config = TransformerConfig(
        num_layers=LAYERS,
        num_attention_heads=4,
        normalization="RMSNorm",
        activation_func=F.silu,
        hidden_dropout=0.0,
        add_bias_linear=False,
        params_dtype=torch.bfloat16 if ON_GPUS else torch.float32,
        bf16=ON_GPUS,
        use_cpu_initialization=not ON_GPUS,
        linear_cp_mode=passing,
        **{name: getattr(language, name) for name in SIZES},
    )
    stack = get_hybrid_local_stack_spec().submodules
    spec = stack.mamba_layer if kind == "mamba" else stack.gdn_layer
    numbers = range(1, LAYERS + 1)
    layers = nn.ModuleList(
        build_module(spec, config=config, layer_number=number, pg_collection=groups)
        for number in numbers
    ).cuda()
    if tokens == "contiguous":
        tokens_are_contiguous(layers)
    return layers


def make_step(mode: str, layers: nn.ModuleList, length: int, group) -> Callable[[], None]:
    """Return a function that runs forward and backward of one sample of ``length`` tokens."""
    from megatron.core.token_layout import PaddedLengths, gather_tokens, zigzag_layout

    parameter, held = next(layers.parameters()), length
    if mode != ONE_RANK:
        held = length // group.size()
    shape = held, 1, layers[0].config.hidden_size
    hidden = torch.randn(shape, device="cuda", dtype=parameter.dtype, requires_grad=True)
    layout = zigzag_layout(PaddedLengths((length,), (length,)), group.size()).to("cuda")
    own = layout.tokens[group.rank()]

    def step() -> None:
        layers.zero_grad(set_to_none=True)
        x = hidden
        for layer in layers:
            x = gather_tokens(x, layout, group) if mode == GATHER else x
            out = layer(hidden_states=x, attention_mask=None)
            x = out[0] if isinstance(out, tuple) else out
            x = x.index_select(0, own) if mode == GATHER else x
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


def take_turns(calls: list[Callable[[], object]]) -> list[list[float]]:
    """Return each call's seconds on its slowest rank in every round, after one for warm-up.

    The calls take turns, so that a disturbance affects all of them; ranks start each together.
    """
    found = torch.zeros(ROUNDS + 1, len(calls), device="cuda")
    for turn in found:
        for place, call in enumerate(calls):
            torch.cuda.synchronize()
            dist.barrier()
            started = time.perf_counter()
            call()
            torch.cuda.synchronize()
            turn[place] = time.perf_counter() - started
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found[1:].T.tolist()


def measure(options: argparse.Namespace) -> None:
    """Measure all modes and lengths, and print the table."""
    from megatron.core.hyper_comm_grid import HyperCommGrid
    from megatron.core.process_groups_config import ProcessGroupCollection

    cp, is_first = dist.get_world_size(), dist.get_rank() == 0
    shapes = [1, cp, 1, 1], [1, 1, cp, 1]
    grids = [HyperCommGrid(shape, ["tp", "cp", "dp", "pp"]) for shape in shapes]
    shared, alone = (ProcessGroupCollection.from_hyper_comm_grid(grid) for grid in grids)
    layers = {
        mode: make_layers(mode, options.layer, alone if mode in (ONE_RANK, GATHER) else shared)
        for mode in MODES
    }
    if is_first:
        print(
            "| tokens | mode | MB received, rank, layer | step, ms | efficiency "
            "| slowest / fastest round |\n|---:|---|---:|---:|---:|---:|"
        )
    for length in options.lengths:
        steps = {mode: make_step(mode, layers[mode], length, shared.cp) for mode in MODES}
        received = {}
        for mode, step in steps.items():
            step()
            with Received() as received[mode]:
                step()
        timed = captured(steps) if options.cuda_graphs else steps
        taken = dict(zip(MODES, take_turns(list(timed.values())), strict=True))
        medians = {mode: statistics.median(seconds) for mode, seconds in taken.items()}
        for mode, seconds in taken.items() if is_first else ():
            share = medians[ONE_RANK] / medians[mode] / (1 if mode == ONE_RANK else cp)
            print(
                f"| {length} | {mode} | {received[mode].bytes / LAYERS / 1e6:.2f} "
                f"| {1e3 * medians[mode]:.1f} | {share:.3f} | {max(seconds) / min(seconds):.2f} |",
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
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 32768, 131072])
    parser.add_argument("--cuda-graphs", action="store_true", help="without the host's time")
    options = parser.parse_args()
    if options.cuda_graphs and not ON_GPUS:
        parser.error("--cuda-graphs needs GPUs")
    if not ON_GPUS:
        from megatron.core import cpu_runtime

        cpu_runtime.install()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl")
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1, tp_rank=0, ep_rank=0, etp_rank=0)
    measure(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
