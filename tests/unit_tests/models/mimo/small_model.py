# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A MimoModel of a linear encoder and a small GPT, with a batch, in any layout without CP."""

import contextlib
from argparse import Namespace
from collections.abc import Iterator
from types import SimpleNamespace

import torch
from torch.distributed import ProcessGroup

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.mimo.bridge.topology import bridge_topology
from megatron.core.models.mimo.config.base_configs import MimoModelConfig
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.setup.data_parallel import prepare_for_training
from megatron.core.models.mimo.setup.initialization import initialize_weights, normal
from megatron.core.models.mimo.setup.module_groups import make_modules, prepare_process
from megatron.core.models.mimo.setup.teardown import destroy
from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.unit_tests.test_utilities import HAVE_CUDA, Utils

IMAGES = "images"
SAMPLES, LENGTH, ROWS, HIDDEN, VOCABULARY, IMAGE_TOKEN = 8, 8, 3, 16, 32, 31


class Encoder(MegatronModule):
    """A linear layer and a tanh."""

    def __init__(self, config: TransformerConfig, tp_group: ProcessGroup) -> None:
        super().__init__(config)
        self.tp_group = tp_group
        self.linear = torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Take and return `[samples, ROWS, HIDDEN]`."""
        return self.linear(pixels).tanh()


@contextlib.contextmanager
def trained(encoder: dict[str, int], language: dict[str, int]) -> Iterator[SimpleNamespace]:
    """Provide ``model``, ``modules`` and this rank's ``microbatches(count)``.

    Weights and samples are the same in every layout. Axes that are not named have size 1.
    """
    Utils.initialize_distributed()
    layouts = {name: (_sizes(**own), 0) for name, own in ((IMAGES, encoder), (LANGUAGE, language))}
    modules = make_modules(layouts, "nccl" if HAVE_CUDA else "gloo")
    tracker = dict(te_rng_tracker=False, inference_rng_tracker=False, cuda_graph_impl="none")
    prepare_process(modules, Namespace(seed=1, **tracker))
    stages = [_model(modules)]
    prepare_for_training(stages, modules, DistributedDataParallelConfig())
    run = SimpleNamespace(
        model=stages[0],
        modules=modules,
        microbatches=lambda count: _microbatches(modules, count),
    )
    try:
        yield run
    finally:
        vars(run).clear()  # also what the caller has added
        destroy(stages, modules)


def _sizes(**own: int) -> SimpleNamespace:
    sizes = dict.fromkeys(("tp", "cp", "dp", "pp", "ep"), 1) | own
    return SimpleNamespace(**sizes, etp=sizes["tp"], expt_dp=sizes["dp"])


def _model(modules) -> MimoModel:
    groups, language = modules[IMAGES].groups, modules[LANGUAGE].groups
    common = dict(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        calculate_per_token_loss=True,
    )
    stages, stage = language.pp.size(), language.pp.rank()
    parallel = dict(
        tensor_model_parallel_size=language.tp.size(),
        pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.float32,
    )
    gpt = dict(
        config=TransformerConfig(**common, **parallel),
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=stage == 0,
        post_process=stage == stages - 1,
        scatter_embedding_sequence_parallel=False,
        pg_collection=language,
    )
    own = dict(config=TransformerConfig(**common), tp_group=groups.tp)
    encoder = ModuleSpec(module=Encoder, params=own)
    images = ModuleSpec(
        module=VisionModalitySubmodules,
        params=dict(pg_collection=groups),
        submodules=dict(encoders=dict(linear=encoder)),
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


def _microbatches(modules, count: int) -> list[dict[str, object]]:
    """Return this rank's microbatches; samples have different numbers of tokens with a loss."""
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(IMAGE_TOKEN, (SAMPLES, LENGTH + 1), generator=random)
    tokens[:, :ROWS] = IMAGE_TOKEN
    pixels = torch.randn(SAMPLES, ROWS, HIDDEN, generator=random)
    mask = torch.arange(LENGTH) >= ROWS + torch.arange(SAMPLES)[:, None] % (LENGTH - ROWS)
    topology = bridge_topology(modules[IMAGES].grid, modules[LANGUAGE].grid)
    each = SAMPLES // topology.atoms

    def parts(values: torch.Tensor, atoms: range) -> list[torch.Tensor]:
        mine = values[atoms.start * each : atoms.stop * each].to(Utils.device)
        return list(mine.chunk(count))

    consumed, encoded = topology.consumes(Utils.rank), topology.encodes(Utils.rank)
    text = zip(*(parts(one, consumed) for one in (tokens, mask.float())), strict=True)
    places = torch.arange(LENGTH, device=Utils.device)
    return [
        dict(
            input_ids=ids[:, :-1],
            labels=ids[:, 1:],
            loss_mask=own_mask,
            position_ids=places.expand(len(ids), -1),
            modality_inputs={IMAGES: dict(linear=dict(pixels=own))},
        )
        for (ids, own_mask), own in zip(text, parts(pixels, encoded), strict=True)
    ]
