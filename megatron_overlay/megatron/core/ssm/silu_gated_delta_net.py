# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A gated delta net beside MLPs of another activation."""

import torch.nn.functional as F

from megatron.core.ssm.gated_delta_net import GatedDeltaNet


class SiluGatedDeltaNet(GatedDeltaNet):
    """Convolution and gate are SiLU, as the layer is defined (arXiv 2412.06464).

    Upstream's layer has the ``activation_func`` of the config, which the MLPs have too, and its
    kernels take SiLU only.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.act_fn, self.activation = F.silu, "silu"
