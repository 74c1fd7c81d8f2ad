"""Columns that fit no kind of rows -> the options that may read the rows, by the values of the columns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from .chat import MEDIA_COLUMNS, MEMBER_IMAGES, SYSTEM_ROLES
from .chat_kinds import EXCHANGES
from .content import MEDIA_ROLES
from .fields import QUESTIONS, head_of, is_filled, unpacked, value_at
from .kinds import KINDS
from .media_columns import media_columns
from .preference_kinds import is_verdict
from .remedies import Choice, UndecidedError
from .side_columns import ANSWERS, CHOICES, choices_in, choices_unread
from .speakers import USUAL_ROLES, readings_of

# Pairs of names with one meaning: a question and its answer. Other names are offered, and the user decides.
_PAIRS = (
    ("problem", "solution"), ("problem", "answer"), ("question", "answer"), ("question", "response"),
    ("question", "solution"), ("query", "answer"), ("user", "assistant"), ("human", "assistant"), ("input", "output"),
    ("input", "target"),
    ("source", "target"), ("src", "tgt"), ("q", "a"), ("prompt", "output"), ("prompt", "answer"),
    ("instruction", "completion"), ("instruction", "answer"), ("article", "highlights"), ("article", "summary"),
    ("document", "summary"), ("dialogue", "summary"),
)  # fmt: skip
_TEXTS = ("content", "raw_content", "document", "body", "markdown", "page_content", "contents", "code")
_ASKED = (*QUESTIONS, "q", "user", "human", "source", "src", "article", "document")
_ANSWERED = (*ANSWERS, "a", "assistant", "solution", "tgt", "summary", "highlights")
_ALTERNATIVES = {*CHOICES, "answers", "completions", "responses", "generations"}  # alternatives, not conversations
_USUAL_MEDIA = {"file_name", *(name for names in MEDIA_COLUMNS.values() for name in names)}
_MEDIA_NAMES = {"file_name", *(name for names in {**MEDIA_COLUMNS, **MEMBER_IMAGES}.values() for name in names)}
_OF_FACTS = re.compile(
    r"^(num|is|has)_|(^|_)(id|ids|idx|index|uuid|hash|sha\d*|type|source|model|date|key|url|path|lang|language|license)$",
    re.IGNORECASE,
)
_OF_THOUGHTS = re.compile(r"think|thought|reason|(^|_)cot(_|$)|trajector|rationale", re.IGNORECASE)
_PAIRS_OF_ANSWERS = (
    ("chosen", "rejected"), ("preferred", "non_preferred"), ("preferred", "dispreferred"), ("better", "worse"),
    ("best", "worst"), ("winner", "loser"), ("positive", "negative"),
)  # fmt: skip
PROMPTS = "holds prompts without answers, which lmms_stream.rl reads for reinforcement learning"
_LONG_NAME = 60  # of a column


def no_kind(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> UndecidedError:
    """Return the error for rows with columns of these names, with the options that may read the rows."""
    found = f"columns {', '.join(names)} fit no kind of rows"
    if value := next((name for name in names if name.isdigit() or len(name) > _LONG_NAME), None):
        found += f" ({value[:_LONG_NAME]!r} looks like a value: the first row of CSV is to name the columns)"
    by_map = "make other rows with --map FILE.py:FUNCTION, or keep the columns with --keep"
    if alternatives := choices_in(rows):
        what, _, rest = choices_unread(alternatives)
        return UndecidedError(f"{found}: {what}", (), f"{rest}, or keep the columns with --keep")
    if asked := prompts_in(rows, names):
        found += f": column {asked} {PROMPTS}"
    choices = {str(choice): choice for choice in _choices(rows, names)}
    return UndecidedError(found, [*choices.values()], by_map)


def sure_choice(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Choice | None:
    """Return the columns of rows whose names have one meaning: a question and an answer, or a document.

    None if the rows have other texts.
    """
    texts = _texts(rows, names)
    if media_columns(rows, names) or _MEDIA_NAMES & {*names} or any(map(_OF_THOUGHTS.search, names)):
        return None
    lower = {name.lower(): name for name in texts}
    if len(lower) == 1 and (text := next(iter(lower))) in _TEXTS:
        return Choice(columns={"text": lower[text]})
    pair = next((pair for pair in _PAIRS if {*pair} == {*lower}), None)
    return Choice(columns={"prompt": lower[pair[0]], "response": lower[pair[1]]}) if pair else None


def _choices(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Iterator[Choice]:
    """Yield options, the best first: two answers, a conversation, a question and its answer, a document or caption."""
    media = media_columns(rows, names)
    roles = {MEDIA_ROLES[kind]: name for name, kind in reversed(media.items()) if name not in _USUAL_MEDIA}
    texts = [name for name in _texts(rows, names) if name not in media]
    asked, prompts = _like(texts, _ASKED), [name for name, _ in _columns_of(rows[0]) if _asks_alone(rows, name)]
    for pair in _compared(rows, names):
        yield Choice(columns={**roles, **pair, **({"prompt": asked} if asked else {})})
    for columns, tags in _conversations(rows, names):
        why = f"if {tags['assistant_tag']} is the assistant" if {"user_tag", "assistant_tag"} <= tags.keys() else ""
        yield Choice(columns={**roles, **columns}, tags=tags, why=why)
    if prompts and (answered := _like(texts, _ANSWERED)):
        yield Choice(columns={**roles, "prompt": prompts[0], "response": answered})
    pairs = _pair(rows, texts)
    is_judged = any(is_verdict(row.get("label")) for row in rows)
    for one, other in pairs:  # a label next to texts of unknown names need not judge an answer
        no_label = {"label": ""} if is_judged and not asked else {}
        yield Choice(columns={**roles, "prompt": one, "response": other, **no_label})
    if not pairs:
        yield from _misspelt(names)
    has_media = media or _MEDIA_NAMES & {*names}
    if has_media and len(texts) == 1 and texts[0].lower() not in QUESTIONS:
        yield Choice(columns={**roles, "text": texts[0]})
    elif texts and not has_media and not asked and not prompts:
        yield Choice(columns={"text": texts[0]})


def _texts(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """Return the columns of texts in their order; of members of objects if rows have no other texts.

    Facts about a row are no texts: single words under a usual name of facts, or equal in all rows. Answers may be
    numbers.
    """
    inner = [name for name, _ in _columns_of(rows[0]) if name not in names and head_of(name, rows[0]) in names]
    listed = ([name for name in each if _is_text(rows, name)] for each in (names, inner))
    return next(filter(None, listed), [])


def _is_text(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    values = [value for row in rows if is_filled(value := value_at(row, name))]
    is_usual = _like([name], (*_ASKED, *_ANSWERED, *_TEXTS)) is not None
    types: tuple[type, ...] = (str, int, float) if is_usual else (str,)
    if not values or name == "__key__" or not all(isinstance(value, types) for value in values):
        return False
    words = max(len(str(value).split()) for value in values)
    if _OF_FACTS.search(name):
        return words > 3
    is_same = len(values) > 2 and len({*map(str, values)}) == 1
    return is_usual or words > 1 or not is_same or str(values[0]).endswith((".", "?", "!"))


def _pair(rows: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> list[tuple[str, str]]:
    """Return pairs of columns that may be a question and its answer; names decide, then lengths and the order."""
    asked = _like(texts, _ASKED)
    answers = [name for name in texts if name != asked and _like([name], _ANSWERED)]
    others = answers if asked and answers else [name for name in texts if name != asked]
    others.sort(key=lambda name: -sum(len(str(value_at(row, name) or "")) for row in rows))
    if asked:
        return [(asked, other) for other in others]
    if answers:
        return [(other, answers[0]) for other in texts if other not in answers]
    return [(texts[0], texts[1]), (texts[1], texts[0])] if len(texts) == 2 else []


def _misspelt(names: Sequence[str]) -> Iterator[Choice]:
    """Yield the columns of kinds whose names are nearly those of the rows."""
    for kind in KINDS.values():
        near = {role: _like(names, usual) for role, usual in kind.needs.items()}
        if near and all(near.values()) and (kind.name != "text" or len(names) == 1):
            columns = {role: name for role, name in near.items() if name and name not in kind.needs[role]}
            yield Choice(columns=columns) if columns else Choice(kind=kind.name)


def _like(names: Sequence[str], usual: Sequence[str]) -> str | None:
    """Return the name that is one of the usual names, or else nearly is."""
    lower = {name.rpartition(".")[2].lower(): name for name in reversed(names)}
    exact = next((lower[each] for each in usual if each in lower), None)
    near = (get_close_matches(each, lower, 1, 0.9) for each in usual if len(each) > 3)
    return exact or next((lower[found[0]] for found in near if found), None)


def _compared(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Iterator[dict[str, str]]:
    """Yield two columns of answers, named chosen and rejected, better and worse, …"""
    lower = {name.lower(): name for name in names}
    for good, bad in _PAIRS_OF_ANSWERS:
        for name in lower:
            other = name.replace(good, bad, 1)
            if good in name and other != name and other in lower:
                pair = {"chosen": lower[name], "rejected": lower[other]}
                if all(isinstance(unpacked(row.get(each)), (str, list)) for row in rows for each in pair.values()):
                    yield pair


def _conversations(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> Iterator[tuple[dict[str, str], Mapping[str, str]]]:
    """Yield columns, also of members of objects, with lists of messages or exchanges, and the tags of messages.

    Exchanges next to a question of their row are not a conversation.
    """
    for name, value in (each for row in rows[:1] for each in _columns_of(row)):
        messages = [] if name.rpartition(".")[2] in _ALTERNATIVES or _asks_alone(rows, name) else _listed(value)
        if not messages:
            continue
        first = messages[0]
        if ("role" in first and "content" in first) or ("from" in first and "value" in first):
            yield {"messages": name}, {}
        elif EXCHANGES.fits({"messages": messages}, {}):
            if {*QUESTIONS}.isdisjoint(names):
                yield {"messages": name}, {}
        else:
            listed = [each for row in rows for each in _listed(value_at(row, name))]
            yield from (({"messages": name}, tags) for tags in readings_of(listed))


def prompts_in(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str | None:
    """Return the column of messages without an answer, or of questions, that is the only text of the rows."""
    listed = next(
        (name for name, _ in _columns_of(rows[0]) if head_of(name, names) in names and _asks_alone(rows, name)), None
    )
    texts = _texts(rows, names)
    if listed is not None:
        return None if _like(texts, _ANSWERED) else listed
    is_alone = not any(isinstance(unpacked(value), (list, dict)) and value for value in rows[0].values())
    return texts[0] if is_alone and len(texts) == 1 and texts[0].lower() in QUESTIONS else None


def _asks_alone(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Return whether a column holds messages without an answer to the last message."""
    lasts = [messages[-1] for row in rows if (messages := _listed(value_at(row, name)))]
    speakers = [each.get("role") or each.get("from") for each in lasts]
    asks = ("user", *SYSTEM_ROLES)
    return bool(speakers) and all(isinstance(each, str) and USUAL_ROLES.get(each, each) in asks for each in speakers)


def only_asks(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Return whether a column holds messages of the user and the system alone."""
    messages = [message for row in rows for message in _listed(value_at(row, name))]
    return bool(messages) and _asks_alone([{name: [message]} for message in messages], name)


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
