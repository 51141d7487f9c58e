# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Code that both training programs of colocated modules use: layouts, steps, refusals."""
