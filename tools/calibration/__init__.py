# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The planner against machines: ``calibrate`` fits its figures, ``validate`` checks predictions."""
