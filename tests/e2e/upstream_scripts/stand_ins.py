# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for what upstream's scripts need and a CPU lacks, the same for every tree.

These are CUDA and NCCL, Python 3.12, the compiled index builder of data sets, mamba-ssm,
flash-linear-attention, and the layers of Transformer Engine that upstream's specs name. New files
of the overlay, which patch nothing, and upstream's own layers stand in for them.
"""

import importlib.util
import queue
import sys
import types
import typing
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import typing_extensions

OVERLAY = Path(__file__).resolve().parents[3] / "megatron_overlay"
VIT = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 4}
VIT |= {"kv_channels": 8, "ffn_hidden_size": 64}


def install() -> None:
    """Install all stand-ins; to be called before Megatron is imported."""
    if not hasattr(typing, "override"):  # Python 3.11
        typing.override = typing_extensions.override
    _ours("megatron.core.cpu_runtime").install()
    _kernels()
    index_builder()
    _transformer_engine()
    small_radio()
    _no_queue_process()


def _ours(name: str) -> types.ModuleType:
    """Import a module of the overlay, which a pristine tree lacks."""
    path = OVERLAY / name.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _module(name: str, **contents: typing.Any) -> None:
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(contents)


def _kernels() -> None:
    """Put the reference ops in the place of mamba-ssm and flash-linear-attention."""
    ops = _ours("megatron.core.ssm.ops.reference")
    fla = import_module("megatron.core.ssm.ops.reference.fla_names")
    _module("mamba_ssm.ops.triton.layernorm_gated", RMSNorm=ops.RMSNormGated)
    _module(
        "mamba_ssm.ops.triton.ssd_combined",
        mamba_chunk_scan_combined=ops.mamba_chunk_scan_combined,
        mamba_split_conv1d_scan_combined=ops.mamba_split_conv1d_scan_combined,
    )
    _module("fla.modules.convolution", causal_conv1d=fla.causal_conv1d)
    _module("fla.modules.l2norm", l2norm=fla.l2norm)
    _module("fla.ops.gated_delta_rule", chunk_gated_delta_rule=fla.chunk_gated_delta_rule)


def index_builder() -> None:
    """Replace the one compiled function that mock data needs, which says where samples begin."""

    def build_sample_idx(sizes, documents, length, epochs, tokens_per_epoch, _drop_last, extra):
        lengths = sizes[documents]
        ends = np.cumsum(lengths)
        starts = np.arange((epochs * tokens_per_epoch - extra) // length + 1) * length
        which = np.searchsorted(ends, starts, side="right")
        return np.stack((which, starts - (ends - lengths)[which]), axis=1)

    names = ("build_sample_idx_int32", "build_sample_idx_int64")
    _module("megatron.core.datasets.helpers_cpp", **dict.fromkeys(names, build_sample_idx))
    import_module("megatron.core.datasets.utils").compile_helpers = lambda: None
    mock = import_module("megatron.core.datasets.gpt_dataset").MockGPTLowLevelDataset
    mock.size = 100  # documents of 2048 tokens; the index of upstream's 100000 takes seconds


def _transformer_engine() -> None:
    """Put Megatron's layers under the names of Transformer Engine's, which upstream's specs use."""
    te = import_module("megatron.core.extensions.transformer_engine")
    layers = import_module("megatron.core.tensor_parallel.layers")
    dot_product = import_module("megatron.core.transformer.dot_product_attention")
    norm = _ours("megatron.core.transformer.sequence_parallel_norm").SequenceParallelNorm
    _ours("megatron.core.token_layout")
    over_cp = _ours("megatron.core.transformer.context_parallel_attention")

    class Norm:
        def __new__(cls, config, hidden_size, eps=1e-5, has_residual=False):
            return norm(config, hidden_size, eps)

    class NormThenColumns(layers.ColumnParallelLinear):
        def __init__(self, input_size, output_size, *, config, **options):
            super().__init__(input_size, output_size, config=config, **options)
            self.norm = norm(config, input_size)

        def forward(self, hidden):
            return super().forward(self.norm(hidden))

    class Attention:
        def __new__(cls, config, *args, **options):
            if config.context_parallel_size == 1:
                return dot_product.DotProductAttention(config, *args, **options)
            return over_cp.ContextParallelAttention(config, *args, **options)

    _module("transformer_engine", __version__="0.0")
    te.HAVE_TE = True
    te.TELinear = type("TELinear", (), {})
    te.TENorm = Norm
    te.TEColumnParallelLinear = layers.ColumnParallelLinear
    te.TERowParallelLinear = layers.RowParallelLinear
    te.TELayerNormColumnParallelLinear = NormThenColumns
    te.TEDotProductAttention = Attention
    # Main asks whether a layer of multi-token prediction is one of these.
    inference = import_module("megatron.core.tensor_parallel.inference_layers")
    for name in ("InferenceColumnParallelLinear", "InferenceLayerNormColumnParallelLinear"):
        setattr(inference, name, type(name, (), {}))


def small_radio() -> None:
    """Make the ViT of upstream's MIMO program small: no option changes its 32 layers.

    Its position embeddings do not move at random, so that layouts can be compared.
    """
    radio = import_module("examples.mimo.model_providers.radio_encoder")
    nemotron = import_module("examples.mimo.model_providers.nemotron_moe_vlm")
    full_size = radio.radio_vision_config

    def small(*args):
        config = full_size(*args)
        vars(config).update(VIT)
        return config

    nemotron.radio_vision_config = small
    radio.RADIOViTModel = partial(radio.RADIOViTModel, force_cpe_eval_mode=True)


def _no_queue_process() -> None:
    """Save without a process for the results, which would import all of Megatron anew."""
    name = "megatron.core.dist_checkpointing.strategies.filesystem_async"
    import_module(name)._results_queue = queue.Queue()
