"""Columns next to the read columns of a kind, without which rows would change their meaning. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from .chat import MEDIA_COLUMNS
from .column_names import (
    ANSWERS,
    CHOICES,
    CLASSES,
    CONTEXTS,
    FIRST,
    LONG_CONTEXTS,
    OF_ANSWERS,
    OF_JUDGES,
    WORKED,
    columns_of_choices,
)
from .content import MEDIA_ROLES, file_kind
from .fields import QUESTIONS, Columns, head_of, is_filled, references_of, unpacked
from .references import usual_kind
from .row_kind import Choice, RowKind, UndecidedError
from .speakers import usual_role

_BY_MAP = "with --map FILE.py:FUNCTION"
_Found = tuple[str, Sequence[Choice], str]  # the loss, the options to try, and a remedy without a proof
_ASKED = {  # kind -> roles of the question and of its answer
    "question-answer": ("question", "answer"),
    "prompt-response": ("prompt", "response"),
    "alpaca": ("instruction", "output"),
    "preference": ("prompt", "chosen"),
    "kto": ("prompt", "response"),
}
_NUMBER = re.compile(r"-*\d+\.?\d*")
_SPEAKERS = ("user", "assistant", "prompter")
_RENDERED = "Below is an instruction"  # first words of Alpaca's texts of a whole row


def choices_unread(rows: Iterable[Mapping[str, Any]]) -> _Found | None:
    """Return the error about the first filled column of choices in the rows, or about columns of one choice each."""
    for row in rows:
        name = next((f"column {name} holds" for name in CHOICES if is_filled(row.get(name))), None)
        columns = [*columns_of_choices(row).values()]
        if name or columns:
            are = name or f"columns {', '.join(columns[:3])}, … hold"
            rest = f"write the choices into the question and the chosen one into the answer, {_BY_MAP}"
            return f"{are} what the answer is chosen from, and no kind reads it", (), rest
    return None


def check_side_columns(
    rows: Sequence[Mapping[str, Any]],
    kind: RowKind,
    *,
    found: Mapping[str, str],
    left: Sequence[str],
    columns: Mapping[str, str],
) -> None:
    """Raise UndecidedError if columns that are left out belong to read columns.

    Choices or a context belong to a question, a worked solution or a worse answer to an answer, an answer to messages
    or a text, a speaker to a text, settings of the template to messages, bounds of samples to tokens. found: role ->
    column. columns: role -> the user's column.
    """
    refused = {name for role, column in columns.items() if not column for name in kind.columns.get(role, ())}
    read = _Read(rows, kind.name, kind.columns, found, [name for name in left if name not in refused], columns)
    checks = (_rejected, _choices, _index, _context, _worked, _question, _answer, _media, _answer_of_text, _speaker)
    loss = next(filter(None, (check(read) for check in checks)), None)
    if loss is not None:
        what, choices, rest = loss
        last = [] if choices and choices[-1].kind and choices[-1].why else [Choice(kind=kind.name)]
        raise UndecidedError(what, [*choices, *last], rest)
    for row in rows:
        if (said := each_row_loses(row, kind.name, row.keys() - {*read.left})) is not None:
            what, _, rest = said.partition(": ")
            raise UndecidedError(what, [Choice(kind=kind.name)], rest)


@dataclass(frozen=True, slots=True)
class _Read:
    """Rows of a kind. found: role -> read column. left: columns left out. columns: named by the user."""

    rows: Sequence[Mapping[str, Any]]
    kind: str
    roles: Columns
    found: Mapping[str, str]
    left: Sequence[str]
    columns: Mapping[str, str]

    def values(self, names: Iterable[str]) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
        """Yield name, value and row for the filled values of columns that are left out."""
        for name in names:
            if name in self.left:
                yield from ((name, row[name], row) for row in self.rows if is_filled(row.get(name)))

    def mostly(self, name: str, is_lost: Callable[[Any, Mapping[str, Any]], bool]) -> bool:
        """Return whether at least half of the rows with a value in a column lose it."""
        lost = [is_lost(value, row) for _, value, row in self.values([name])]
        return bool(lost) and 2 * sum(lost) >= len(lost)

    def is_said(self, value: Any, row: Mapping[str, Any]) -> bool:
        """Return whether the texts read contain the longest text of a value, or the value contains the question.

        White space is ignored.
        """
        asked = row.get(self.found.get(_ASKED.get(self.kind, (self.kind,))[0], ""))
        if isinstance(value, str) and value.startswith(_RENDERED):
            return True
        if isinstance(value, str) and isinstance(asked, str) and _words(asked) in _words(value):
            return True
        longest, texts = _words(_longest(value)), (row.get(name) for name in self.found.values())
        return bool(longest) and any(longest in _words(text) for text in texts if isinstance(text, str))


def _rejected(read: _Read) -> _Found | None:
    asked, answered = (read.found.get(role) for role in _ASKED.get(read.kind, ("", "")))
    said = read.found.get("messages")
    if read.kind in ("preference", "kto") or not (answered or said):
        return None
    names = [name for name in read.left if "rejected" in name.lower() and name != "rejected"]  # see check_pairs
    for name, value, _ in read.values(names):
        listed = unpacked(value)
        if isinstance(listed, str) or (isinstance(listed, list) and _longest(listed)):
            pair = {"prompt": None if said else asked, "chosen": said or answered, "rejected": name}
            choices = [Choice(columns={role: column for role, column in pair.items() if column})]
            rest = f"write the two answers into columns chosen and rejected, {_BY_MAP}"
            return f"column {name} holds worse answers than those that are read", choices, rest
    return None


def _choices(read: _Read) -> _Found | None:
    if read.kind not in ("question-answer", "prompt-response", "alpaca"):
        return None
    unread: list[dict[str, Any]] = []
    for row in read.rows:
        listed = {name: row[name] if isinstance(row[name], list) else [row[name]] for name in read.left if name in row}
        unread.append({name: row[name] for name in listed if not all(read.is_said(one, row) for one in listed[name])})
    return choices_unread(unread)


def _index(read: _Read) -> _Found | None:
    """Describe answers that are numbers of texts in a column left out."""
    answered = read.found.get(_ASKED.get(read.kind, ("", ""))[1], "")
    rows = [row for row in read.rows if is_filled(row.get(answered))]
    if not rows or not all(re.fullmatch(r"\d{1,3}", str(row[answered]), re.ASCII) for row in rows):
        return None
    for name in read.left:
        lists = [(unpacked(row.get(name)), int(row[answered])) for row in rows]
        if all(
            isinstance(texts, list) and len(texts) > 1 and {*map(type, texts)} == {str} and number <= len(texts)
            for texts, number in lists
        ):
            what = f"column {answered} holds numbers, which are those of texts in column {name}"
            return what, (), f"write the text in place of its number, {_BY_MAP}"
    return None


def _context(read: _Read) -> _Found | None:
    role, answered = _ASKED.get(read.kind, ("", ""))
    asked = read.found.get(role)
    if asked is None:
        return None

    def is_lost(value: Any, row: Mapping[str, Any]) -> bool:
        question, longest = row.get(asked), _longest(value)
        is_long = name in CONTEXTS or (len(longest.split()) > 1 and len(str(value)) > len(str(question)))
        is_said = read.is_said(value, {asked: question})  # an answer that repeats its context does not ask about it
        return isinstance(question, str) and bool(question and longest) and is_long and not is_said

    for name in dict.fromkeys((*CONTEXTS, *LONG_CONTEXTS)):
        if read.mostly(name, is_lost):
            is_text = all(isinstance(value, str) for _, value, _ in read.values([name]))
            what = f"column {name} holds what {asked} is about, and nothing reads it"
            instruction, given = (name, asked) if name in FIRST else (asked, name)
            if not is_text or "input" in read.found:
                choices = []
            elif read.kind in ("preference", "kto"):
                choices = [Choice(columns={"prompt": instruction, "input": given})]
            else:
                named = {"instruction": instruction, "input": given, "output": read.found.get(answered, answered)}
                choices = [Choice(kind="alpaca", columns=named)]
            return what, choices, f"write it into {asked}, {_BY_MAP}"
    return None


def _worked(read: _Read) -> _Found | None:
    role = _ASKED.get(read.kind, ("", ""))[1]
    answered = read.found.get(role)
    if read.kind not in ("question-answer", "prompt-response", "alpaca") or role in read.columns or answered is None:
        return None

    def is_lost(value: Any, row: Mapping[str, Any]) -> bool:
        return isinstance(value, str) and len(value) > len(str(row.get(answered))) and not read.is_said(value, row)

    name = next((name for name in read.left if WORKED.fullmatch(name) and read.mostly(name, is_lost)), None)
    if name is None:
        return None
    what = f"column {name} holds how {answered} is found, and {answered} alone would be trained on"
    return what, [Choice(columns={role: name}, why=f"leaves out {answered}")], f"join both {_BY_MAP}"


def _question(read: _Read) -> _Found | None:
    """Describe questions that are left out, next to complete texts to compare or to labels of images."""
    if read.kind == "image-label":
        name = next((name for name, value, _ in read.values(QUESTIONS) if isinstance(value, str)), None)
        columns = {"prompt": str(name), "response": read.found.get("label", "label")}
    elif read.kind == "preference" and not {"prompt", "messages", "input"} & read.found.keys():
        name = next((name for name, value, _ in read.values(read.left) if _ends_with_user(value)), None)
        columns = {"messages": str(name)}
        if name is None and any(isinstance(row.get(read.found.get("chosen", "")), str) for row in read.rows):
            begin = [{str(row.get(read.found[role]))[:1] for role in ("chosen", "rejected")} for row in read.rows]
            texts = [each for each in read.left if not OF_JUDGES.search(each) and read.mostly(each, _is_phrase)]
            longest = sorted(texts, key=lambda each: -sum(len(text) for _, text, _ in read.values([each])))
            asks = longest if any(len(each) > 1 for each in begin) else []  # else the answers hold their question
            name = next((each for each in (*QUESTIONS, *asks) if each in read.left), None)
            columns = {"prompt": str(name)}
    else:
        return None
    if name is None:
        return None
    return f"column {name} holds what is asked, and nothing reads it", [Choice(columns=columns)], ""


def _answer(read: _Read) -> _Found | None:
    """Describe answers left out, next to messages or a dialog ending with the user."""
    if read.kind not in ("messages", "sharegpt", "dialog"):
        return None
    asked = read.found["dialog" if read.kind == "dialog" else "messages"]
    filled = read.values(name for name in read.left if name.lower().startswith(ANSWERS))
    answers = (name for name, value, row in filled if isinstance(value, str) and _ends_with_user(row.get(asked)))
    names = list(dict.fromkeys(answers))
    if not names:
        return None
    choices = [] if read.kind == "dialog" else [Choice(columns={"prompt": asked, "response": each}) for each in names]
    what = f"column {names[0]} holds what answers {asked}, which ends with the user's text, and nothing reads it"
    return what, choices, f"write it behind {asked}, {_BY_MAP}"


def _answer_of_text(read: _Read) -> _Found | None:
    """Describe unread texts with a name of answers, unless the read text contains the answers."""
    if read.kind != "text":
        return None

    def is_lost(name: str, value: Any, row: Mapping[str, Any]) -> bool:
        if type(value) in (int, float) or (isinstance(value, str) and _NUMBER.fullmatch(value)):
            return CLASSES.fullmatch(name) is not None and len(read.rows) > 3
        return isinstance(value, (str, list, dict)) and not read.is_said(value, row)

    asked = read.found["text"]
    answers = filter(OF_ANSWERS.search, read.left)
    names = [name for name in answers if read.mostly(name, partial(is_lost, name))]
    if not names:
        return None
    what = f"column {names[0]} may answer {asked}, and {asked} alone would be trained on"
    prompts = [*(name for name in QUESTIONS if name in read.left), asked]
    texts = dict.fromkeys(name for name, value, _ in read.values(names) if isinstance(value, (str, int, float)))
    kinds = {name: "prompt-response" if "label" in read.left and name != "label" else None for name in texts}
    choices = [Choice(kind=kinds[name], columns={"prompt": prompts[0], "response": name}) for name in texts]
    return what, choices, "" if choices else f"join both {_BY_MAP}"


def _speaker(read: _Read) -> _Found | None:
    speakers = [value for _, value, _ in read.values(["role"]) if isinstance(value, str)]
    if read.kind != "text" or not any(usual_role(speaker) in _SPEAKERS for speaker in speakers):
        return None
    what = "column role says who speaks, so that each row is a message and no document"
    return what, (), "join the messages of a conversation to one row first"


def check_each_row(row: Mapping[str, Any], kind: str, read: Collection[str]) -> None:
    """Raise DataError for a row whose meaning would change without a column, regardless of other rows.

    read: columns that are read or kept.
    """
    if (said := each_row_loses(row, kind, read)) is not None:
        raise DataError(f"{said}, or pass --kind {kind} to leave the column out")


def each_row_loses(row: Mapping[str, Any], kind: str, read: Collection[str]) -> str | None:
    """Return the error for a row whose meaning would change without a column; None for other rows."""
    held = {name: row[name] for name in row if name in OF_EACH_ROW and name not in read}
    if kind == "tokens":
        for name, is_of_several in _BOUNDS.items():
            if (numbers := _numbers(held.get(name))).size and is_of_several(numbers):
                return (
                    f"column {name} says that a row of tokens holds several samples, which would be read as a single "
                    f"sample: make a row of each sample, {_BY_MAP}"
                )
        return None
    settings = held.get("chat_template_kwargs")  # in TRL's form; true and null are the default
    values = settings.values() if isinstance(settings, Mapping) else ()
    if not any(is_filled(value) and value is not True for value in values):
        return None
    return (
        "column chat_template_kwargs holds settings of the chat template for each row (tools, a system prompt, …), and "
        f"nothing reads it: write them into the messages and the column tools, {_BY_MAP}"
    )


def _numbers(value: Any) -> NDArray[Any]:
    """Return the numbers of a list, an array or JSON text of a list; none for anything else."""
    listed = unpacked(value)
    if isinstance(listed, list | np.ndarray):
        with suppress(ValueError, OverflowError):  # lists of several lengths
            numbers = np.asarray(listed)
            if numbers.ndim == 1 and numbers.dtype.kind in "iuf":
                return numbers
    return np.zeros(0)


# Columns of packs in TRL, torchtune, NeMo, FlashAttention and others -> whether the row holds several samples.
_BOUNDS: Mapping[str, Callable[[NDArray[Any]], bool]] = {
    **dict.fromkeys(("seq_lengths", "seq_lens", "sequence_lengths", "seq_start_id"), lambda numbers: len(numbers) > 1),
    "cu_seqlens": lambda numbers: len(numbers) > 2,
    **dict.fromkeys(
        ("segment_ids", "seq_idx", "sequence_ids", "document_ids", "doc_ids"), lambda ids: bool((ids != ids[0]).any())
    ),
    **dict.fromkeys(("position_ids", "input_pos"), lambda at: bool((at[1:] <= at[:-1]).any())),
}


OF_EACH_ROW = frozenset({*_BOUNDS, "chat_template_kwargs"})  # columns that check_each_row tests


def _ends_with_user(value: Any) -> bool:
    """Return whether messages end with the user's, or texts by turns have an odd number."""
    messages = unpacked(value)
    last = messages[-1] if isinstance(messages, list) and messages else None
    if isinstance(last, str):
        return len(messages) % 2 == 1
    speaker = (last.get("role") or last.get("from")) if isinstance(last, Mapping) else None
    return isinstance(speaker, str) and usual_role(speaker) == "user"


def _is_phrase(value: Any, row: Mapping[str, Any]) -> bool:
    return isinstance(value, str) and (" " in value or len(value) > 20)


def _words(text: str) -> str:
    return " ".join(text.split())


def _longest(value: Any) -> str:
    """Return the longest text in a value; "" without text."""
    if isinstance(value, str):
        return value
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return max(map(_longest, inner), key=len, default="")


# Columns that hold media by their values, whatever they are called: bytes, data URLs and paths of media.

_OF_WEB = re.compile(rf"({'|'.join(MEDIA_ROLES)})s?_urls?", re.IGNORECASE)  # names of columns of addresses of media
_NO_MEDIA = ("id", "__key__")  # columns of row names, which often look like paths


def media_columns(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, str]:
    """Return column -> kind of media, for columns with only media of a single kind in the rows."""
    found: dict[str, str] = {}
    for name in names:
        of_name = _OF_WEB.fullmatch(name)
        kinds = {
            of_name[1].lower() if of_name and _are_on_web(row[name]) else _media_kind(row[name])
            for row in rows
            if name in row and is_filled(row[name])
        }
        if len(kinds) == 1 and name not in _NO_MEDIA and (kind := kinds.pop()):
            found[name] = kind
    return found


def _media(read: _Read) -> _Found | None:
    """Describe columns of media next to rows that are read without media."""
    roles = {role: names for role, names in read.roles.items() if role in MEDIA_COLUMNS}
    names = {"file_name", *(name for names in roles.values() for name in names)}
    if names & {*read.found.values()} or read.columns.keys() & roles:
        return None
    found = {
        name: media
        for name, media in media_columns(read.rows, read.left).items()
        if read.columns.get(MEDIA_ROLES[media]) != "" and not _is_held(read, name)
    }
    if not found:
        return None
    are = f"columns {', '.join(found)} hold" if len(found) > 1 else f"column {next(iter(found))} holds"
    what = f"{are} media of kind {', '.join(dict.fromkeys(found.values()))}"
    named = Choice(columns={MEDIA_ROLES[media]: name for name, media in reversed(found.items())})
    others = Choice(keep=tuple(found), why="kept as they are"), Choice(kind=read.kind, why="leaves them out")
    return f"{what}, and the rows would be {read.kind} without them", [named, *others], ""


def _is_held(read: _Read, name: str) -> bool:
    """Return whether read columns hold the media of a column; for example members of a tar to which rows refer."""
    columns, rows = read.found.values(), [row for _, _, row in read.values([name])]
    return all(any(_holds(row.get(head_of(each, row)), row[name]) for each in columns) for row in rows)


def _holds(value: Any, medium: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds(each, medium) for each in value.values())
    return value is medium or (isinstance(value, list | tuple) and any(_holds(each, medium) for each in value))


def _are_on_web(value: Any) -> bool:
    return all(isinstance(each, str) and each.startswith(("http://", "https://")) for each in references_of(value))


def _media_kind(value: Any) -> str | None:
    if isinstance(value, (list, tuple)):
        kinds = {_media_kind(each) for each in value}
        return kinds.pop() if len(kinds) == 1 else None
    if isinstance(value, Mapping):
        inner = (value.get("bytes"), value.get("path")) if value.keys() <= {"bytes", "path"} else ()
        return next((_media_kind(each) for each in inner if is_filled(each)), None)
    if isinstance(value, bytes):
        return usual_kind(value)
    if not isinstance(value, str) or "://" in value or "\n" in value:
        return None
    if value.startswith("data:"):
        kind = value[len("data:") :].partition("/")[0]
        return kind if kind in MEDIA_ROLES else None
    return None if value.endswith(".ts") else file_kind(value)  # .ts: also TypeScript
