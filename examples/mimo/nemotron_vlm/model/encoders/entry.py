# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The interface of an encoder's entry, the one place that knows the encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from megatron.core.models.mimo.setup.initialization import Draw
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

if TYPE_CHECKING:
    from examples.mimo.common.layout import Layout
    from examples.mimo.nemotron_vlm.model.encoders.hugging_face import Part
    from examples.mimo.nemotron_vlm.model.layer_specs import LayerSpecs

Configs = dict[str, TransformerConfig]
"""Configurations of an encoder and its projector, by names of the entry's own."""


class Encoder:
    """An encoder with its projector.

    A subclass is a frozen dataclass, whose fields are sizes: a preset holds its instances, and a
    model's file has the fields. Options, data loading, model, planner and converter iterate over
    the entries of a preset. A *row* is one embedding in the language model's sequence; an *input*
    is what the encoder takes as a whole, such as an image tile, and becomes some rows.
    """

    name: ClassVar[str]
    """Name of the module in grids, batches, checkpoints and options."""

    key: ClassVar[str]
    """Name of the encoder within its module, in batches and checkpoints."""

    token: ClassVar[int]
    """Id of the token that each row replaces, unless the data set has another."""

    usual: ClassVar[int] = 1
    """Size of an input by which the planner counts where it has no data."""

    plural: ClassVar[str]
    """A word for the inputs."""

    takes_fp8: ClassVar[bool] = False
    """Whether ``configs`` takes the fields of FP8 for the encoder's layers."""

    initial: ClassVar[Mapping[str, Draw]] = {}
    """Draws of initial weights by patterns of names within the module; other parameters follow the
    rules of ``setup/initialization.py``."""

    layers: int
    """Layers, all alike: parameters below ``decoder.layers.N`` or ``encoder.layers.N``."""

    def rows(self, sizes: np.ndarray) -> np.ndarray:
        """Return the rows that inputs become, int64 [inputs].

        Args:
            sizes: int64 [inputs], as the data set's `SampleSource.sizes` gives them.
        """
        raise NotImplementedError

    def work(self, sizes: np.ndarray, width: int) -> dict[str, np.ndarray]:
        """Return the operations of forward and backward by kind, int64 [inputs] each.

        Args:
            sizes: sizes of the inputs, int64 [inputs].
            width: the language model's hidden size.
        """
        raise NotImplementedError

    def operations(self, sizes: np.ndarray, width: int) -> np.ndarray:
        """Return the operations of forward and backward, int64 [inputs]; see `work`."""
        return sum(self.work(sizes, width).values())

    def collate(
        self, parts: Sequence[Sequence[torch.Tensor]]
    ) -> dict[str, torch.Tensor | np.ndarray]:
        """Join inputs, maybe none, to the encoder's keyword arguments.

        Each is a tensor, or an array that stays on the host, whose first dim has length 0 without
        any input. The schedule concatenates those of several microbatches.

        Args:
            parts: inputs of one sample after another, slices of `SampleSource.inputs`.
        """
        raise NotImplementedError

    def divided(self) -> dict[str, int]:
        """Return the sizes that tensor parallelism divides, by what they count."""
        raise NotImplementedError

    def staged(self) -> dict[str, int]:
        """Return the sizes that the stages of a pipeline divide, by what they count."""
        return {"layers": self.layers}

    def configs(self, shared: Mapping[str, Any], width: int) -> Configs:
        """Make the configurations of encoder and projector.

        Args:
            shared: fields that they take from the language model and the layout.
            width: the language model's hidden size.
        """
        raise NotImplementedError

    def spec(
        self, configs: Configs, specs: LayerSpecs, groups: ProcessGroupCollection | None
    ) -> ModuleSpec:
        """Return the spec of the module, an `EncoderStage`.

        The encoder takes what `collate` returns, and ``hidden_states`` on a pipeline's later
        stages; it returns ``[rows, features]``. Without an input it encodes a blank one.

        Args:
            configs: result of `configs`.
            specs: layer implementations.
            groups: the module's process groups; None on ranks outside of its grid.
        """
        raise NotImplementedError

    def kept(
        self, sizes: np.ndarray, layout: Layout, first: bool = True, last: bool = True
    ) -> np.ndarray:
        """Return the elements that a rank of one stage keeps of inputs for the backward, [inputs].

        Args:
            sizes: sizes of the inputs, int64 [inputs].
            layout: the encoder's layout.
            first, last: whether the stage is its pipeline's first, its last.
        """
        raise NotImplementedError

    def reduced(self, sizes: np.ndarray) -> np.ndarray:
        """Return the elements of inputs that an all-reduce over TP ranks sums, int64 [inputs]."""
        raise NotImplementedError

    def parts(self) -> tuple[Part, ...]:
        """Return the parts that Hugging Face models have of it."""
        return ()
