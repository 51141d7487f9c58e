# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Energon's samples as conversations with images, sounds and clips of video.

Two kinds of energon's samples are read:

- ``CaptioningSample`` (a ``field_map`` names its image and caption): the prompt, and the caption
  as the answer.
- ``CrudeSample`` (``CrudeWebdataset``, all files of a sample): images, sounds and clips beside a
  ``json`` with LLaVA's ``conversations``, Hugging Face's ``messages``, or a ``caption`` and an
  optional ``prompt``; or beside a ``txt`` with the caption. Without any it is text only. A clip is
  an ``mp4``, or images ``video.0.jpg``, ``video.1.jpg`` …, of which the json may give ``fps``. The
  json may have the template's ``tools`` and ``chat_template_kwargs``. Keys without a value are as
  absent; others that are not known here make the sample bad.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

from examples.mimo.nemotron_vlm.energon.chat_template import REASONING
from examples.mimo.nemotron_vlm.energon.conversation import PLACEHOLDERS, VIDEO, Turn, place_media
from examples.mimo.nemotron_vlm.energon.errors import BadConversation
from examples.mimo.nemotron_vlm.energon.images import FORMATS
from examples.mimo.nemotron_vlm.model.names import IMAGES, SOUND
from megatron.energon import CaptioningSample, CrudeSample

KINDS = CaptioningSample, CrudeSample
TEXTS = {"conversations": (), "messages": (), "caption": ("prompt",)}
"""Keys of a json that hold its text, and those beside each."""
METADATA = set(
    """id idx index uid uuid key source dataset task category tags model language lang license url
    image images video videos audio audios sound sounds width height metadata meta""".split()
)
"""Keys of a json that say nothing to a model: the media are the sample's files."""
FIELDS: dict[str, tuple[str, ...]] = {"system": (), "user": ()}
FIELDS |= {"assistant": (*REASONING, "tool_calls"), "tool": ("name", "tool_call_id")}
"""Keys of a message that go to the chat template beside its role and content, by role."""
LOSS, ARGUMENTS = ("loss", "weight"), ("tools", "chat_template_kwargs")
ENTRIES = {"conversations": ("from", "value"), "messages": ("role", "content")}
"""Keys of a turn's role and content."""
SPEAKERS = {"human": "user", "gpt": "assistant"}

PICTURES = FORMATS.keys() | set(
    "arw avif cr2 cr3 dds dng exr hdr heic heif jp2 jxl nef qoi svg svgz webp".split()
)
SOUNDS = "wav flac mp3 ogg oga opus aac aif aifc aiff amr au caf m4a m4b mka mp2 spx weba wma"
CLIPS = "mp4 3g2 3gp avi flv m2ts m4v mkv mov mpeg mpg mts ogv webm wmv"
SUFFIXES = dict.fromkeys(PICTURES, IMAGES)
SUFFIXES |= dict.fromkeys(SOUNDS.split(), SOUND) | dict.fromkeys(CLIPS.split(), VIDEO)
"""Kinds of media by suffix; a file in a format that its decoder does not read is a bad one."""

FRAME = re.compile(rf"(?i)(video\d*)\.\d+\.(?:{'|'.join(PICTURES)})")
"""Name of a frame of a clip, and of the clip therein."""

ITEMS = {"image": IMAGES, "video": VIDEO, "audio": SOUND, "sound": SOUND}
"""Types of the items of a message's content, beside text."""
SOURCES = "type", "path", "url", "image", "video", "audio", "sound"
"""Keys of an item of a medium; its file is the sample's."""
DECODERS = {"json": json.loads, "txt": partial(str, encoding="utf-8-sig")}
"""Decoders of texts; some editors write a byte order mark before a text."""


class MediaFile(str):
    """Name of a file of an image, a sound or a clip, in the place of its bytes.

    The length of a text follows from the sizes of its media, which the survey knows. So energon
    decodes samples without them; a data set's own code that looks into them fails.
    """


class Medium(NamedTuple):
    """An image, sound or clip: its kind, its files, and a clip's frames in a second if known.

    files: their names or, once they are read, their content.
    """

    kind: str
    files: tuple[str, ...] | tuple[bytes, ...]
    fps: float = 0.0


class Record(NamedTuple):
    """A conversation, its media in their placeholders' order, and the template's arguments."""

    turns: list[Turn]
    media: list[Medium]
    arguments: Mapping[str, Any] = MappingProxyType({})


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
    """
    if isinstance(sample, CaptioningSample):
        return _record(_captioning(prompt, sample.caption), [sample.image])
    files = [sample[name] for name in sorted(filter(kind_of, sample), key=numerically)]
    content = sample.get("json", {})
    if not isinstance(content, dict):
        raise BadConversation("its json is no object")
    text = next((key for key in TEXTS if content.get(key) is not None), "caption")
    known = {text, *TEXTS[text], "fps", *ARGUMENTS, *METADATA}
    content = {"caption": sample.get("txt"), "prompt": prompt} | _known(content, known, "its json")
    if text != "caption":
        turns = _turns(content[text], text)
    elif content[text] is None:
        raise BadConversation(
            "has neither conversations, messages nor a caption in json, nor a txt"
        )
    else:
        turns = _captioning(content["prompt"], content["caption"])
    record = _record(turns, files, content.get("fps", 0))
    return record._replace(arguments=_arguments(content))


@lru_cache(4096)
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


def _known(entry: dict[str, Any], known: Collection[str], where: str) -> dict[str, Any]:
    """Return an object without keys that have no value, as transformers reads messages."""
    entry = {key: value for key, value in entry.items() if value is not None}
    for key in entry:
        if key not in known:
            raise BadConversation(f"{where} has {json.dumps(key)}, which is not understood")
    return entry


def _arguments(content: dict[str, Any]) -> dict[str, Any]:
    tools, rest = content.get("tools", []), content.get("chat_template_kwargs", {})
    if not _are_objects(tools):
        raise BadConversation("its tools are no list of objects")
    if not isinstance(rest, dict) or "tools" in rest:
        raise BadConversation("its chat_template_kwargs are no object, or have tools")
    return {**({"tools": tools} if tools else {}), **rest}


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def _turns(entries: Any, kind: str) -> list[Turn]:
    """Return LLaVA's conversations, without spaces around texts, or Hugging Face's messages.

    Items of a content are placeholders.
    """
    (who, what), turns = ENTRIES[kind], []
    for entry in entries if isinstance(entries, list) else [None]:
        if not isinstance(entry, dict) or who not in entry:
            raise BadConversation(f'{kind} is no list of {{"{who}": …, "{what}": …}}')
        role, where = entry[who], f"message {len(turns) + 1}"
        if kind == "conversations" and isinstance(role, str):
            role = SPEAKERS.get(role, role)
        if role not in tuple(FIELDS):
            known = ", ".join(FIELDS)
            raise BadConversation(f"unknown role {json.dumps(role)}; known: {known}")
        entry = _known(entry, {who, what, *FIELDS[role], *LOSS}, where)
        fields = {key: entry[key] for key in FIELDS[role] if key in entry}
        reasons = [fields[key] for key in REASONING if key in fields]
        if len(reasons) > 1 or not all(isinstance(each, str) for each in reasons):
            raise BadConversation(f"{where}: its reasoning is no one text")
        if not _are_objects(fields.get("tool_calls", [])):
            raise BadConversation(f"{where}: its tool_calls are no list of objects")
        content = entry.get(what, "" if fields and role == "assistant" else None)
        if what not in entry:
            fields["content"] = None
        if kind == "conversations" and isinstance(content, str):
            content = content.strip()
        content = content if isinstance(content, str) else _items(content) or ""
        turns.append(Turn(role, content, fields, _loss(entry, role, where)))
    return turns


def _loss(entry: dict[str, Any], role: str, where: str) -> bool:
    """Return whether a turn bears a loss, as its ``loss`` or its ``weight`` says."""
    said = [entry[key] for key in LOSS if key in entry]
    if any(value not in (0, 1) or value != said[0] for value in said):
        raise BadConversation(f"{where}: a loss or weight of {json.dumps(said)}, not of 0 or 1")
    if role != "assistant" and any(said):
        raise BadConversation(f"{where}: the loss is on the assistant's turns alone")
    return all(said)


def _items(content: Any) -> tuple[str, ...]:
    items = []
    for item in content if isinstance(content, list) else [None]:
        kind = item.get("type") if isinstance(item, dict) else None
        is_text = kind == "text" and isinstance(item.get("text"), str)
        if not is_text and kind not in ITEMS:
            raise BadConversation(
                f"a content is no text, and no list of items of type text, {', '.join(ITEMS)}"
            )
        _known(item, ("type", "text") if is_text else SOURCES, f"an item of type {kind}")
        items.append(item["text"] if is_text else PLACEHOLDERS[ITEMS[kind]])
    return tuple(items)


def _captioning(prompt: Any, caption: Any) -> list[Turn]:
    entries = [{"from": "user", "value": prompt}, {"from": "assistant", "value": caption}]
    return _turns(entries, "conversations")


def numerically(name: str) -> list[int | str]:
    """Return a sort key that puts 2.png before 10.png."""
    parts = re.split(r"(\d+)", name)
    return [int(part) if place % 2 else part for place, part in enumerate(parts)]
