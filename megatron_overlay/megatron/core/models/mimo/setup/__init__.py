# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A MimoModel before and after training: groups, weights, random states, DDP, teardown."""
