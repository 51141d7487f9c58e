# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The order of a step's work: the encoders, gradients at its end, CUDA graphs."""
