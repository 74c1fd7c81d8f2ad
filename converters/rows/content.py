"""Content of turns -> stored content: text, and parts with spans of the sample's media. Pure except for reading media.

A text may hold `<image>`, `<audio>` and `<video>` at the place of the row's media, and a part may hold only its type:
both take the next of the row's `images`, `audios` or `videos`. Without this column they stay plain text. `<image>` may
stand for the videos of a row without images.
"""

from __future__ import annotations

import json
import mimetypes
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any

from ...errors import DataError
from ...processors.chat_template import REASONING_KEYS
from ...processors.stored_chat import check_values
from .fields import is_filled, parse_json, references_of
from .references import FACTS_OF_SOME, SampleMedia, is_data, shown

Turn = dict[str, Any]  # a message with `role` and `content`, unchanged from its row

MEDIA_ROLES = {"image": "images", "audio": "audios", "video": "videos"}  # kind of media -> role of their column
PART_KINDS = {
    "image": "image", "image_url": "image", "input_image": "image", "audio": "audio", "audio_url": "audio",
    "input_audio": "audio", "video": "video", "video_url": "video", "input_video": "video",
}  # fmt: skip
# Anthropic's source: {"type", "media_type", "data"}; LMMS Engine's value: {"type": "image_url", "value": URL}
_SOURCES = ("url", "path", "base64", "data", "bytes", "source", "value")
_TEXT_PARTS = ("text", "input_text", "output_text")
_IN_PLACE_OF_CONTENT = ("tool_calls", "function_call", *REASONING_KEYS)
EMPTY = "empty "  # before the speaker's name in a note of an empty message
REPEATED = "repeated question"  # note of an answer that begins with its question
_LEAST_REPEATED = 16  # characters of the shortest question to look for

# Slots of columns, and Qwen-VL's paths of images, and ms-swift's places of objects in an image.
_SLOT = re.compile(f"<(?:{'|'.join(MEDIA_ROLES)}|img(?=>[^<>]+</img>)|bbox|ref-object)>")
_STORE = re.compile(r"(?!file:)[a-z][a-z0-9+.-]*://", re.IGNORECASE)

_NO_FACTS = {"type", "mime", "span", "video_start", "video_end"}  # keys of a stored part

Waiting = Mapping[str, Sequence[Any]]  # kind -> references of the row, in order; kinds without a column are absent


def file_kind(name: Any) -> str | None:
    """Return the kind of media by a file name, for metadata of an imagefolder; None for other files."""
    kind = (mimetypes.guess_type(name)[0] or "").partition("/")[0] if isinstance(name, str) else ""
    return kind if kind in MEDIA_ROLES else None


def store_content(turns: Sequence[Turn], waiting: Waiting, media: SampleMedia, *, in_front: bool) -> list[Turn]:
    """Return the turns with stored content; their media are added to `media` in the order of the conversation.

    Media in keys of a message (`image`, `images`, …) fill the slots of the message, or come before its text. If the
    messages hold all media of the row in the same order, the media are stored once. in_front: other media of the row
    without slots come before the first text of the user. DataError unless there are as many media as slots, and for
    content other than text or parts.
    """
    turns = [_with_own_media(turn) for turn in turns]
    texts = [text_of(turn["content"]) for turn in turns] if waiting.get("video") and not waiting.get("image") else []
    num_slots = sum(text.count("<image>") for text in texts)
    if num_slots and num_slots == len(waiting["video"]) and not any("<video>" in text for text in texts):
        plain = [turn for turn in turns if isinstance(turn["content"], str)]  # LLaVA-Video writes <image> for a video
        for turn in plain:
            turn["content"] = turn["content"].replace("<image>", "<video>")
    split = [turn | {"content": _split(turn["content"], waiting)} for turn in turns]
    for kind, references in waiting.items():
        slots, held = _slots_and_held([part for turn in split for part in _listed(turn["content"])], kind)
        if references and not slots and _are_same(references, held, kind):
            continue
        first = next((turn for turn in split if turn["role"] == "user"), None)
        if in_front and first and references and not slots:
            slots = [{"type": kind} for _ in references]
            first["content"] = slots + [part for part in _listed(first["content"]) if part != _text("")]
        elif len(slots) != len(references):
            remedy = "correct the row" if slots or held else f"write <{kind}> where each belongs"
            raise DataError(
                f"{len(slots)} slots for media of kind {kind} (<{kind}>, or a part without a source) and "
                f"{len(references)} {MEDIA_ROLES[kind]}{f' (messages hold {len(held)} others)' if held else ''}: "
                f"{remedy}, or pass --columns {MEDIA_ROLES[kind]}= to leave them out"
            )
        for slot, reference in zip(slots, references, strict=True):
            slot[kind] = reference
    for turn in split:
        check_values(turn)
        if isinstance(turn["content"], list):
            turn["content"] = [_store(part, media) for part in turn["content"]]
    return split


def notes_of(turns: Sequence[Turn]) -> set[str]:
    """Return notes on media slots that stayed text, speakers of empty messages, and questions repeated in answers.

    Messages are noted only if they are trained on or answered.
    """
    texts = [text_of(turn["content"]).strip() for turn in turns]
    notes = {slot for text in texts for slot in _SLOT.findall(text)}
    for turn, text in zip(turns, texts, strict=True):
        if text or turn["role"] not in ("user", "assistant") or not turn.get("learn", True):
            continue
        parts = turn["content"] if isinstance(turn["content"], list) else []
        has_media = any(part.get("type") not in _TEXT_PARTS for part in parts)
        if not has_media and not any(is_filled(turn.get(key)) for key in _IN_PLACE_OF_CONTENT):
            notes.add(f"{EMPTY}{turn['role']}")
    for (asked, question), (answer, text) in pairwise(zip(turns, texts, strict=True)):
        is_pair = asked["role"] == "user" and answer["role"] == "assistant" and answer.get("learn", True)
        if is_pair and repeats(question, text):
            notes.add(REPEATED)
    return notes


def repeats(asked: str, answer: str) -> bool:
    """Return whether an answer begins with the full text of its question.

    >>> repeats("Who wrote Emma, and when?", "Who wrote Emma, and when? Jane Austen, in 1815.")
    True
    """
    return len(asked) >= _LEAST_REPEATED and answer.startswith(asked)


def may_hold_slots(text: str) -> bool:
    return _SLOT.search(text) is not None


def tool_calls(value: Any, name: str) -> list[dict[str, Any]]:
    """Return function calls in OpenAI's format, from one {"name", "arguments"} or several, also in JSON text.

    name: source of the calls, for messages.
    """
    called = parse_json(value, name) if isinstance(value, str) else value
    calls = called if isinstance(called, list) else [called]
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise DataError(f"a function call must be an object with a name, found {json.dumps(call)[:80]}: correct it")
    return [{"type": "function", "function": call} for call in calls]


def _with_own_media(turn: Turn) -> Turn:
    """Return the turn with the media of its keys in parts of its content; DataError unless they fit its slots.

    Empty keys are left out, and keys whose media the parts already hold. Keys with other values stay, such as `"audio":
    {"id": …}`.
    """
    named = {name: kind for kind, role in MEDIA_ROLES.items() for name in (role, kind) if name in turn}
    if not named:
        return turn
    held = {name: references_of(turn[name]) if is_filled(turn[name]) else [] for name in named}
    names = {name: kind for name, kind in named.items() if not held[name] or any(map(_may_lead_to_media, held[name]))}
    own = {kind: held[name] for name, kind in names.items() if held[name]}
    left = {key: value for key, value in turn.items() if key not in names}
    if not own:
        return left
    parts = _listed(_split(turn["content"], own))
    for kind, references in reversed(own.items()):
        said = [name for name, each in names.items() if each == kind and held[name]]
        slots, others = _slots_and_held(parts, kind)
        if others and not slots:
            if len(said) == 1 and _are_same(references, others, kind):
                continue
            raise DataError(
                f"a message has {len(references)} media in {' and '.join(said)} and {len(others)} others in parts of "
                f"type {kind}: keep one of the two, or write all media as parts"
            )
        if len(said) > 1:
            raise DataError(f"a message has media in {' and in '.join(said)}: keep one of these keys")
        if not slots:
            slots = [{"type": kind} for _ in references]
            parts = slots + [part for part in parts if part != _text("")]
        if len(slots) != len(references):
            raise DataError(
                f"a message has {len(references)} media in {said[0]} and {len(slots)} slots for them (<{kind}>): write "
                "a slot in the text for each medium, or no slot"
            )
        for slot, reference in zip(slots, references, strict=True):
            slot[kind] = reference
    return {**left, "content": parts}


def _may_lead_to_media(value: Any) -> bool:
    """Whether a value may be a reference to media; a list may be the frames of a video."""
    if isinstance(value, Mapping):
        return any(value.get(name) is not None for name in ("bytes", "path", "url", "data"))
    return isinstance(value, (str, bytes, bytearray, memoryview, list, tuple))


def _slots_and_held(parts: Sequence[dict[str, Any]], kind: str) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return the parts of a kind without a reference, and the references of the other parts."""
    sources = [(part, _source(part, kind)[1]) for part in parts if PART_KINDS.get(part["type"]) == kind]
    return [part for part, source in sources if source is None], [each for _, each in sources if each is not None]


def _are_same(references: Sequence[Any], held: Sequence[Any], kind: str) -> bool:
    """Return whether the references of a key or column lead to the media of the parts, in the same order."""
    ours = [_source({"type": kind, kind: reference}, kind)[1] for reference in references]
    return len(ours) == len(held) and all(map(_leads_to_same, ours, held))


def _split(content: Any, waiting: Waiting) -> Any:
    """Return content unchanged, or in parts if text holds media slots."""
    if isinstance(content, str):
        pieces = _split_text(content, waiting)
        return content if pieces == [_text(content)] else pieces
    if content is None:
        return None
    if not isinstance(content, list):
        raise DataError(
            f"content must be a string or a list of parts, found {type(content).__name__}: correct the message"
        )
    parts = list[dict[str, Any]]()
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else part
        if (text := _text_of_part(part)) is not None:
            parts += _split_text(text, waiting)
        elif isinstance(part, dict) and isinstance(kind, str) and kind in PART_KINDS:
            parts.append({key: value for key, value in part.items() if value is not None})
        else:
            raise DataError(
                f"content parts of type {kind!r} are not supported: expected {{'type': 'text', 'text': …}} or one of "
                f"{', '.join(PART_KINDS)}"
            )
    return parts


def text_of(content: Any) -> str:
    """The text of content: of parts, their texts joined."""
    parts = content if isinstance(content, list) else []
    return content if isinstance(content, str) else "".join(_text_of_part(part) or "" for part in parts)


def _text_of_part(part: Any) -> str | None:
    """Return the text of a part; None for a part of another type, or without text."""
    if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS:
        return None
    text = part.get("value") if part.get("text") is None else part["text"]
    return text if isinstance(text, str) else None


def _split_text(text: str, waiting: Waiting) -> list[dict[str, Any]]:
    """Return parts whose texts and placeholders join to the text."""
    if not waiting:
        return [_text(text)]
    pattern = "|".join(f"<{kind}>" for kind in waiting)
    pieces = re.split(f"({pattern})", text)
    parts = [{"type": piece[1:-1]} if index % 2 else _text(piece) for index, piece in enumerate(pieces)]
    return [part for part in parts if part != _text("")] or [_text("")]


def _store(part: dict[str, Any], media: SampleMedia) -> dict[str, Any]:
    if part["type"] == "text":
        return part
    kind = PART_KINDS[part["type"]]
    source_key, source = _source(part, kind)
    if source is None:
        raise DataError(
            f"a part of type {part['type']!r} has no source, and the row no column of {MEDIA_ROLES[kind]}: "
            f"give it a path or data, or name the column with --columns {MEDIA_ROLES[kind]}=COLUMN"
        )
    _check_one_reference(part, kind)
    said = [each for each in (part, part.get(source_key), source) if isinstance(each, Mapping)]
    stored = media.add(kind, source, said=said)
    facts = (stored.keys() - _NO_FACTS) | {*FACTS_OF_SOME}
    # A row may give a fact's name another meaning, for example fps: the number of frames to choose.
    others = {f"said_{key}" if key in facts else key: value for key, value in part.items() if key != source_key}
    return others | stored


def _source(part: Mapping[str, Any], kind: str) -> tuple[str, Any]:
    """Return the key and the reference of a part; None for a reference in the row's column."""
    return next(_references(part, kind), ("", None))


def _references(part: Mapping[str, Any], kind: str) -> Iterator[tuple[str, Any]]:
    """Yield the keys and the references of a part, starting with the reference to read."""
    for key in dict.fromkeys((part["type"], kind, f"{kind}_url", *_SOURCES)):
        if key in part:
            value = part[key]
            if key == "source" and not isinstance(value, Mapping):
                continue  # a text about the origin of the image
            is_base64 = key in ("base64", "data", "input_audio") or (key == "source" and value.get("url") is None)
            if isinstance(value, Mapping) and not {"bytes", "path"} & set(value):
                value = next((value[name] for name in ("url", "data") if value.get(name) is not None), value)
            if is_base64 and isinstance(value, str) and not value.startswith("data:"):
                value = f"data:;base64,{value}"
            yield key, value


def _check_one_reference(part: Mapping[str, Any], kind: str) -> None:
    """Raise DataError for a part with two references to media.

    A URL, or a path next to the bytes of the media, only describes the origin.
    """
    (first, source), *others = [*_references(part, kind)] or [("", None)]
    for key, value in others:
        inner = _inner(value)
        is_origin = "path" in (first, key) and is_data(source) != is_data(inner)
        if isinstance(inner, str):  # on the web, or in a store where the source is not an address
            is_origin |= inner.lower().startswith(("http://", "https://"))
            is_origin |= bool(_STORE.match(inner)) and not _STORE.match(str(_inner(source))[:80])
        is_reference = inner and isinstance(inner, (str, bytes, Mapping))
        if is_reference and not is_origin and not _leads_to_same(inner, source):
            raise DataError(
                f"a part of type {part['type']!r} has two references, {first}: {shown(source)} and {key}: "
                f"{shown(value)}, and one would be lost: keep one, or make each a part"
            )


def _inner(reference: Any) -> Any:
    """Return the bytes or the path of an object with bytes or a path; other references unchanged."""
    if isinstance(reference, Mapping) and {"bytes", "path"} & set(reference):
        return reference.get("path") if reference.get("bytes") is None else reference["bytes"]
    return reference


def _leads_to_same(one: Any, other: Any) -> bool:
    """Return whether two references are equal, or two paths of which one ends with the other.

    >>> _leads_to_same("x/a.png", {"bytes": None, "path": "/data/x/a.png"}), _leads_to_same("x/a.png", "y/a.png")
    (True, False)
    """
    one, other = _inner(one), _inner(other)
    if one == other or not isinstance(one, str) or not isinstance(other, str) or is_data(one) or is_data(other):
        return bool(one == other)
    short, long = sorted((PurePosixPath(one).parts, PurePosixPath(other).parts), key=len)
    return bool(short) and long[-len(short) :] == short


def _listed(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [_text(content)]
    return list(content or [])


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
