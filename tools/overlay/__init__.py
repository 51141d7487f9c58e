# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The tooling of the patch set: fetch, apply, refresh, drift. It needs only Python and git."""
