# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A model that the program trained as a whole Hugging Face directory, with nothing to copy from.

The checkpoint has the options of its run: they say what the model's sizes are, how inputs were
prepared, and which tokenizer wrote the texts.
"""

import json
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from conversion.directions import MODEL, preset_of_run, to_hugging_face
from conversion.rows import parts_of
from conversion.torch_dist import Checkpoint
from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.energon.chat_template import DEFAULT_TEMPLATE
from examples.mimo.nemotron_vlm.model.names import FIRST_DIGIT, IMAGES, SOUND
from examples.mimo.nemotron_vlm.model.presets import VLMPreset, write_preset

INPUTS = "inputs.json"
"""File of how a trained model's inputs were prepared; names are those of the program's options."""

PREPARED = ("prompt", "image_token", "max_tiles", "thumbnail", "dynamic_resolution")
PREPARED += ("video_frames", "video_fps")

ASKED = "chat_template_kwargs"
"""Arguments with which the chat template asks as it did in training."""

DIGITS = "<s>{% for message in messages %}{{ message['content'] }} {% endfor %}"
"""Chat template of the digits that the program makes itself: ``read`` is the only question."""


def export(checkpoint: Path, out: Path) -> None:
    """Write a trained model as a Hugging Face directory.

    Args:
        checkpoint: directory of the program's checkpoint, or of one iteration.

    Raises:
        UserError: the checkpoint does not say what it is, transformers has no such model, or the
            tokenizer is no longer there.
    """
    saved = Checkpoint(checkpoint)
    args = saved.options
    preset = preset_of_run(args)
    with tempfile.TemporaryDirectory() as directory:
        like = Path(directory)
        _tokenizer(args, like)
        their_config(preset, args.token_ids).save_pretrained(like)
        write_preset(preset, like / MODEL)
        inputs = {name: getattr(args, name) for name in PREPARED}
        inputs[ASKED] = getattr(args, ASKED)
        if not args.tokenizer_model:
            inputs["thumbnail"] = False  # strips of digits are tiles side by side, and no more
        (like / INPUTS).write_text(json.dumps(inputs, indent=2) + "\n")
        to_hugging_face(saved.directory, like, out)


def their_config(preset: VLMPreset, token_ids: Mapping[str, int]):
    """Return transformers' configuration of a model of the program.

    Args:
        token_ids: token of each encoder's rows.

    Raises:
        UserError: transformers has no such model.
    """
    from transformers.models.nemotron_h_omni import NemotronH_Omni_Reasoning_V3_Config

    if not preset.is_in_transformers:
        raise UserError(f"{preset.name}: transformers' nemotron_h has no gated delta nets")
    of_parts: dict = {}
    for part, sizes in parts_of(preset):
        of_parts.setdefault(part.config, {}).update(part.fields(sizes))
    of_parts["text_config"] |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return NemotronH_Omni_Reasoning_V3_Config(
        **of_parts.pop(None),
        **{"audio_config": None} | of_parts,
        vision_hidden_size=preset.images.hidden,
        video_temporal_patch_size=of_parts["vision_config"]["video_temporal_patch_size"],
        image_token_id=token_ids[IMAGES],
        audio_token_id=token_ids.get(SOUND),
    )


def _tokenizer(args: Namespace, out: Path) -> None:
    """Write the tokenizer of the run's texts; the program's own digits are ids without one."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if args.tokenizer_model:
        given = Path(args.tokenizer_model)
        if not given.is_dir():
            raise UserError(f"the run's tokenizer {given} is no longer there")
        tokenizer = AutoTokenizer.from_pretrained(given, local_files_only=True)
        tokenizer.chat_template = tokenizer.chat_template or DEFAULT_TEMPLATE
        tokenizer.save_pretrained(out)
        return
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    # Ids are those of data/sample.py, and of the entry of sound.
    first = ["<pad>", "<s>", "</s>", "<image>", "read", "<so_embedding>", "<unk>"]
    words = {word: number for number, word in enumerate(first)}
    words |= {str(digit): FIRST_DIGIT + digit for digit in range(10)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [AddedToken(word, special=True) for word in first if word != "read"]
    tokenizer.add_special_tokens(special)
    named = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=DIGITS, **named)
    fast.save_pretrained(out)
