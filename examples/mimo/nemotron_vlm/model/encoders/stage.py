# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""An encoder's module: encoder and projector, as stages of their own pipeline.

Megatron's modality submodules run their encoders on the first stage only. Here every stage runs
its layers: the first on inputs, the others on the hidden states of the stage before. The projector
of Nemotron's encoders is an RMSNorm and a squared-ReLU MLP.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from examples.mimo.nemotron_vlm.model.encoders.hugging_face import Part, Table, TensorRows
from examples.mimo.nemotron_vlm.model.layer_specs import LayerSpecs
from megatron.core.activations import squared_relu
from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules
from megatron.core.models.vision.multimodal_projector import MultimodalProjector
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import MegatronModule
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import make_viewless_tensor


class EncoderStage(VisionModalitySubmodules):
    """A pipeline stage of one encoder, with the projector on the last stage."""

    share_embeddings_and_output_weights = False
    """Megatron's gradient finalization reads it on a pipeline's first and last stage."""

    @property
    def skips_blank(self) -> bool:
        """Whether a rank may skip a blank input where its peers wait for nothing: in FP8, they
        reduce the scales of each forward.
        """
        return not any(encoder.config.fp8 for encoder in self.encoders.values())

    @property
    def runs_on_every_rank(self) -> bool:
        """Whether the stage, without an input, encodes a blank one at a step's ends, and drops its
        rows. Then every parameter gets a gradient of zero, this rank takes part in its peers'
        collectives, and gradient reductions overlap the backward. For an encoder of inputs that few
        samples have, the blank ones would take longer than the reductions.
        """
        has_few = any(getattr(each, "has_few_inputs", False) for each in self.encoders.values())
        return not (has_few and self.skips_blank)

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
            if not any(map(len, inputs.values())):
                output = output[:0]  # only now: norm kernels take no empty tensors
        # The schedule frees the output once it is sent, and for one input it would be a view.
        return make_viewless_tensor(output, output.requires_grad, keep_graph=True)


class NormedProjector(MegatronModule):
    """RMSNorm and a squared-ReLU MLP, from encoder features [n, input_size] to [n, H].

    Args:
        config: configuration of the MLP; ``hidden_size`` is the language model's.
        input_size: features of one row.
    """

    def __init__(
        self,
        config: TransformerConfig,
        norm: type,
        submodules: MLPSubmodules,
        input_size: int,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config=config)
        self.tp_group = pg_collection.tp
        self.norm = norm(config=config, hidden_size=input_size, eps=config.layernorm_epsilon)
        self.mlp = MultimodalProjector(
            config, submodules, "mlp", input_size, pg_collection=pg_collection
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Map [n, input_size] to [n, H]."""
        return self.mlp(self.norm(features))


def projector_config(
    shared: Mapping[str, Any], width: int, ffn: int, heads: int
) -> TransformerConfig:
    """Make a projector's configuration.

    Args:
        heads: any number that tp divides, for Megatron's check.
    """
    return TransformerConfig(
        num_layers=1,
        hidden_size=width,
        num_attention_heads=heads,
        kv_channels=1,
        ffn_hidden_size=ffn,
        normalization="RMSNorm",
        activation_func=squared_relu,
        add_bias_linear=False,
        **shared | {"fp8": None},  # only transformer blocks enter FP8
    )


def stage_spec(
    key: str,
    encoder: ModuleSpec,
    features: int,
    config: TransformerConfig,
    specs: LayerSpecs,
    groups: ProcessGroupCollection | None,
) -> ModuleSpec:
    """Return the spec of an `EncoderStage`.

    Args:
        encoder: its spec; it returns rows of so many ``features``.
        groups: the module's process groups; None on ranks outside of its grid.
    """
    params = dict(
        config=config,
        norm=specs.projector_norm,
        submodules=specs.projector_mlp,
        input_size=features,
        pg_collection=groups,
    )
    projector = ModuleSpec(module=NormedProjector, params=params)
    return ModuleSpec(
        module=EncoderStage,
        params={"pg_collection": groups},
        submodules={"encoders": {key: encoder}, "input_projections": [projector]},
    )


@dataclass(frozen=True)
class ProjectorPart(Part):
    """A projector in Hugging Face models; its entry has the inner width as ``projector_ffn``.

    tensors: names of the norm's weight and the linear layers'. width: field of the configuration
    that has the inner width.
    """

    tensors: tuple[str, str, str] = ("0.weight", "1.weight", "3.weight")
    width: str = "projector_hidden_size"

    @property
    def same(self) -> dict[str, str]:
        """See `Part`."""
        return {"projector_ffn": self.width}

    def table(self, _sizes: Any) -> Table:
        linear = (f"mlp.encoder.linear_fc{number}.weight" for number in (1, 2))
        pairs = zip(("norm.weight", *linear), self.tensors, strict=True)
        return {ours: (TensorRows(theirs),) for ours, theirs in pairs}
