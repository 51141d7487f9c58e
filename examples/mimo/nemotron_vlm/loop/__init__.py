# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A run: Megatron's loop, what it logs, saves and loads, and runs without training."""
