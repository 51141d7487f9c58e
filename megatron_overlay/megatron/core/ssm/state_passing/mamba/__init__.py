# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 mixers that pass states: the layer, its GPU kernels, and states of a shard."""
