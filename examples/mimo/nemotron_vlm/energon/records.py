# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Energon's samples as conversations with images, sounds and clips of video.

Two kinds of energon's samples are read:

- ``CaptioningSample`` (a ``field_map`` names its image and caption): the prompt, and the caption
  as the answer.
- ``CrudeSample`` (``CrudeWebdataset``, all files of a sample): images, sounds and clips beside a
  ``json`` with LLaVA's ``conversations``, Hugging Face's ``messages``, or a ``caption`` and an
  optional ``prompt``; or beside a ``txt`` with the caption. Without any it is text only. A clip is
  an ``mp4``, or images ``video.0.jpg``, ``video.1.jpg`` …, of which the json may give ``fps``.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from examples.mimo.nemotron_vlm.data.sample import IMAGES, SOUND
from examples.mimo.nemotron_vlm.energon.conversation import PLACEHOLDERS, VIDEO, Turn, place_media
from examples.mimo.nemotron_vlm.energon.errors import BadConversation, UnreadFormat
from examples.mimo.nemotron_vlm.energon.images import FORMATS, OTHERS
from megatron.energon import CaptioningSample, CrudeSample

KINDS = CaptioningSample, CrudeSample
ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
}
UNREAD = dict.fromkeys(OTHERS, "a format that Pillow does not read")
SOUNDS, CLIPS = ("aac", "m4a", "mp3", "ogg", "opus"), ("avi", "mkv", "mov", "webm")
UNREAD |= dict.fromkeys(SOUNDS, "convert it to wav or flac")
UNREAD |= dict.fromkeys(CLIPS, "convert it to mp4 or to frames")
"""Reasons or cures that are named for formats that are not read, by suffix."""

SUFFIXES = dict.fromkeys(FORMATS.keys() | OTHERS, IMAGES)
SUFFIXES |= dict.fromkeys(("wav", "flac", *SOUNDS), SOUND)
SUFFIXES |= dict.fromkeys(("mp4", *CLIPS), VIDEO)
FRAME = re.compile(rf"(?i)(video\d*)\.\d+\.(?:{'|'.join(FORMATS.keys() | OTHERS)})")
"""Name of a frame of a clip, and of the clip therein."""

ITEMS = {"image": IMAGES, "video": VIDEO, "audio": SOUND, "sound": SOUND}
"""Types of the items of a message's content, beside text."""
DECODERS = {"json": json.loads, "txt": bytes.decode}
DEFAULT_PROMPT = "Describe the image."


class MediaFile(str):
    """Name of a file of an image, a sound or a clip, in the place of its bytes.

    The length of a text follows from the sizes of its media, which the survey knows. So energon
    decodes samples without them; a data set's own code that looks into them fails.
    """


class Medium(NamedTuple):
    """An image, sound or clip: its kind, the names of its files, and fps as `File` has it."""

    kind: str
    files: tuple[str, ...]
    fps: float = 0.0


class Record(NamedTuple):
    """A conversation, and its media in the order of their placeholders."""

    turns: list[Turn]
    media: list[Medium]


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
        BadConversation: fields are missing or have the wrong type, or do not fit the files.
        UnreadFormat: a file is a medium by its name, in a format that is not read.
    """
    if isinstance(sample, CaptioningSample):
        return _record(_captioning(prompt, sample.caption), [sample.image])
    files = [sample[name] for name in sorted(filter(kind_of, sample), key=numerically)]
    content = sample.get("json", {})
    if not isinstance(content, dict):
        raise BadConversation("its json is no object")
    if "conversations" in content:
        return _record(_turns(content["conversations"]), files, content.get("fps", 0))
    if "messages" in content:
        return _record(_messages(content["messages"]), files, content.get("fps", 0))
    caption = content.get("caption", sample.get("txt"))
    if caption is None:
        raise BadConversation(
            "has neither conversations, messages nor a caption in json, nor a txt"
        )
    turns = _captioning(content.get("prompt", prompt), caption)
    return _record(turns, files, content.get("fps", 0))


def kind_of(name: str) -> str | None:
    """Return the kind of a sample's file by its name; None if it is of no medium."""
    return VIDEO if FRAME.fullmatch(name) else SUFFIXES.get(_suffix(name))


def _record(turns: list[Turn], files: Sequence[Any], fps: Any = 0) -> Record:
    """Return a conversation with its placeholders; media of a kind are in their files' order."""
    if not isinstance(fps, int | float) or not 0 <= fps <= 1000:
        raise BadConversation(
            f"its fps is {json.dumps(fps)}, no number of frames in a second up to 1000"
        )
    clips: dict[str, tuple[str, ...]] = {}
    of: dict[str, list[Medium]] = {kind: [] for kind in PLACEHOLDERS}
    for file in files:
        if not isinstance(file, MediaFile):
            raise BadConversation(f"an image is of type {type(file).__name__}")
        if reason := UNREAD.get(_suffix(file)):
            raise UnreadFormat(f"{file}: {reason}")
        kind = kind_of(file) or IMAGES  # a field may map to a file of any name
        if kind != VIDEO:
            of[kind].append(Medium(kind, (file,)))
            continue
        frame = FRAME.fullmatch(file)
        clip = frame[1] if frame else file
        clips[clip] = (*clips.get(clip, ()), file)
    for clip in sorted(clips, key=numerically):  # video before video2
        of[VIDEO].append(Medium(VIDEO, clips[clip], float(fps)))
    turns, kinds = place_media(turns, {kind: len(media) for kind, media in of.items()})
    return Record(turns, [of[kind].pop(0) for kind in kinds])


def _suffix(name: str) -> str:
    return name.rpartition(".")[2].lower()


def _turns(conversations: Any) -> list[Turn]:
    turns = []
    for entry in conversations if isinstance(conversations, list) else [None]:
        if not isinstance(entry, dict) or not {"from", "value"} <= entry.keys():
            raise BadConversation('conversations is no list of {"from": …, "value": …}')
        speaker = entry["from"]
        if not isinstance(speaker, str) or speaker not in ROLES:
            known = ", ".join(ROLES)
            raise BadConversation(f"unknown speaker {json.dumps(speaker)}; known: {known}")
        turns.append(Turn(ROLES[speaker], _text(entry["value"])))
    return turns


def _messages(messages: Any) -> list[Turn]:
    """Return Hugging Face's messages as they are, with a placeholder for each item."""
    turns = []
    for entry in messages if isinstance(messages, list) else [None]:
        if not isinstance(entry, dict) or not {"role", "content"} <= entry.keys():
            raise BadConversation('messages is no list of {"role": …, "content": …}')
        role, content = entry["role"], entry["content"]
        if role not in ROLES.values():
            raise BadConversation(
                f"unknown role {json.dumps(role)}; known: system, user, assistant"
            )
        if isinstance(content, str):
            turns.append(Turn(role, content))
            continue
        items = content if isinstance(content, list) else [None]
        turns.append(Turn(role, "".join(map(_item, items)), has_items=True))
    return turns


def _item(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else None
    if kind == "text" and isinstance(item.get("text"), str):
        return item["text"]
    if kind in ITEMS:
        return PLACEHOLDERS[ITEMS[kind]]
    raise BadConversation(f"content is no list of items of type text, {', '.join(ITEMS)}")


def _captioning(prompt: Any, caption: Any) -> list[Turn]:
    return [Turn("user", _text(prompt)), Turn("assistant", _text(caption))]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise BadConversation(f"a text is of type {type(value).__name__}")
    return value.strip()


def numerically(name: str) -> list[int | str]:
    """Return a sort key that puts 2.png before 10.png."""
    parts = re.split(r"(\d+)", name)
    return [int(part) if place % 2 else part for place, part in enumerate(parts)]
