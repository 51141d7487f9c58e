# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The bridge moves rows from the encoder ranks to the ranks of the language model."""
