# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Conversations as tokens: chat template, media tokens, and the mask of answer tokens.

The ids are those of the processor of Nemotron 3 Nano Omni in transformers, if the tokenizer has its
tokens: an image is between ``<img>`` and ``</img>`` then, a sound between ``<so_start>`` and
``<so_end>``. A clip becomes an image for each tubelet, after a label of its frames.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from examples.mimo.nemotron_vlm.data.sample import IMAGES, SOUND
from examples.mimo.nemotron_vlm.energon.errors import BadConversation, one_line

VIDEO = "video"
"""Kind of media that the encoder of images encodes, too."""

KINDS_OF = {IMAGES: (IMAGES, VIDEO), SOUND: (SOUND,)}
"""Kinds of media that each encoder takes."""

PLACEHOLDERS = {IMAGES: "<image>", VIDEO: "<video>", SOUND: "<sound>"}
"""Placeholder of each kind of media in the text of a data set."""

ITEMS = {IMAGES: "image", VIDEO: "video", SOUND: "audio"}
"""Type of each kind in a content of items, for templates."""

IMAGE, SOUND_TOKEN = PLACEHOLDERS[IMAGES], "<so_embedding>"
"""The tokenizer's token of an image, unless another is given, and of a sound."""

AROUND = {IMAGES: ("<img>", "</img>"), SOUND: ("<so_start>", "<so_end>")}
"""Tokens before and after each kind, if the tokenizer has them."""

_PLACE = re.compile("|".join(PLACEHOLDERS.values()))
_KINDS = {placeholder: kind for kind, placeholder in PLACEHOLDERS.items()}

DEFAULT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
)
"""Chat template for tokenizers without one: ``user: …\\nassistant: …</s>\\n``."""

_ANSWER = "\u27e8answer\u27e9"
"""Placeholder of an answer, to find what the template puts before and after it."""


class Turn(NamedTuple):
    """role: 'system', 'user' or 'assistant'. text: with placeholders of media.

    has_items: whether a template that knows items gets them instead of the text.
    """

    role: str
    text: str
    has_items: bool = False


def place_media(turns: list[Turn], counts: Mapping[str, int]) -> tuple[list[Turn], list[str]]:
    """Put placeholders of kinds that the text has none of before the first user turn.

    Returns:
        The turns; and the kinds of all placeholders in their order.

    Raises:
        BadConversation: the number of placeholders differs from the number of media, or one is
            outside the user's turns; there is no user turn or no answer; or an answer is empty.
    """
    asking = next((place for place, turn in enumerate(turns) if turn.role == "user"), None)
    if asking is None or all(turn.role != "assistant" for turn in turns):
        raise BadConversation("needs a user's turn and an assistant's answer")
    if not all(turn.text.strip() for turn in turns if turn.role == "assistant"):
        raise BadConversation("an answer is empty")
    before = ""
    for kind, placeholder in PLACEHOLDERS.items():
        count, found = counts.get(kind, 0), sum(turn.text.count(placeholder) for turn in turns)
        if found and found != count:
            raise BadConversation(f"{found} {placeholder} for {count} {kind}")
        if not found:
            before += f"{placeholder}\n" * count
    for turn in turns:
        if turn.role != "user" and (stray := _PLACE.search(turn.text)):
            raise BadConversation(f"{stray[0]} outside of the user's turns")
    asked = turns[asking]._replace(text=before + turns[asking].text)
    turns = [*turns[:asking], asked, *turns[asking + 1 :]]
    return turns, [_KINDS[place] for turn in turns for place in _PLACE.findall(turn.text)]


class Chat:
    """A Hugging Face tokenizer from a local directory, with a chat template.

    Args:
        path: the directory, as ``save_pretrained`` writes it; nothing is downloaded.
        image_token: the tokenizer's token that replaces ``<image>``.
        sound: whether conversations may have sounds.

    Raises:
        ValueError: there is no tokenizer with offsets; or it lacks the image token, the sound token
            or an eos token.

    Attributes:
        ids: id of each kind's token.
    """

    def __init__(self, path: str | Path, image_token: str = IMAGE, sound: bool = False) -> None:
        from transformers import AutoTokenizer  # takes seconds

        self.path = Path(path)
        if not self.path.is_dir():
            raise ValueError(f"tokenizer {path}: no such directory")
        try:
            tokenizer = AutoTokenizer.from_pretrained(self.path, local_files_only=True)
        except Exception as error:
            raise ValueError(
                f"tokenizer {path}: transformers cannot read it; write it with save_pretrained"
            ) from error
        if not tokenizer.is_fast:
            raise ValueError(f"tokenizer {path}: has no tokenizer.json, which answers need")
        if tokenizer.eos_token is None:
            raise ValueError(f"tokenizer {path}: has no eos token")
        vocabulary = tokenizer.get_vocab()
        self._tokens = {IMAGES: image_token} | ({SOUND: SOUND_TOKEN} if sound else {})
        for kind, token in self._tokens.items():
            if token not in vocabulary:
                raise ValueError(f"tokenizer {path}: has no token {token} for {kind}")
        self._tokenizer = tokenizer
        own = tokenizer.chat_template and tokenizer.get_chat_template()
        self._template = own or DEFAULT_TEMPLATE
        self.image_text = image_token
        self.ids: dict[str, int] = {kind: vocabulary[t] for kind, t in self._tokens.items()}
        self._around = {k: t for k, t in AROUND.items() if all(each in vocabulary for each in t)}
        pad = tokenizer.pad_token_id
        self.pad_token: int = tokenizer.eos_token_id if pad is None else pad
        self.vocab_size: int = max(vocabulary.values()) + 1

    @property
    def fingerprint(self) -> str:
        """Hash of everything that determines the tokens: template, image token and tokenizer."""
        digest = hashlib.sha256(f"{self._template}\0{self.image_text}\0".encode())
        digest.update(self._tokenizer.backend_tokenizer.to_str().encode())
        digest.update(repr(sorted(self._tokenizer.special_tokens_map.items())).encode())
        return digest.hexdigest()

    def words(self, tokens: list[int]) -> str:
        """Return the text of tokens, without special ones."""
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def encode(
        self, turns: list[Turn], labels: Sequence[Sequence[str]] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokenize a conversation with the chat template.

        Each placeholder becomes the token of its kind, between those of `AROUND`; that of a clip
        becomes a label and an image for each tubelet.

        Args:
            labels: those of each clip's tubelets.

        Returns:
            The n tokens, int64 [n]; and which are of an answer or the end of turn after it, bool
            [n].

        Raises:
            BadConversation: the template refuses it or changes its answers, or its text contains
                a token of media.
        """
        text = self._render(turns)
        spans = self._answers(turns, text)
        self._compare(PLACEHOLDERS[VIDEO], text.count(PLACEHOLDERS[VIDEO]), len(labels))
        text, spans = self._surrounded(text, spans, labels)
        tokens = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = np.array(tokens["input_ids"], np.int64)
        first, end = np.array(tokens["offset_mapping"], np.int64).reshape(-1, 2).T
        answer = np.zeros(len(ids), bool)
        for span in spans:
            answer |= (end > span.start) & (first < span.stop)
        for kind, token in self._tokens.items():
            wanted = sum(turn.text.count(PLACEHOLDERS[kind]) for turn in turns)
            wanted += sum(map(len, labels)) if kind == IMAGES else 0
            self._compare(token, (ids == self.ids[kind]).sum(), wanted)
        return ids, answer

    def prompt(self, turns: list[Turn], labels: Sequence[Sequence[str]] = ()) -> np.ndarray:
        """Tokenize a conversation up to where its next answer begins, as `encode` does it.

        Raises:
            BadConversation: the template refuses it, or the tokenizer lacks some of its words.
        """
        text = self._render([*turns, Turn("assistant", _ANSWER)]).partition(_ANSWER)[0]
        text, _ = self._surrounded(text.rstrip(" "), [], labels)
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if self._tokenizer.unk_token_id in ids:
            raise BadConversation("the tokenizer does not know all of its words")
        return np.array(ids, np.int64)

    @property
    def end(self) -> int:
        """Id of the token that ends an answer."""
        return self._tokenizer.eos_token_id

    @staticmethod
    def _compare(token: str, found: int, wanted: int) -> None:
        if found > wanted:
            raise BadConversation(f"its text has the token {token}")
        if found < wanted:
            raise BadConversation(f"the chat template leaves out {token}")

    def _surrounded(
        self, text: str, spans: list[range], labels: Sequence[Sequence[str]]
    ) -> tuple[str, list[range]]:
        """Return the text with the tokens around media, and the answers' spans there."""
        whole = {}
        for kind, token in self._tokens.items():
            first, last = self._around.get(kind, ("", ""))
            whole[token] = f"{first}{token}{last}"
        image = whole[self.image_text]
        token = re.compile("|".join(map(re.escape, [*whole, PLACEHOLDERS[VIDEO]])))

        def longer(part: str) -> str:
            clips = ("\n".join(label + image for label in each) for each in labels)
            return token.sub(lambda found: whole.get(found[0]) or next(clips), part)

        starts = [len(longer(text[: span.start])) for span in spans]
        pairs = zip(starts, spans, strict=True)
        return longer(text), [range(start, start + len(span)) for start, span in pairs]

    def _answers(self, turns: list[Turn], text: str) -> list[range]:
        """Return the range of characters of each answer in ``text``, end of turn included.

        The template renders a placeholder instead of the answer, to show what it puts around it. So
        other turns may have the same words as the answer.
        """
        spans = []
        for place, turn in enumerate(turns):
            if turn.role != "assistant":
                continue
            asked = self._render([*turns[:place], Turn("assistant", _ANSWER)])
            before, found, after = asked.rpartition(_ANSWER)
            answered = turn.text + after.rstrip()
            if not found or not text.startswith(before + answered):
                raise BadConversation(f"the chat template changes answer {len(spans) + 1}")
            spans.append(range(len(before), len(before) + len(answered)))
        return spans

    def _render(self, turns: list[Turn]) -> str:
        return self._rendered([(turn.role, self._content(turn)) for turn in turns])

    def _content(self, turn: Turn) -> str | list[dict[str, str]]:
        """Return a turn's content as the template takes it."""
        if not turn.has_items or turn.role == "assistant" or not self._takes_items:
            return _PLACE.sub(lambda at: self._tokens.get(_KINDS[at[0]], at[0]), turn.text)
        parts = filter(None, re.split(f"({_PLACE.pattern})", turn.text))
        return [
            {"type": ITEMS[_KINDS[part]]} if part in _KINDS else {"type": "text", "text": part}
            for part in parts
        ]

    @cached_property
    def _takes_items(self) -> bool:
        """Whether the template knows contents of items; others write them as Python or JSON."""
        try:
            text = self._rendered([("user", [{"type": "text", "text": _ANSWER}])])
        except BadConversation:
            return False
        return _ANSWER in text and not re.search("""['"]type['"]""", text)

    def _rendered(self, messages: list[tuple[str, str | list[dict[str, str]]]]) -> str:
        messages = [{"role": role, "content": content} for role, content in messages]
        try:
            return self._tokenizer.apply_chat_template(
                messages, chat_template=self._template, tokenize=False
            )
        except Exception as error:  # a template raises what it likes
            raise BadConversation(f"the chat template refuses it: {one_line(error)}") from error
