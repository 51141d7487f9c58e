# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Weight gradients added to fp32 main gradients by the GEMM itself."""

import pytest
import torch

pytest.importorskip("transformer_engine", reason="needs a GPU and Transformer Engine")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gemm_adds_to_main_gradient(dtype):
    from megatron.core.tensor_parallel.weight_gradient import wgrad_gemm_accum_fp32

    torch.manual_seed(1)
    inputs, grad = (torch.randn(96, n, device="cuda", dtype=dtype) for n in (48, 80))
    main_grad = torch.randn(80, 48, device="cuda")
    expected = main_grad.double() + grad.double().t() @ inputs.double()
    wgrad_gemm_accum_fp32(inputs, grad, main_grad)
    tolerance = 1e-4 if dtype is torch.bfloat16 else 2e-2  # fp32 operands are TF32 in the GEMM
    torch.testing.assert_close(main_grad.double(), expected, rtol=tolerance, atol=10 * tolerance)
