# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The language model's loss: over the words that there are, and on GPUs by a kernel.

The kernel is flash-linear-attention's. Megatron's fused loss is five kernels, which keep an fp32
softmax and round the gradients of the logits to bfloat16. This one reads the logits once in each
direction, keeps one number a token, and its gradients have the precision of the logits.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from megatron.core.models.hybrid.hybrid_model import HybridModel


def has_loss_kernel() -> bool:
    """Return whether flash-linear-attention is installed."""
    return find_spec("fla") is not None


class HybridModelWithLossKernel(HybridModel):
    """A hybrid model on GPUs whose loss the kernel computes."""

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Compute the cross entropy of each token; a collective of the TP ranks.

        Args:
            labels: ``[b, s]``, integers; a token of label -100 has no loss.
            logits: ``[s, b, vocabulary/tp]``.

        Returns:
            ``[b, s]``, fp32.
        """
        from fla.modules.fused_cross_entropy import cross_entropy_loss

        tp = self.pg_collection.tp
        losses, _ = cross_entropy_loss(
            logits.flatten(0, 1),
            labels.t().flatten(),
            process_group=tp if tp.size() > 1 else None,
        )
        return losses.view(logits.shape[:2]).t().contiguous()


def leave_out_padding(model: HybridModel, vocab_size: int) -> None:
    """Give the logits of padded rows of the vocabulary the least number, in place.

    No loss, prediction or gradient then depends on these rows. Infinity would not do: the kernels
    subtract a rank's largest logit, and a rank may have padded rows alone.

    Args:
        model: has the rows of its TP rank, of a vocabulary that is padded for all of them.
        vocab_size: number of the first rows, which have words.
    """
    if not hasattr(model, "output_layer"):
        return
    tp, held = model.pg_collection.tp, model.output_layer.output_size_per_partition
    words = max(0, vocab_size - tp.rank() * held)

    def fill(_layer: torch.nn.Module, _inputs: object, output: tuple[Tensor, None]) -> None:
        output[0][..., words:] = torch.finfo(output[0].dtype).min

    if words < held:
        model.output_layer.register_forward_hook(fill)
