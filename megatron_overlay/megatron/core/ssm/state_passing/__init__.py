# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Context parallelism of recurrent layers that leaves each rank its tokens and passes states."""
