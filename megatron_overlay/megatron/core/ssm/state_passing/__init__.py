# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Context parallelism of recurrent layers: each rank keeps its tokens, and ranks pass states."""
