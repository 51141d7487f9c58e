# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The planner: predicts memory and step time of layouts, and finds the fastest that fits.

``docs/planner.md`` says how it computes. Nothing is started, and no device is used.
"""
