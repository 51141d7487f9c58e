# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""GEMMs that add weight gradients directly to the main gradients: APEX's or Transformer Engine's.

Megatron's own linear layers only know APEX's extension. Transformer Engine, which nearly every GPU
installation has, has a (cuBLAS) GEMM that does the same.

Raises:
    ImportError: neither is installed.
"""

import inspect

from torch import Tensor

try:
    from fused_weight_gradient_mlp_cuda import wgrad_gemm_accum_fp16, wgrad_gemm_accum_fp32
except ImportError:
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    if "workspace" in inspect.signature(general_gemm).parameters:
        raise ImportError("this Transformer Engine's GEMM wants a workspace") from None

    def wgrad_gemm_accum_fp32(inputs: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        """Add ``grad_outputᵀ · inputs`` to ``main_grad``.

        Args:
            inputs: ``[tokens, in]``.
            grad_output: ``[tokens, out]``.
            main_grad: ``[out, in]``, fp32 or the inputs' dtype.
        """
        general_gemm(
            inputs,
            grad_output,
            out_dtype=main_grad.dtype,
            layout="NT",
            out=main_grad,
            accumulate=True,
            grad=True,
        )

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32

__all__ = ["wgrad_gemm_accum_fp16", "wgrad_gemm_accum_fp32"]
