# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Run unmodified Megatron code on CPU ranks over gloo.

`install()` replaces, once and for the whole process, the parts of PyTorch through which Megatron
reaches CUDA and NCCL. `python -m megatron.core.cpu_runtime SCRIPT ARGS…` installs and then runs a
script. Nothing in `megatron` imports this package, so a GPU run never meets it.
"""

from megatron.core.cpu_runtime.installer import install

__all__ = ["install"]
