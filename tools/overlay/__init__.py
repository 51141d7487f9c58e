# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The tooling behind the patch set: fetch, apply, lock, export. Standard library and git only."""
