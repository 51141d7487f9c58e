# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Steps of one optimizer over two modules: in every layout as in plain data parallelism, also where
the encoder is on all ranks of a language model's pipeline.

The model is a linear encoder and a small GPT. Weights and samples are the same in every layout.
"""

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.mimo.bridge.topology import bridge_topology
from megatron.core.models.mimo.colocated_schedule import colocated_forward_backward_with_pp
from megatron.core.models.mimo.config.base_configs import MimoModelConfig
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.optimizer import get_mimo_optimizer
from megatron.core.models.mimo.setup.data_parallel import prepare_for_training
from megatron.core.models.mimo.setup.initialization import initialize_weights, normal
from megatron.core.models.mimo.setup.module_groups import (
    make_modules,
    prepare_process,
    schedule_collection,
)
from megatron.core.models.mimo.setup.teardown import destroy
from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.unit_tests.test_utilities import HAVE_CUDA, Utils, requires_world_size

IMAGES = "images"
SAMPLES, LENGTH, ROWS, HIDDEN, VOCABULARY, IMAGE_TOKEN = 8, 8, 3, 16, 32, 31
STEPS = 3
SETTINGS = OptimizerConfig(optimizer="adam", lr=0.01, clip_grad=0.1, weight_decay=0.0)


class Encoder(MegatronModule):
    """A linear layer and a tanh."""

    def __init__(self, config: TransformerConfig, tp_group: dist.ProcessGroup) -> None:
        super().__init__(config)
        self.tp_group = tp_group
        self.linear = torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Take and return `[samples, ROWS, HIDDEN]`."""
        return self.linear(pixels).tanh()


def model_of(modules) -> MimoModel:
    """Make this rank's stage of the model."""
    common = dict(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        calculate_per_token_loss=True,
    )
    groups, language = modules[IMAGES].groups, modules[LANGUAGE].groups
    stages, stage = language.pp.size(), language.pp.rank()
    config = TransformerConfig(
        **common,
        tensor_model_parallel_size=language.tp.size(),
        pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.float32,
    )
    gpt = dict(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=stage == 0,
        post_process=stage == stages - 1,
        scatter_embedding_sequence_parallel=False,
        pg_collection=language,
    )
    encoder = dict(config=TransformerConfig(**common), tp_group=groups.tp)
    images = ModuleSpec(
        module=VisionModalitySubmodules,
        params=dict(pg_collection=groups),
        submodules=dict(encoders=dict(linear=ModuleSpec(module=Encoder, params=encoder))),
    )
    config = MimoModelConfig(
        language_model_spec=ModuleSpec(module=GPTModel, params=gpt),
        modality_submodules_spec={IMAGES: images},
        special_token_ids={IMAGES: IMAGE_TOKEN},
        module_to_grid_map={name: module.grid for name, module in modules.items()},
    )
    model = MimoModel(config).to(Utils.device)
    model.model_type = ModelType.encoder_or_decoder
    initialize_weights(model, 1, None, own={"*": normal(0.25)})
    return model


def microbatches_of(modules, count: int) -> list[dict[str, object]]:
    """Return this rank's microbatches; samples have different numbers of tokens with a loss."""
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(IMAGE_TOKEN, (SAMPLES, LENGTH + 1), generator=random)
    tokens[:, :ROWS] = IMAGE_TOKEN
    pixels = torch.randn(SAMPLES, ROWS, HIDDEN, generator=random)
    mask = torch.arange(LENGTH) >= ROWS + torch.arange(SAMPLES)[:, None] % (LENGTH - ROWS)
    topology = bridge_topology(modules[IMAGES].grid, modules[LANGUAGE].grid)
    each = SAMPLES // topology.atoms

    def parts(values: torch.Tensor, atoms: range) -> tuple[torch.Tensor, ...]:
        mine = values[atoms.start * each : atoms.stop * each].to(Utils.device)
        return mine.chunk(count)

    consumed = topology.consumes(Utils.rank)
    text = parts(tokens, consumed), parts(mask.float(), consumed)
    rows = parts(pixels, topology.encodes(Utils.rank))
    places = torch.arange(LENGTH, device=Utils.device)
    return [
        dict(
            input_ids=ids[:, :-1],
            labels=ids[:, 1:],
            loss_mask=own_mask,
            position_ids=places.expand(len(ids), -1),
            modality_inputs={IMAGES: dict(linear=dict(pixels=own))},
        )
        for ids, own_mask, own in zip(*text, rows, strict=True)
    ]


def steps(encoder: dict[str, int], language: dict[str, int], count: int) -> list[float]:
    """Losses and gradient norms of some steps on one batch of `count` microbatches.

    Axes that are not named have size 1.
    """
    Utils.initialize_distributed()
    layouts = {}
    for name, own in ((IMAGES, encoder), (LANGUAGE, language)):
        sizes = dict.fromkeys(("tp", "cp", "dp", "pp", "ep"), 1) | own
        layouts[name] = SimpleNamespace(**sizes, etp=sizes["tp"], expt_dp=sizes["dp"]), 0
    modules = make_modules(layouts, "nccl" if HAVE_CUDA else "gloo")
    tracker = dict(te_rng_tracker=False, inference_rng_tracker=False, cuda_graph_impl="none")
    prepare_process(modules, Namespace(seed=1, **tracker))
    model = model_of(modules)
    prepare_for_training([model], modules, DistributedDataParallelConfig())
    optimizer, found = get_mimo_optimizer([model], SETTINGS), []
    for _ in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reports = colocated_forward_backward_with_pp(
            model,
            iter(microbatches_of(modules, count)),
            count,
            seq_length=LENGTH,
            micro_batch_size=SAMPLES // language.get("dp", 1) // count,
            pg_collection=schedule_collection(modules),
        )
        stepped, norm, _ = optimizer.step()
        assert stepped
        loss = sum((each["loss_reduced"] for each in reports), torch.zeros((), device=Utils.device))
        dist.all_reduce(loss)
        found += [float(loss) / language.get("tp", 1), float(norm)]
    destroy([model], modules)
    return found


@requires_world_size(2)
def test_steps_are_those_of_plain_data_parallelism():
    expected = steps(dict(dp=2), dict(dp=2), 1)
    assert expected[0] != pytest.approx(expected[2], rel=1e-3), "weights move"
    for encoder, language, count in (
        (dict(dp=2), dict(tp=2), 1),
        (dict(tp=2), dict(dp=2), 1),
        (dict(dp=2), dict(pp=2), 2),
        (dict(tp=2), dict(pp=2), 4),
    ):
        assert steps(encoder, language, count) == pytest.approx(expected, rel=1e-5)
