# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Gated delta nets that pass states: the layer, its GPU kernels, states of a shard."""
