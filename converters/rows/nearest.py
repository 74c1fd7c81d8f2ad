"""Columns that fit no kind of rows -> the nearest kind, and the options to read the rows with it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from shlex import quote
from typing import Any

from ...errors import DataError
from .chat import MEDIA_COLUMNS, MEMBER_IMAGES, SYSTEM_ROLES
from .content import MEDIA_ROLES
from .fields import QUESTIONS, Fields, head_of, is_filled, unpacked, value_at
from .media_columns import can_read, media_columns
from .preference_kinds import KTO, is_verdict
from .row_kind import RowKind
from .side_columns import CHOICES, choices_in, choices_unread
from .speakers import USUAL_ROLES, Readings, readings_of, readings_said

_ALIKE = 0.75  # of SequenceMatcher; more is similar: one of five letters missing, doubled or swapped
_PAIRS = (  # usual names of questions and answers, too general to detect a kind
    ("problem", "solution"), ("problem", "answer"), ("question", "response"), ("query", "answer"),
    ("user", "assistant"), ("human", "assistant"), ("input", "output"), ("input", "target"), ("source", "target"),
    ("query", "answers"), ("question", "answers"),
    ("prompt", "output"), ("prompt", "answer"), ("instruction", "completion"), ("instruction", "answer"),
)  # fmt: skip
_ASKED = {*QUESTIONS, *(asked for asked, _ in _PAIRS)}
_ALTERNATIVES = {*CHOICES, "answers", "completions", "responses", "generations"}  # alternatives, not conversations
_MEDIA_NAMES = {"file_name", *(name for names in {**MEDIA_COLUMNS, **MEMBER_IMAGES}.values() for name in names)}
_ABOUT = re.compile(r"^(num|is|has)_|_(id|ids|idx|index|type|source|model|date|key)$", re.IGNORECASE)  # names of facts
_LONG_NAME = 60  # of a column


@dataclass(frozen=True, kw_only=True, slots=True)
class _Remedy:
    """Options for a kind. kind: of the rows with these options. columns: role -> column, "COLUMN" if users must choose.
    readings: of tags.
    """

    kind: RowKind
    columns: Mapping[str, str]
    readings: Readings = ()

    def said(self, names: Sequence[str]) -> str:
        """Return the options, and the columns that are not read with them."""
        words = [f"--columns {' '.join(quote(f'{role}={name}') for role, name in self.columns.items())}"]
        words += [readings_said(self.readings)] if self.readings else []
        usual = {name for role, each in self.kind.columns.items() if role not in self.columns for name in each}
        heads = {head_of(name, names): name for name in self.columns.values()}
        left = [name for name in names if name not in usual and name not in heads and name != "__key__"]
        left += [f"the rest of {head}" for head, name in heads.items() if head != name]
        leaves = f" (which leaves out {', '.join(left)})" if left and "COLUMN" not in self.columns.values() else ""
        return f"pass {' '.join(words)} for columns with other names{leaves}"


def no_kind(rows: Sequence[Mapping[str, Any]], names: Sequence[str], kinds: Iterable[RowKind]) -> DataError:
    """Return the error for rows with columns of these names."""
    needy = {kind.name: kind for kind in kinds if kind.needs}
    found = f"columns {', '.join(names)} fit no kind of rows"
    if value := next((name for name in names if name.isdigit() or len(name) > _LONG_NAME), None):
        found += f" ({value[:_LONG_NAME]!r} looks like a value: the first row of CSV is to name the columns)"
    keep = "or keep columns as they are with --keep"
    if choices := choices_in(rows):
        return DataError(f"{found}: {choices_unread(choices)}, {keep}")
    media = media_columns(rows, names)
    remedy = next((each for each in _remedies(rows, names, media, needy) if each is not None), None)
    if remedy is None or "COLUMN" in remedy.columns.values():
        keep = f"make such rows with --map FILE.py:FUNCTION, {keep}"
        asked = next((name for name, _ in _columns_of(rows[0]) if _asks_alone(rows, name)), None)
        if asked is not None:
            return DataError(
                f"{found}: column {asked} holds messages that end without an answer: name the answers with "
                f"--columns prompt={quote(asked)} response=COLUMN, {keep}; lmms_stream.rl reads prompts "
                "for reinforcement learning as they are"
            )
    if remedy is None:
        return DataError(
            f"{found} and are not named like those of one: name one's columns with --columns ROLE=COLUMN and --kind "
            f"({', '.join(needy)}), {keep}"
        )
    said = remedy.said(names) if remedy.columns else "complete the rows"
    return DataError(f"{found}; the nearest is {remedy.kind.name}, which needs {remedy.kind.needed}: {said}, {keep}")


def _remedies(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], media: Mapping[str, str], kinds: Mapping[str, RowKind]
) -> Iterator[_Remedy | None]:
    """Yield remedies, the best first: by two answers, values of a column, usual pairs of names, names, a lone text.

    All except the second were tried on the rows; the last, by names, leaves columns to the user.
    """
    yield _compared(rows, names, media, kinds)
    yield _conversation(rows, names, media, kinds)
    listed = {name for row in rows for name, value in row.items() if isinstance(value, list)}
    told = [name for name in names if not _ABOUT.search(name) or name in listed]
    by_names = _by_names(told, media, {name: kind for name, kind in kinds.items() if name != "kto" or _judges(rows)})
    for each in (_pair(names, media, kinds), by_names, _lone_text(rows, names, media, kinds)):
        is_said = each is not None and "COLUMN" not in each.columns.values()
        if each is not None and is_said and (not each.columns or can_read(each.kind, rows, each.columns)):
            yield each
    if by_names is not None and "COLUMN" not in by_names.columns.values():
        needs, columns = _needs(by_names.kind, media), by_names.columns
        by_names = replace(by_names, columns={role: "COLUMN" if role in needs else columns[role] for role in columns})
    yield by_names


def _compared(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], media: Mapping[str, str], kinds: Mapping[str, RowKind]
) -> _Remedy | None:
    """Return how to read two columns of answers, named chosen and rejected."""
    kind, lower = kinds["preference"], {name.lower(): name for name in names}
    pairs = [(lower[name], lower[other]) for name in lower if (other := name.replace("chosen", "rejected")) in lower]
    answers = [
        (chosen, rejected)
        for chosen, rejected in pairs
        if chosen != rejected and all(isinstance(unpacked(row.get(chosen)), (str, list)) for row in rows)
    ]
    asked = [name for name in names if name in QUESTIONS and name not in kind.columns["prompt"]]
    if len(answers) != 1:
        return None
    chosen, rejected = answers[0]
    columns = {"chosen": chosen, "rejected": rejected, **({"prompt": asked[0]} if len(asked) == 1 else {})}
    columns = {**_media_roles(kind, names, media), **columns}
    return _Remedy(kind=kind, columns=columns) if can_read(kind, rows, columns) else None


def _judges(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether rows have a verdict, and a question or an answer."""
    told = [Fields(row, {**KTO.needs, **KTO.may}) for row in rows]
    said = ("prompt", "messages", "response")
    return any(is_verdict(each.get("label")) and any(each.get(role) is not None for role in said) for each in told)


def _pair(names: Sequence[str], media: Mapping[str, str], kinds: Mapping[str, RowKind]) -> _Remedy | None:
    """Return how to read columns with the usual names of a question and its answer."""
    lower, kind = {name.lower(): name for name in names}, kinds["prompt-response"]
    for prompt, response in _PAIRS:
        if prompt in lower and response in lower:
            columns = {"prompt": lower[prompt], "response": lower[response]}
            return _Remedy(kind=kind, columns={**_media_roles(kind, names, media), **columns})
    return None


def _by_names(names: Sequence[str], media: Mapping[str, str], kinds: Mapping[str, RowKind]) -> _Remedy | None:
    """Return how to read columns by the kind with the most similar names; rows with media need a kind with media."""
    able = [
        kind
        for kind in kinds.values()
        if (not media or "images" in kind.columns)
        and (kind.name not in ("caption", "image-label") or _has_media(kind, names, media))
    ]
    usual = {name for kind in kinds.values() for each in kind.columns.values() for name in each}
    others = [name for name in names if name not in media or name in usual]
    nearest = max(able, key=lambda kind: _nearness(kind, others, media))
    if not _nearness(nearest, others, media):
        return None
    needs = _needs(nearest, media)
    missing = [role for role, usual in needs.items() if not set(usual) & set(names)]
    columns = {role: _most_alike(needs[role], others)[1] or "COLUMN" for role in missing}
    return _Remedy(kind=nearest, columns={**_media_roles(nearest, names, media), **columns})


def _has_media(kind: RowKind, names: Sequence[str], media: Mapping[str, str]) -> bool:
    """Return whether columns, by values or names, hold media that a kind reads."""
    roles = [role for role in MEDIA_COLUMNS if role in kind.columns]
    usual = {"file_name", *(name for role in roles for name in kind.columns[role])}
    return bool(usual & set(names)) or any(MEDIA_ROLES[each] in roles for each in media.values())


def _needs(kind: RowKind, media: Mapping[str, str]) -> Mapping[str, Sequence[str]]:
    """Return the needed roles of a kind -> usual names of their columns.

    For rows without media, "question" counts as needed if the kind may have it.
    """
    asked = () if media else ("question",)
    return {**kind.needs, **{role: kind.may[role] for role in asked if role in kind.may}}


def _media_roles(kind: RowKind, names: Sequence[str], media: Mapping[str, str]) -> dict[str, str]:
    """Return the optional media roles of a kind -> the first column with such media and an unusual name."""
    roles: dict[str, str] = {}
    for name, each in media.items():
        role = MEDIA_ROLES[each]
        usual = kind.columns.get(role, ())
        if role in kind.columns and name not in kind.columns and not set(usual) & set(names):
            roles.setdefault(role, name)
    return roles


def _conversation(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], media: Mapping[str, str], kinds: Mapping[str, RowKind]
) -> _Remedy | None:
    """Return how to read a column, or a nested column, with lists of messages or exchanges.

    Users must choose among several columns. Exchanges next to a question of their row are not a conversation.
    """
    is_asked = not set(QUESTIONS).isdisjoint(names)
    for row in rows:
        found: list[tuple[str, RowKind, list[dict[str, str]]]] = []
        for name, value in _columns_of(row):
            messages = [] if name.rpartition(".")[2] in _ALTERNATIVES or _asks_alone(rows, name) else _listed(value)
            kind, readings = _kind_of_messages(messages, kinds), list[dict[str, str]]()
            if messages and kind is None:
                readings = readings_of([each for other in rows for each in _listed(value_at(other, name))])
                kind = kinds["messages"] if readings else None
            if kind is not None and (kind.name != "exchanges" or not is_asked):
                found.append((name, kind, readings))
        if found:
            name, kind, readings = found[0]
            columns = {**_media_roles(kind, names, media), "messages": name if len(found) == 1 else "COLUMN"}
            return _Remedy(kind=kind, columns=columns, readings=readings)
    return None


def _asks_alone(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Return whether a column holds messages without an answer to the last message."""
    lasts = [messages[-1] for row in rows if (messages := _listed(value_at(row, name)))]
    speakers = [each.get("role") or each.get("from") for each in lasts]
    asks = ("user", *SYSTEM_ROLES)
    return bool(speakers) and all(isinstance(each, str) and USUAL_ROLES.get(each, each) in asks for each in speakers)


def _kind_of_messages(messages: Sequence[Mapping[str, Any]], kinds: Mapping[str, RowKind]) -> RowKind | None:
    """Return the kind of rows for such messages or exchanges; None for keys of other names."""
    if not messages:
        return None
    first = messages[0]
    if isinstance(first.get("role"), str) and "content" in first:
        return kinds["messages"]
    if isinstance(first.get("from"), str) and "value" in first:
        return kinds["sharegpt"]
    exchanges = kinds["exchanges"]
    return exchanges if exchanges.fits({"messages": list(messages)}, {}) else None


def _columns_of(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the columns of a row, and the members of its objects under names with dots."""
    for name, value in row.items():
        yield name, value
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", each) for inner, each in value.items())


def _listed(value: Any) -> list[Mapping[str, Any]]:
    """Return the objects of a list, also from JSON text."""
    listed = unpacked(value)
    return [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []


def _lone_text(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], media: Mapping[str, str], kinds: Mapping[str, RowKind]
) -> _Remedy | None:
    """Return how to read rows with one column of texts: documents, or captions of media.

    None for several texts, for a question, for a caption next to lists or objects, which may hold answers, and for a
    text shorter than the lists and objects.
    """
    texts = [
        name
        for name in names
        if name not in media
        and name not in ("id", "__key__")
        and all(isinstance(row.get(name), str) for row in rows if is_filled(row.get(name)))
        and any(is_filled(row.get(name)) for row in rows)
    ]
    has_media = bool(media) or bool(_MEDIA_NAMES & set(names))
    others = [name for name in names if name not in media and name not in _MEDIA_NAMES]
    lists = [row[name] for row in rows for name in others if isinstance(row.get(name), (list, dict))]
    if len(texts) != 1 or texts[0].lower() in _ASKED or (has_media and any(map(is_filled, lists))):
        return None
    if sum(len(row.get(texts[0]) or "") for row in rows) < sum(len(str(each)) for each in lists):
        return None  # a row's name next to content in lists or objects
    kind = kinds["caption" if has_media else "text"]
    return _Remedy(kind=kind, columns={**_media_roles(kind, names, media), "text": texts[0]})


def _nearness(kind: RowKind, names: Sequence[str], media: Mapping[str, str]) -> float:
    """Return the share of needed columns that exist: 1 for each, less for a similar name.

    Optional columns decide between kinds with equal shares.
    """
    needs = _needs(kind, media)
    needed = sum(_most_alike(usual, names)[0] for usual in needs.values()) / len(needs)
    may = sum(bool(set(usual) & set(names)) for usual in kind.may.values())
    return needed + may / 1000 if needed else 0.0


def _most_alike(usual: Sequence[str], names: Sequence[str]) -> tuple[float, str]:
    """Return the highest similarity of a name to a usual name, and this name.

    0 for no similarity; "" also for several equally similar names.
    """
    found = [(SequenceMatcher(None, name.lower(), other).ratio(), name) for name in names for other in usual]
    best = max((ratio for ratio, _ in found), default=0.0)
    most = {name for ratio, name in found if ratio == best}
    if best <= _ALIKE:
        return 0.0, ""
    return best, most.pop() if len(most) == 1 else ""
