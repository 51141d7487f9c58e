# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Weights of Hugging Face models as a checkpoint of the program, and back."""
