# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Conversion of weights between Hugging Face models and checkpoints of the program."""
