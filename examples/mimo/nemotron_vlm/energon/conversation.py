# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Conversations as tokens: chat template, image tokens, and the mask of answer tokens."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from examples.mimo.nemotron_vlm.energon.errors import BadConversation, one_line

IMAGE = "<image>"
"""Placeholder of an image in the text of a data set."""

DEFAULT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
)
"""Chat template for tokenizers without one: ``user: …\\nassistant: …</s>\\n``."""

_ANSWER = "\u27e8answer\u27e9"
"""Placeholder of an answer, to find what the template puts before and after it."""


class Turn(NamedTuple):
    """role: 'system', 'user' or 'assistant'. text: without whitespace at its ends."""

    role: str
    text: str


def place_images(turns: list[Turn], images: int) -> list[Turn]:
    """Put one ``<image>`` per image before the first user turn, unless the text has placeholders.

    Raises:
        BadConversation: the number of placeholders differs from the number of images, or one is
            outside the user's turns; there is no user turn or no answer; or an answer is empty.
    """
    found = sum(turn.text.count(IMAGE) for turn in turns)
    asking = next((place for place, turn in enumerate(turns) if turn.role == "user"), None)
    if asking is None or all(turn.role != "assistant" for turn in turns):
        raise BadConversation("needs a user's turn and an assistant's answer")
    if not all(turn.text for turn in turns if turn.role == "assistant"):
        raise BadConversation("an answer is empty")
    if any(IMAGE in turn.text for turn in turns if turn.role != "user"):
        raise BadConversation(f"{IMAGE} outside of the user's turns")
    if not found:
        text = f"{IMAGE}\n" * images + turns[asking].text
        return [*turns[:asking], Turn("user", text), *turns[asking + 1 :]]
    if found != images:
        raise BadConversation(f"{found} {IMAGE} for {images} image{'s' * (images != 1)}")
    return turns


class Chat:
    """A Hugging Face tokenizer from a local directory, with a chat template.

    Args:
        path: the directory, as ``save_pretrained`` writes it; nothing is downloaded.
        image_token: the tokenizer's token that replaces ``<image>``.

    Raises:
        ValueError: there is no tokenizer with offsets; or it lacks the image token or an eos token.
    """

    def __init__(self, path: str | Path, image_token: str = IMAGE) -> None:
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
        if image_token not in vocabulary:
            raise ValueError(f"tokenizer {path}: has no token {image_token} for images")
        self._tokenizer = tokenizer
        own = tokenizer.chat_template and tokenizer.get_chat_template()
        self._template = own or DEFAULT_TEMPLATE
        self.image_text = image_token
        self.image_token: int = vocabulary[image_token]
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

    def encode(self, turns: list[Turn]) -> tuple[np.ndarray, np.ndarray]:
        """Tokenize a conversation with the chat template; each placeholder becomes one image token.

        Returns:
            The n tokens, int64 [n]; and which are of an answer or the end of turn after it, bool
            [n].

        Raises:
            BadConversation: the template refuses it or changes its answers, or its text contains
                the image token.
        """
        turns = [Turn(role, text.replace(IMAGE, self.image_text)) for role, text in turns]
        images = sum(turn.text.count(self.image_text) for turn in turns if turn.role == "user")
        text = self._render(turns)
        spans = self._answers(turns, text)
        tokens = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = np.array(tokens["input_ids"], np.int64)
        first, end = np.array(tokens["offset_mapping"], np.int64).reshape(-1, 2).T
        answer = np.zeros(len(ids), bool)
        for span in spans:
            answer |= (end > span.start) & (first < span.stop)
        if (ids == self.image_token).sum() != images:
            raise BadConversation(f"its text has the token {self.image_text}")
        return ids, answer

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
        messages = [{"role": role, "content": text} for role, text in turns]
        try:
            return self._tokenizer.apply_chat_template(
                messages, chat_template=self._template, tokenize=False
            )
        except Exception as error:  # a template raises what it likes
            raise BadConversation(f"the chat template refuses it: {one_line(error)}") from error
