# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Gated delta net whose activation does not depend on that of the MLPs."""

import torch.nn.functional as F

from megatron.core.ssm.gated_delta_net import GatedDeltaNet


class SiluGatedDeltaNet(GatedDeltaNet):
    """Gated delta net with SiLU in convolution and gate, as defined in arXiv 2412.06464.

    Upstream's layer uses the config's ``activation_func``, as the MLPs do. Its kernels take only
    SiLU.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.act_fn, self.activation = F.silu, "silu"
