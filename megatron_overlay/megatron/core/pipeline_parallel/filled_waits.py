# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Pipeline communicator that runs other work before a rank waits for its neighbours."""

import copy
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator


def open_links(pp_group: dist.ProcessGroup, config: ModelParallelConfig) -> None:
    """Use each link between neighbours once; collective over the pipeline.

    The first use of a link, even a send, blocks a rank until the other end uses it too.
    """
    links = FilledWaits(pp_group, config, lambda _: None)
    token = torch.zeros(1, dtype=config.pipeline_dtype, device=torch.cuda.current_device())
    links.send_forward_backward_recv_forward_backward(token, token, True, True, token.shape)
    links.finish()


class FilledWaits(P2PCommunicator):
    """Upstream's communicator, with other work between the start of a receive and the wait for it.

    A call starts all its sends and receives at once, as upstream does, in upstream's order without
    batching, on which both ends of a link agree. It then waits for its receives only: a send
    continues during the rank's next work, even if its receiver is late.

    Args:
        config: the language model's configuration, without ``variable_seq_lengths``, which makes
            neighbours wait for each other's shapes first.
        work: function called before each wait, with ``"recv_prev"`` or ``"recv_next"``.
    """

    def __init__(
        self, pp_group: dist.ProcessGroup, config: ModelParallelConfig, work: Callable[[str], None]
    ) -> None:
        config = copy.copy(config)
        config.batch_p2p_comm = False
        super().__init__(pp_group, config)
        self._work, self._has_graphs = work, config.cuda_graph_impl != "none"
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        self._most = 4 * pp_group.size() * (config.virtual_pipeline_model_parallel_size or 1)

    def _communicate(self, *, tensor_send_next, tensor_send_prev, wait_on_reqs=True, **others):
        # The schedule frees the data of tensors it has sent, and a CUDA graph overwrites its own.
        sent = {
            name: tensor.detach().clone() if self._has_graphs else tensor.detach()
            for name, tensor in (("send_next", tensor_send_next), ("send_prev", tensor_send_prev))
            if tensor is not None
        }
        from_prev, from_next, requests = super()._communicate(
            tensor_send_next=sent.get("send_next"),
            tensor_send_prev=sent.get("send_prev"),
            wait_on_reqs=False,
            **others,
        )
        self._sent.extend((requests.pop(name), tensor) for name, tensor in sent.items())
        while self._sent and (len(self._sent) > self._most or self._sent[0][0].is_completed()):
            self._sent.popleft()[0].wait()
        waits = {
            name: SimpleNamespace(wait=partial(self._wait, name, request))
            for name, request in requests.items()
        }
        if not wait_on_reqs:
            return from_prev, from_next, waits
        for wait in waits.values():
            wait.wait()
        return from_prev, from_next, None

    def _wait(self, name: str, request: dist.Work) -> None:
        self._work(name)
        request.wait()

    def finish(self) -> None:
        """Wait for the sends that are still under way."""
        while self._sent:
            self._sent.popleft()[0].wait()
