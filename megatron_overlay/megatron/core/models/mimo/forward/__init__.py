# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A MimoModel's forward: encode, count rows, merge them into the text's embeddings."""
