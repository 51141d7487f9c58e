# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A resume compares every setting of the model, except those that may change."""

from argparse import Namespace
from copy import deepcopy
from pathlib import Path

import pytest

from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.loop.resume_rules import FREE, MODEL, check_resume
from examples.mimo.nemotron_vlm.loop.terminal import goes_on
from examples.mimo.nemotron_vlm.options.run import Run
from tests.unit_tests.examples.nemotron_vlm import preloaded  # noqa: F401 (its parser is quick)

FREE_BY_NAME = "bf16 tensor_model_parallel_size moe_aux_loss_coeff recompute_granularity"


@pytest.fixture(scope="module")
def args() -> Namespace:
    found = Run.of(["--model", "tiny-omni"], 1).args
    found.load, found.data_fingerprint = "saved", "samples"
    return found


def saved_with(args: Namespace, **others) -> Namespace:
    return Namespace(**deepcopy(vars(args)) | others)


def test_each_setting_of_layers_and_each_size_of_an_encoder_is_compared(args):
    check_resume(args, saved_with(args))
    check_resume(args, saved_with(args, **dict.fromkeys(FREE_BY_NAME.split(), "other")))
    settings = {name for name in MODEL if hasattr(args, name) and not FREE.fullmatch(name)}
    assert {"moe_router_num_groups", "moe_router_pre_softmax", "rotary_interleaved"} <= settings
    assert {"no_rope_freq", "layernorm_epsilon", "window_size", "quick_geglu"} <= settings
    sizes = {f"{encoder}.{size}" for encoder, of in args.encoder_sizes.items() for size in of}
    assert {"images.pixel_mean", "sound.num_mel_bins"} <= sizes
    for name in settings | sizes:
        saved = saved_with(args)
        encoder, _, size = name.rpartition(".")
        (saved.encoder_sizes[encoder] if encoder else vars(saved))[size] = "other"
        with pytest.raises(UserError, match=f"another model was saved there .*{name} other → "):
            check_resume(args, saved)
    saved = saved_with(args)
    del saved.encoder_sizes["sound"]
    with pytest.raises(UserError, match="another model .*sound.* None → "):
        check_resume(args, saved)


@pytest.mark.parametrize(
    ("directory", "finetune", "expected"),
    [
        ("runs/iter_0000002", False, True),
        ("link/iter_0000002", False, True),
        ("runs/iter_0000004", False, True),  # a link to a folder elsewhere
        ("runs/iter_0000002", True, False),
        ("runs/base/iter_0000002", False, False),  # a pretrained one
        ("runs/release", False, False),
    ],
)
def test_a_run_goes_on_from_a_step_in_the_folder_that_it_loads(
    directory, finetune, expected, tmp_path
):
    (tmp_path / "runs").mkdir()
    (tmp_path / "link").symlink_to("runs")
    (tmp_path / "runs/iter_0000004").symlink_to(tmp_path)
    args = Namespace(load=str(tmp_path / "runs"), finetune=finetune)
    assert goes_on(args, str(Path(tmp_path, directory))) == expected


@pytest.mark.parametrize(
    ("saved", "reason"),
    [
        ({"no_save_optim": True}, "was left out by --no-save-optim; --no-load-optim goes"),
        # Adam would take what bf16 weights lack of master weights for them.
        ({"store_param_remainders": None}, "another form .store_param_re.*; --no-load-optim goes"),
    ],
)
def test_an_optimizers_state_that_is_not_there_or_half_is_refused(saved, reason):
    args = Run.of(["--load", "saved", "--bf16"], 1).args
    args.data_fingerprint, args.use_precision_aware_optimizer = "", True
    before = saved_with(args)
    check_resume(args, before)
    vars(before).update(saved)
    with pytest.raises(UserError, match=reason):
        check_resume(args, before)
    args.no_load_optim = True
    check_resume(args, before)
