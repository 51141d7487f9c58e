# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Figures of a machine for the layout planner: measured, fitted, and compared with other runs."""
