# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Energon's samples as conversations with images.

Two kinds of energon's samples are read:

- ``CaptioningSample`` (a ``field_map`` names its image and caption): the prompt, and the caption
  as the answer.
- ``CrudeSample`` (``CrudeWebdataset``, all files of a sample): images beside a ``json`` with
LLaVA's ``conversations``, or with a ``caption`` and an optional ``prompt``; or beside a ``txt``
with the caption. Without images it is a text-only sample.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from examples.mimo.nemotron_vlm.energon.conversation import Turn
from examples.mimo.nemotron_vlm.energon.errors import BadConversation
from megatron.energon import CaptioningSample, CrudeSample

KINDS = CaptioningSample, CrudeSample
ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
}
SUFFIXES = ("jpg", "jpeg", "png")
DECODERS = {"json": json.loads, "txt": bytes.decode}
DEFAULT_PROMPT = "Describe the image."


class ImageFile(str):
    """Name of an image file, in the place of its bytes.

    The length of a text follows from the sizes of the images, which the survey knows. So energon
    decodes samples without images; a data set's own code that looks into them fails.
    """


class Record(NamedTuple):
    """A conversation. images: names of files, in the order of their placeholders."""

    turns: list[Turn]
    images: list[ImageFile]


def decode_text(sample: dict[str, Any]) -> dict[str, Any]:
    """Decode the json and text files of a sample, as energon's decoder; nothing is unpickled.

    Raises:
        BadConversation: a file is damaged.
    """
    decoded = dict(sample)
    for name, value in sample.items():
        if decode := DECODERS.get(_suffix(name)):
            try:
                decoded[name] = decode(value)
            except ValueError as error:
                raise BadConversation(f"its {name} is damaged: {error}") from error
    return decoded


def read_record(sample: Any, prompt: str) -> Record:
    """Return the conversation of one of energon's samples.

    Args:
        sample: a sample of one of the kinds above, decoded by `decode_text`.
        prompt: question for samples that have only a caption.

    Raises:
        BadConversation: fields are missing or have the wrong type.
    """
    if isinstance(sample, CaptioningSample):
        return Record(_captioning(prompt, sample.caption), [_image(sample.image)])
    names = sorted(filter(is_image, sample), key=_numerically)
    images = [_image(sample[name]) for name in names]
    content = sample.get("json", {})
    if not isinstance(content, dict):
        raise BadConversation("its json is no object")
    if "conversations" in content:
        return Record(_turns(content["conversations"]), images)
    caption = content.get("caption", sample.get("txt"))
    if caption is None:
        raise BadConversation("has neither conversations nor a caption in json, nor a txt")
    return Record(_captioning(content.get("prompt", prompt), caption), images)


def is_image(name: str) -> bool:
    """Return whether a file of a sample is an image, by its name."""
    return _suffix(name) in SUFFIXES


def _suffix(name: str) -> str:
    return name.rpartition(".")[2].lower()


def _turns(conversations: Any) -> list[Turn]:
    turns = []
    for entry in conversations if isinstance(conversations, list) else [None]:
        if not isinstance(entry, dict) or not {"from", "value"} <= entry.keys():
            raise BadConversation('conversations is no list of {"from": …, "value": …}')
        role = ROLES.get(entry["from"])
        if role is None:
            raise BadConversation(f"unknown speaker {entry['from']!r}; known: {', '.join(ROLES)}")
        turns.append(Turn(role, _text(entry["value"])))
    return turns


def _captioning(prompt: Any, caption: Any) -> list[Turn]:
    return [Turn("user", _text(prompt)), Turn("assistant", _text(caption))]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise BadConversation(f"a text is of type {type(value).__name__}")
    return value.strip()


def _image(value: Any) -> ImageFile:
    if not isinstance(value, ImageFile):
        raise BadConversation(f"an image is of type {type(value).__name__}")
    return value


def _numerically(name: str) -> list[int | str]:
    """Return a sort key that puts 2.png before 10.png."""
    parts = re.split(r"(\d+)", name)
    return [int(part) if place % 2 else part for place, part in enumerate(parts)]
