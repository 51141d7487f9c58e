# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Run upstream's ``pretrain_mimo.py``, of the tree in the working directory, on a GPU.

    torchrun … upstream_script.py SCRIPT [its options]

Two things stand in: the compiled index builder of data sets, and a ViT of two layers whose position
embeddings do not move at random, so that layouts can be compared.
"""

import os
import runpy
import sys
import types
from functools import partial
from importlib import import_module

import numpy as np

VIT = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 4}
VIT |= {"kv_channels": 8, "ffn_hidden_size": 64}


def index_builder() -> None:
    """Replace the one compiled function that mock data needs, which says where samples begin."""

    def build_sample_idx(sizes, documents, length, epochs, tokens_per_epoch, _drop_last, extra):
        lengths = sizes[documents]
        ends = np.cumsum(lengths)
        starts = np.arange((epochs * tokens_per_epoch - extra) // length + 1) * length
        which = np.searchsorted(ends, starts, side="right")
        return np.stack((which, starts - (ends - lengths)[which]), axis=1)

    helpers = types.ModuleType("megatron.core.datasets.helpers_cpp")
    helpers.build_sample_idx_int32 = helpers.build_sample_idx_int64 = build_sample_idx
    sys.modules[helpers.__name__] = helpers
    import_module("megatron.core.datasets.utils").compile_helpers = lambda: None
    mock = import_module("megatron.core.datasets.gpt_dataset").MockGPTLowLevelDataset
    mock.size = 100  # documents of 2048 tokens; the index of upstream's 100000 takes seconds


def small_radio() -> None:
    """Make the script's ViT small: no option changes its 32 layers."""
    radio = import_module("examples.mimo.model_providers.radio_encoder")
    nemotron = import_module("examples.mimo.model_providers.nemotron_moe_vlm")
    full_size = radio.radio_vision_config

    def small(*args):
        config = full_size(*args)
        vars(config).update(VIT)
        return config

    nemotron.radio_vision_config = small
    radio.RADIOViTModel = partial(radio.RADIOViTModel, force_cpe_eval_mode=True)


sys.path.insert(0, os.getcwd())
index_builder()
small_radio()
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
