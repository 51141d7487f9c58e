# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine alone serves where APEX is absent."""

import subprocess
import sys
import textwrap


def test_layers_take_transformer_engines_gemm_without_apex():
    """In a process of its own, where a stand-in is Transformer Engine."""
    program = """
        import sys, types

        engine = "transformer_engine.pytorch.cpp_extensions"
        gemm = types.ModuleType(engine)
        gemm.general_gemm = lambda A, B, out_dtype, layout, out, accumulate, grad: out
        sys.modules["fused_weight_gradient_mlp_cuda"] = None
        import megatron.core.utils
        sys.modules["transformer_engine"] = types.ModuleType("transformer_engine")
        sys.modules["transformer_engine.pytorch"] = types.ModuleType("transformer_engine.pytorch")
        sys.modules[engine] = gemm
        from importlib.util import module_from_spec, find_spec
        import megatron.core.tensor_parallel
        spec = find_spec("megatron.core.tensor_parallel.layers")
        layers = module_from_spec(spec)
        sys.modules.pop("megatron.core.tensor_parallel.weight_gradient", None)
        spec.loader.exec_module(layers)
        assert layers._grad_accum_fusion_available
    """
    succeed(program)


def test_the_norm_takes_transformer_engines_kernels_though_one_is_missing():
    """Version 2.10 has no multi_tensor_scale_tensor."""
    program = """
        import sys, types

        import megatron.core.optimizer.clip_grads
        engine = "transformer_engine.pytorch.optimizers"
        kernels = types.ModuleType(engine)
        kernels.multi_tensor_applier = kernels.multi_tensor_scale = lambda *arguments: None
        kernels.multi_tensor_l2norm = lambda *arguments: None
        sys.modules["transformer_engine"] = types.ModuleType("transformer_engine")
        sys.modules["transformer_engine.pytorch"] = types.ModuleType("transformer_engine.pytorch")
        sys.modules[engine] = kernels
        from importlib.util import module_from_spec, find_spec
        spec = find_spec("megatron.core.optimizer.clip_grads")
        clip_grads = module_from_spec(spec)
        spec.loader.exec_module(clip_grads)
        assert clip_grads.l2_norm_impl is kernels.multi_tensor_l2norm
        assert clip_grads.multi_tensor_scale_tensor_impl is None
    """
    succeed(program)


def succeed(program: str) -> None:
    """Run a program in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
