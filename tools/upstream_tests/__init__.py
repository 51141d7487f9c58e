# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Comparison of upstream's own tests on a pristine and on an applied tree."""
