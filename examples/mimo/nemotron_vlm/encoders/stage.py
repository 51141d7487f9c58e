# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""An encoder's module: encoder and projector, as stages of their own pipeline.

Megatron's modality submodules run their encoders on the first stage only. Here every stage runs
its layers: the first on inputs, the others on the hidden states of the stage before.
"""

from __future__ import annotations

import torch

from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.utils import make_viewless_tensor


class EncoderStage(VisionModalitySubmodules):
    """A pipeline stage of one encoder, with the projector on the last stage."""

    share_embeddings_and_output_weights = False
    """Megatron's gradient finalization reads it on a pipeline's first and last stage."""

    runs_on_every_rank = True
    """Without an input, the stage encodes a blank one and drops its rows. So every parameter gets a
    gradient of zero, this rank takes part in its peers' collectives in the backward, and gradient
    reductions overlap the backward."""

    @property
    def pre_process(self) -> bool:
        """Whether this stage takes inputs."""
        return self.is_first_stage

    def forward(
        self,
        encoder_inputs: dict[str, dict[str, torch.Tensor]] | None = None,
        hidden_states: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the stage.

        Args:
            encoder_inputs: inputs of the encoder by name, on every stage.
            hidden_states: output of the stage before; None on the first.

        Returns:
            Hidden states for the next stage; on the last stage, embeddings ``[rows, H]`` of the
            language model's width.
        """
        ((name, encoder),) = self.encoders.items()
        inputs = encoder_inputs[name]
        received = {} if hidden_states is None else {"hidden_states": hidden_states}
        output = encoder(**inputs, **received)
        if self.is_last_stage:
            output = self.project_embeddings([output])
            if not len(next(iter(inputs.values()))):
                output = output[:0]  # only now: norm kernels take no empty tensors
        # The schedule frees the output once it is sent, and for one input it would be a view.
        return make_viewless_tensor(output, output.requires_grad, keep_graph=True)


def stage_spec(
    key: str, encoder: ModuleSpec, projector: ModuleSpec, groups: ProcessGroupCollection | None
) -> ModuleSpec:
    """Return the spec of an `EncoderStage` with this encoder, by its ``key``, and projector."""
    return ModuleSpec(
        module=EncoderStage,
        params={"pg_collection": groups},
        submodules={"encoders": {key: encoder}, "input_projections": [projector]},
    )
