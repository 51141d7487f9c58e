# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""What a user got wrong."""


class ConversionError(Exception):
    """The files, the configuration or the checkpoint do not fit; its text names what and why."""
