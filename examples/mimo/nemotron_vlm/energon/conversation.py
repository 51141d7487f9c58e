# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Conversations as tokens: turns, media tokens, and the mask of answer tokens.

The ids are those of the processor of Nemotron 3 Nano Omni in transformers, if the tokenizer has its
tokens: an image is between ``<img>`` and ``</img>`` then, a sound between ``<so_start>`` and
``<so_end>``. A clip becomes an image for each tubelet, after a label of its frames.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from examples.mimo.common.errors import one_line
from examples.mimo.nemotron_vlm.energon.chat_template import DEFAULT_TEMPLATE, ChatTemplate
from examples.mimo.nemotron_vlm.energon.errors import BadConversation
from examples.mimo.nemotron_vlm.model.names import IMAGES, SOUND

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


class Turn(NamedTuple):
    """role: 'system', 'user', 'assistant' or 'tool'. content: text with placeholders of media, or
    its parts for a template that knows items, each a text or a placeholder.

    fields: other keys of the message, such as reasoning. loss: whether an answer bears a loss.
    """

    role: str
    content: str | tuple[str, ...]
    fields: Mapping[str, Any] = MappingProxyType({})
    loss: bool = True

    @property
    def text(self) -> str:
        """The whole content as text."""
        return self.content if isinstance(self.content, str) else "".join(self.content)


def place_media(turns: list[Turn], counts: Mapping[str, int]) -> tuple[list[Turn], list[str]]:
    """Put placeholders of kinds that the text has none of before the first user turn.

    Returns:
        The turns; and the kinds of all placeholders in their order.

    Raises:
        BadConversation: the number of placeholders differs from the number of media, or one is
            outside the user's turns; there is no user turn or no answer; the last turn is no
            answer; or an answer is empty.
    """
    asking = next((place for place, turn in enumerate(turns) if turn.role == "user"), None)
    if asking is None or all(turn.role != "assistant" for turn in turns):
        raise BadConversation("needs a user's turn and an assistant's answer")
    if turns[-1].role != "assistant":
        raise BadConversation(f"ends with a turn of {turns[-1].role}, which has no answer")
    if not all(
        turn.text.strip() or any(turn.fields.values()) for turn in turns if turn.role == "assistant"
    ):
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
    turns, asked = [*turns], turns[asking].content
    if before:
        content = before + asked if isinstance(asked, str) else (before, *asked)
        turns[asking] = turns[asking]._replace(content=content)
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
        unknown: id of the token of words that the tokenizer does not know; None if it knows all.
        end: id of the token that ends an answer.
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
        tokenizer("")  # cancels padding and truncation that its file may ask for
        self._tokenizer, self._encode = tokenizer, tokenizer.backend_tokenizer.encode
        self._template = ChatTemplate(tokenizer)
        self.ids: dict[str, int] = {kind: vocabulary[t] for kind, t in self._tokens.items()}
        self._around = {k: t for k, t in AROUND.items() if all(each in vocabulary for each in t)}
        pad = tokenizer.pad_token_id
        self.pad_token: int = tokenizer.eos_token_id if pad is None else pad
        self.vocab_size: int = max(vocabulary.values()) + 1
        self._is_special = np.zeros(self.vocab_size, bool)
        self._is_special[list(tokenizer.added_tokens_decoder)] = True
        self.unknown: int | None = tokenizer.unk_token_id
        self.end: int = tokenizer.eos_token_id

    @property
    def fingerprint(self) -> str:
        """Hash of everything that determines the tokens: template, image token and tokenizer."""
        template = self._tokenizer.chat_template or DEFAULT_TEMPLATE
        digest = hashlib.sha256(f"{template}\0{self._tokens[IMAGES]}\0".encode())
        digest.update(self._tokenizer.backend_tokenizer.to_str().encode())
        digest.update(repr(sorted(self._tokenizer.special_tokens_map.items())).encode())
        return digest.hexdigest()

    def words(self, tokens: list[int]) -> str:
        """Return the text of tokens, without special ones."""
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def encode(
        self,
        turns: Sequence[Turn],
        labels: Sequence[Sequence[str]] = (),
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokenize a conversation with the chat template.

        Each placeholder becomes the token of its kind, between those of `AROUND`; that of a clip
        becomes a label and an image for each tubelet.

        Args:
            labels: those of each clip's tubelets.
            arguments: of the template, such as tools.

        Returns:
            The n tokens, int64 [n]; and which are of an answer with a loss or the end of turn after
            it, bool [n].

        Raises:
            BadConversation: the template refuses it, does not know a key, or hides its answers; the
                tokenizer refuses its text; or that contains a token of media.
        """
        messages = self._messages(turns)
        text, spans = self._template.answers(messages, arguments, [turn.loss for turn in turns])
        self._template.check(messages, arguments)
        self._compare(PLACEHOLDERS[VIDEO], text.count(PLACEHOLDERS[VIDEO]), len(labels))
        tokens, starts, stops = self._tokenize(text, spans, labels)
        ids, first, _ = tokens.T
        answer = np.zeros(len(ids), bool)
        for start, stop in zip(starts, stops, strict=True):
            answer[start:] |= first[start:] < stop
        for kind, token in self._tokens.items():
            wanted = sum(turn.text.count(PLACEHOLDERS[kind]) for turn in turns)
            wanted += sum(map(len, labels)) if kind == IMAGES else 0
            self._compare(token, (ids == self.ids[kind]).sum(), wanted)
        return ids, answer

    def prompt(
        self,
        turns: Sequence[Turn],
        labels: Sequence[Sequence[str]] = (),
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> np.ndarray:
        """Tokenize a conversation up to where its next answer begins; see `encode`."""
        messages = self._messages(turns)
        text = next(self._template.prompts(messages, arguments))
        _, spans = self._template.answers(messages, arguments, [turn.loss for turn in turns])
        return self._tokenize(text, spans, labels)[0][:, 0]

    def _tokenize(
        self, text: str, spans: list[range], labels: Sequence[Sequence[str]]
    ) -> tuple[np.ndarray, list[int], list[int]]:
        """Return tokens as `_read` does, and the first token and last character of each answer.

        The tokens before an answer are those of the text before it, which asks for it: where a
        token would straddle the two, they are tokenized apart.
        """
        text, spans = self._surrounded(text, spans, labels)
        tokens, starts, least = self._read(text), [], 0
        for span in spans:
            special = self._is_special[tokens[:, 0]] & (tokens[:, 1] < span.start)
            near = max(least, np.flatnonzero(special)[-1:].sum())  # what is before does not matter
            at = tokens[near, 1] if near < len(tokens) else span.start
            before = self._read(text[: span.start], at)
            least = near + len(before)
            starts.append(least)
            if not np.array_equal(tokens[near:least, 0], before[:, 0]):
                tokens = np.concatenate([tokens[:near], before, self._read(text, span.start)])
        return tokens, starts, [span.stop for span in spans]

    def _read(self, text: str, start: int = 0) -> np.ndarray:
        """Return id, first character and end of each token from a character on, int64 [n, 3].

        Raises:
            BadConversation: the tokenizer refuses the text.
        """
        # A tokenizer may treat a text's beginning in its own way, but not what follows a token.
        anchor = self._tokenizer.eos_token if start else ""
        try:
            found = self._encode(anchor + text[start:], add_special_tokens=False)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in Rust is no Exception
            if halves := re.search("[\ud800-\udfff]", text):
                why = f"half a character, {halves[0]!r}, is in its text"
            else:
                why = one_line(error)
            raise BadConversation(f"the tokenizer refuses it: {why}") from error
        tokens = np.array([found.ids, *zip(*found.offsets, strict=True)], np.int64).reshape(3, -1).T
        tokens[:, 1:] += start - len(anchor)
        return tokens[len(anchor) > 0 :]

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
        image = whole[self._tokens[IMAGES]]
        token = re.compile("|".join(map(re.escape, [*whole, PLACEHOLDERS[VIDEO]])))

        def longer(part: str) -> str:
            clips = ("\n".join(label + image for label in each) for each in labels)
            return token.sub(lambda found: whole.get(found[0]) or next(clips), part)

        starts = [len(longer(text[: span.start])) for span in spans]
        pairs = zip(starts, spans, strict=True)
        return longer(text), [range(start, start + len(span)) for start, span in pairs]

    def _messages(self, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        """Return turns as the template takes them; a content may be absent, as `fields` say."""
        made = [{"role": t.role, "content": self._content(t), **t.fields} for t in turns]
        return [{key: each[key] for key in each if each[key] is not None} for each in made]

    def _content(self, turn: Turn) -> str | list[dict[str, str]]:
        """Return a turn's content as the template takes it."""
        if isinstance(turn.content, str) or turn.role not in self._roles_of_items:
            return _PLACE.sub(lambda at: self._tokens.get(_KINDS[at[0]], at[0]), turn.text)
        split = (re.split(f"({_PLACE.pattern})", item) for item in turn.content)
        return [
            {"type": ITEMS[_KINDS[part]]} if part in _KINDS else {"type": "text", "text": part}
            for parts in split
            for part in parts
            if part or len(parts) == 1
        ]

    @cached_property
    def _roles_of_items(self) -> set[str]:
        """Roles for which the template knows items; others write them as Python or JSON."""
        question, text = {"role": "user", "content": "?"}, "\u27e8text\u27e9"
        function = {"name": "f", "arguments": {}}
        call = {"role": "assistant", "content": "?", "tool_calls": [{"function": function}]}
        around = {"system": ([], [question]), "user": ([], []), "assistant": ([question], [])}
        around["tool"] = [question, call], []
        known = set()
        for role, (before, after) in around.items():
            items = {"role": role, "content": [{"type": "text", "text": text}]}
            try:
                made, _ = self._template.render([*before, items, *after], {})
            except BadConversation:
                continue
            if text in made and not re.search(f"""['"]: ?['"]{text}""", made):
                known.add(role)
        return known
