"""Texts of a chat -> prompts, answers, pieces of prompts in trained text; a tokenizer -> special tokens. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...processors.tokenizers import FastTokenizer

MAX_EXCERPT = 120  # characters of an excerpt
_PIECE = 32  # characters of a prompt that are looked for in trained text
_LEAST_PIECE = 8  # shorter prompts ("Yes") may stand in any answer
ODD = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffd\ud800-\udfff]")
PLACEHOLDERS = re.compile(
    r"\A\s*<(?:image|video|audio)>|<(?:image|video|audio)>\s*\Z"
    r"|<\|(?:image|video|audio|image_pad|video_pad|audio_pad|vision_start)\|>|\[IMG\]|<(?:start_of_image|image_soft_token)>"
)
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class ChatTexts(NamedTuple):
    """Texts of a conversation. prompts: of all roles but the assistant. said: all texts in the assistant's messages,
    joined. turns: texts of all messages but those of the system, with calls and reasoning. num_groups: runs of the
    assistant's messages with a message to train on. empty: a description of each answer without content.
    """

    texts: list[str]
    prompts: list[str]
    said: str
    turns: list[str]
    num_answers: int
    num_groups: int
    empty: list[str]
    num_media: int

    @staticmethod
    def of(messages: Sequence[Mapping[str, Any]]) -> ChatTexts:
        texts: list[str] = []
        prompts: list[str] = []
        said: list[str] = []
        turns: list[str] = []
        empty: list[str] = []
        num_answers = num_groups = num_media = 0
        in_group = False
        for number, message in enumerate(messages):
            own, media = _content(message)
            num_media += media
            texts += own
            if message["role"] not in ("system", "developer"):
                turns += [*own, *_strings(dict(_more_of(message)))]
            if message["role"] != "assistant":
                prompts += own
                in_group = False
                continue
            num_answers += 1
            said += _strings(message)
            if not media and not any(text.strip() for text in own) and not _has_more(message):
                empty.append(f"message {number} of {len(messages)} is an answer without content")
            elif message.get("learn", True) and not in_group:
                num_groups, in_group = num_groups + 1, True
        return ChatTexts(texts, prompts, "\n".join(said), turns, num_answers, num_groups, empty, num_media)


def _has_more(message: Mapping[str, Any]) -> bool:
    """Return whether a message of the assistant has calls, reasoning or other content outside of its content."""
    return any(value.strip() if isinstance(value, str) else value for _, value in _more_of(message))


def _more_of(message: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((key, value) for key, value in message.items() if key not in ("role", "content", "name", "learn"))


def _content(message: Mapping[str, Any]) -> tuple[list[str], int]:
    """Return the texts of a message's content, and the number of media."""
    content = message.get("content")
    if isinstance(content, str):
        return [content], 0
    parts = content or []
    texts = [part["text"] for part in parts if part["type"] == "text"]
    return texts, len(parts) - len(texts)


def _strings(value: Any) -> Iterator[str]:
    """Yield all texts and numbers inside a JSON value, with the keys before the values."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield key
            yield from _strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each)
    elif value is not None:
        yield str(value)


def trained_piece(chat: ChatTexts, trained: str) -> str | None:
    """Return a piece of a prompt in the trained text, quoted by no answer; None without a piece."""
    for text in chat.prompts if trained else ():
        text = text.strip()
        if len(text) >= _LEAST_PIECE:
            for piece in (text[:_PIECE], text[-_PIECE:]):
                if piece in trained and piece not in chat.said and _words(piece) not in _words(chat.said):
                    return piece
    return None


def _words(text: str) -> str:
    """Return the words of a text: templates write calls of the assistant with quotes, brackets and escapes of JSON."""
    return re.sub(r"[\W_]+", " ", text.replace("\\n", " ")).strip()


def around(text: str, seen: re.Match[str]) -> str:
    start = max(0, seen.start() - 30)
    return excerpt_of(text[start : seen.end() + 60])


def excerpt_of(text: str, limit: int = MAX_EXCERPT) -> str:
    """Return the beginning of a text in a single line."""
    line = " ".join(text[: 4 * limit].split())
    return line if len(line) <= limit and len(text) <= 4 * limit else f"{line[:limit]}…"


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecialTokens:
    """Tokens of a tokenizer by their meaning. special: ids of special tokens; heads, pattern: find them in texts.
    are_bytes: bool[num_ids], tokens of a part of a character, and the unknown token. bos: id of the beginning's token.
    """

    special: NDArray[np.int64]
    heads: tuple[str, ...]
    pattern: re.Pattern[str]
    are_bytes: NDArray[np.bool_]
    bos: int | None

    @staticmethod
    def of(tokenizer: FastTokenizer) -> SpecialTokens:
        described = json.loads(tokenizer.model)
        added = {token["content"]: int(token["id"]) for token in described["added_tokens"] if token["special"]}
        vocab = described["model"].get("vocab") or {}
        ids = dict(vocab) if isinstance(vocab, dict) else {token: number for number, (token, _) in enumerate(vocab)}
        unknown = described["model"].get("unk_token")
        unknown_id = described["model"].get("unk_id", ids.get(unknown))
        are_bytes = np.zeros(tokenizer.num_ids, np.bool_)
        parts = _parts_of_characters(ids, is_byte_level="ByteLevel" in json.dumps(described["pre_tokenizer"]))
        are_bytes[[*parts, *([] if unknown_id is None else [unknown_id])]] = True
        are_bytes[[number for number in added.values() if number != unknown_id]] = False
        found = [] if tokenizer.splits_special else sorted((each for each in added if each), key=len, reverse=True)
        bos = tokenizer.special_tokens.get("bos_token")
        return SpecialTokens(
            special=np.array(sorted({*added.values(), *_not_none([tokenizer.eos_token_id])}), np.int64),
            heads=tuple({each[:2] for each in found}),
            pattern=re.compile("|".join(map(re.escape, found)) or r"(?!)"),
            are_bytes=are_bytes,
            bos=None if not bos else added.get(str(bos), ids.get(str(bos))),
        )


def _not_none(values: Iterable[int | None]) -> list[int]:
    return [each for each in values if each is not None]


def _parts_of_characters(ids: Mapping[str, int], *, is_byte_level: bool) -> list[int]:
    """Return the ids of tokens of bytes inside a character."""
    if not is_byte_level:
        return [number for token, number in ids.items() if _BYTE_TOKEN.fullmatch(token)]
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # GPT-2's alphabet of bytes
    others = [byte for byte in range(256) if byte not in plain]
    byte_of = {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}
    found = []
    for token, number in ids.items():
        if token.isascii() or any(char not in byte_of for char in token):
            continue
        try:
            bytes(byte_of[char] for char in token).decode()
        except UnicodeDecodeError:
            found.append(number)
    return found
