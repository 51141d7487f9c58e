# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Calibration of the planner: ``calibrate`` fits figures, ``validate`` checks predictions."""
