# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A model of transformers, on the inputs that the program's encoders take, and its answers."""

import json
import re
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from einops import rearrange
from torch.nn.utils.rnn import pad_sequence

from conversion.nemotron_h import TIME_STEP_MIN
from conversion.published import Published, config_of
from conversion.whole_models import ASKED, INPUTS, MODEL
from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.data import make_encoder
from examples.mimo.nemotron_vlm.energon import conversation
from examples.mimo.nemotron_vlm.energon.errors import BadConversation
from examples.mimo.nemotron_vlm.energon.records import Medium, Record
from examples.mimo.nemotron_vlm.model.encoders.radio.entry import Radio
from examples.mimo.nemotron_vlm.model.names import IMAGES, SOUND
from examples.mimo.nemotron_vlm.model.presets import find_preset, nano_omni_30b_a3b

MAY_LACK = re.compile(
    "lambda1$|summary_idxs$|num_batches_tracked$|norm_(mean|std)$"
    "|feature_extractor|video_patch_projection"
)
"""Tensors that the program's models do not have; transformers fills them as they have to be. The
last embeds video, which is refused for such a model."""


ADAPTERS = "adapter_config.json"
"""File of a directory of peft's adapters."""


def base_of(directory: Path) -> Path:
    """Return the directory of the base of peft's adapters, or ``directory`` if it has no adapters.

    Raises:
        UserError: the base is not there.
    """
    if not (directory / ADAPTERS).is_file():
        return directory
    base = json.loads((directory / ADAPTERS).read_text()).get("base_model_name_or_path")
    if not base or not Path(base).is_dir():
        raise UserError(
            f"{directory / ADAPTERS}: base_model_name_or_path is {base}: write the directory of "
            "the base there"
        )
    return Path(base)


def their_model(directory: Path, as_ours: bool = False):
    """Load a whole VLM, or one with peft's adapters; on a GPU, in bf16.

    Args:
        as_ours: on the CPU in fp32, with Mamba-2's time steps as they are.

    Raises:
        UserError: the directory lacks tensors, or the adapters' base is not there.
    """
    if (base := base_of(directory)) != directory:
        from peft import PeftModel

        model = their_model(base, as_ours)
        PeftModel.from_pretrained(model, directory)
        return model.eval()
    from transformers.models.nemotron_h_omni import NemotronH_Omni_Reasoning_V3

    transformers.logging.set_verbosity_error()  # its hints about kernels; lacks are looked for
    transformers.logging.disable_progress_bar()
    config = config_of(directory)
    if as_ours:
        config.text_config.time_step_min = TIME_STEP_MIN
    on_gpu = not as_ours and torch.accelerator.is_available()
    dtype = torch.float32 if as_ours else torch.bfloat16 if on_gpu else "auto"
    how = {"config": config, "dtype": dtype, "output_loading_info": True}
    model, found = NemotronH_Omni_Reasoning_V3.from_pretrained(directory, **how)
    if lacking := [name for name in found["missing_keys"] if not MAY_LACK.search(name)]:
        raise UserError(f"{directory} lacks {', '.join(lacking)}")
    return model.eval().to("cuda" if on_gpu else "cpu")


def embedded(
    model, images: Radio, ids: torch.Tensor, inputs: Mapping[int, Iterable[torch.Tensor]]
) -> torch.Tensor:
    """Return embeddings of tokens [n, hidden], with the rows of inputs in their places.

    Args:
        images: the program's encoder of images.
        ids: [n].
        inputs: as `their_rows` takes them, by the token that their rows replace.
    """
    ids = ids.to(model.device)
    found = model.get_input_embeddings()(ids)
    for token, made in inputs.items():
        if rows := [their_rows(model, images, each) for each in made]:
            found[ids == token] = torch.cat(rows).to(found.dtype)
    return found


def their_rows(model, images: Radio, made: torch.Tensor) -> torch.Tensor:
    """Return the rows that transformers' encoder makes of an input.

    Args:
        images: the program's encoder of images.
        made: patches of an image or a clip, as `PatchGrids` and `ClipGrids` cut them, or a sound.
    """
    if made.ndim == 1:
        bins = model.config.audio_config.num_mel_bins
        heard = transformers.ParakeetFeatureExtractor(bins)([made.numpy()], sampling_rate=16000)
        given = heard["input_features"], heard["attention_mask"]
        return model.get_audio_features(*given).pooler_output
    mean, std = (torch.tensor(each)[:, None] for each in (images.pixel_mean, images.pixel_std))
    pixels = made.unflatten(-1, (-1, len(mean), images.patch**2))
    patches = ((pixels / 255 - mean) / std).flatten(-3).to(model.device)
    if made.ndim == 4:
        cut = "n h w (t c y x) -> n (t c) (h y) (w x)"
        sides = {"t": images.tubelet, "y": images.patch, "x": images.patch}
        clip = rearrange(patches, cut, **sides)[None]
        return torch.cat(list(model.get_video_features(clip).pooler_output))
    grid = torch.tensor([made.shape[:2]], device=model.device)
    return model.get_image_features(patches.flatten(0, 1), grid).pooler_output[0]


def question_of(text: str, files: list[Medium]) -> Record:
    """Return a question with its media; media of one kind keep the order of the files."""
    rest = {kind: [f for f in files if f.kind == kind] for kind in conversation.PLACEHOLDERS}
    turns = [conversation.Turn("user", (text,)), conversation.Turn("assistant", "-")]
    placed, kinds = conversation.place_media(turns, {kind: len(rest[kind]) for kind in rest})
    return Record(placed[:1], [rest[kind].pop(0) for kind in kinds])


class Conversation:
    """A conversation with a model of transformers.

    Args:
        given: a Hugging Face directory with a tokenizer; and, if the program trained the model,
            with the model's sizes and how inputs were prepared. Or peft's adapters of such a base.
        arguments: of the chat template; by default those that ask as the training did.

    Raises:
        UserError: it lacks a tokenizer, or tensors.
    """

    def __init__(self, given: Path, arguments: dict[str, Any] | None = None) -> None:
        directory = base_of(given)
        inputs = {"prompt": "", "image_token": "<image>", "dynamic_resolution": True}
        inputs |= {"video_frames": None, "video_fps": None, "tokenizer_model": str(directory)}
        if (directory / INPUTS).is_file():
            inputs |= json.loads((directory / INPUTS).read_text())
            preset = find_preset(str(directory / MODEL))
        else:
            preset = Published(directory, nano_omni_30b_a3b()).preset
        self._arguments = inputs.get(ASKED, {}) if arguments is None else arguments
        if inputs["dynamic_resolution"]:
            preset = preset.with_images_of_any_size()
        try:
            self._encoder = make_encoder(Namespace(**inputs), preset)
        except ValueError as error:
            raise UserError(str(error)) from error
        self._model = their_model(given)
        self._preset, self._turns, self._media = preset, [], []

    def ask(self, question: str, files: list[Medium], **how: Any) -> str:
        """Return the answer to a question with media, after those asked before; see `answers`."""
        asked = question_of(question, files)
        self._media += asked.media
        self._turns += asked.turns
        (answer,) = self.answers([Record(self._turns, self._media)], 1, **how)
        # The template reads thoughts between both of their tags; the first may be in the prompt.
        opened = "<think>" * ("</think>" in answer and "<think>" not in answer)
        self._turns.append(conversation.Turn("assistant", opened + answer))
        return answer

    @torch.no_grad()
    def answers(
        self,
        asked: Iterable[Record],
        at_a_time: int,
        seed: int = 0,
        stream: bool = False,
        **how: Any,
    ) -> Iterator[str]:
        """Yield the answers to other conversations, whose media are the content of their files.

        Args:
            at_a_time: conversations of a batch, padded on the left.
            seed: of a batch's draws.
            stream: print the answer as it comes.
            how: arguments of transformers' ``generate``.
        """
        chat, rest = self._encoder.chat, iter(asked)
        while batch := list(islice(rest, at_a_time)):
            rows = list(map(self._embedded, batch))
            mask = [torch.ones(len(row), dtype=torch.int64, device=row.device) for row in rows]
            words = Namespace(decode=chat.words)
            torch.manual_seed(seed)
            made = self._model.generate(
                inputs_embeds=pad_sequence(rows, batch_first=True, padding_side="left"),
                attention_mask=pad_sequence(mask, batch_first=True, padding_side="left"),
                eos_token_id=chat.end,
                pad_token_id=chat.pad_token,
                streamer=transformers.TextStreamer(words, skip_prompt=True) if stream else None,
                **{"do_sample": False, **how},
            )
            # The shorter answers of a batch end with padding, after their last token.
            ends = ((made == chat.end).cumsum(1) == 0).sum(1).tolist()
            for tokens, end in zip(made.tolist(), ends, strict=True):
                yield chat.words(tokens[: end + 1]).strip()

    def _embedded(self, asked: Record) -> torch.Tensor:
        """Return embeddings of a question with its media [n, hidden]."""
        media = self._encoder.read(asked.media)
        asked = Record(asked.turns, media, {**self._arguments, **asked.arguments})
        ids = self._encoder.question(asked, [each.extent for each in media])
        if self._encoder.chat.unknown in ids:
            raise BadConversation("the tokenizer does not know all of its words")
        images, tokens = self._preset.images, self._encoder.chat.ids
        inputs = {token: [] for token in tokens.values()}
        for medium in media:
            encoder = SOUND if medium.kind in conversation.KINDS_OF[SOUND] else IMAGES
            made = self._encoder.inputs([medium], encoder)
            if isinstance(made, torch.Tensor):  # tiles, each of which is an image
                cut = "n c (h y) (w x) -> n h w (c y x)"
                made = rearrange(made, cut, y=images.patch, x=images.patch)
            inputs[tokens[encoder]] += made
        return embedded(self._model, images, torch.from_numpy(ids), inputs)
