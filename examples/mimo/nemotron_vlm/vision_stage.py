# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The vision module as a stage of a pipeline of its own.

Megatron's modality submodules run their encoders on the first stage only. Here every stage runs
its layers: the first on tiles, the others on the hidden states of the stage before.
"""

from __future__ import annotations

import torch

from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules
from megatron.core.utils import make_viewless_tensor


class VisionStage(VisionModalitySubmodules):
    """One encoder, and on the last stage the projector."""

    share_embeddings_and_output_weights = False
    """Read by the gradient finalization of a pipeline's first and last stage."""

    runs_on_every_rank = True
    """Without tiles it encodes a blank one; so reductions of its gradients overlap its backward."""

    @property
    def pre_process(self) -> bool:
        """Whether this stage takes tiles."""
        return self.is_first_stage

    def forward(
        self,
        encoder_inputs: dict[str, dict[str, torch.Tensor]] | None = None,
        hidden_states: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the stage.

        Args:
            encoder_inputs: of the encoder, on every stage.
            hidden_states: of the stage before; None on the first.

        Returns:
            What the next stage takes, or on the last ``[tokens, H]`` of the language model's width.
        """
        ((name, encoder),) = self.encoders.items()
        output = encoder(**encoder_inputs[name], hidden_states=hidden_states)
        if self.is_last_stage:
            output = self.project_embeddings([output])
        # The schedule frees it once it is sent, and of one tile it would be a view.
        return make_viewless_tensor(output, output.requires_grad, keep_graph=True)
