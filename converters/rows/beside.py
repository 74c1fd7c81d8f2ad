"""Columns next to those that a kind reads, without which the rows would mean something else. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...errors import DataError
from .fields import is_filled, unpacked
from .speakers import usual_role

CHOICES = ("choices", "options", "endings")
_CONTEXT = ("definition", "context", "passage")  # texts that a question is about; a definition comes before it
_ASKED = {"question-answer": ("question", "answer"), "prompt-response": ("prompt", "response")}
_QUESTIONS = ("question", "query", "prompt", "problem", "instruction", "inputs")
_ANSWERS = ("response", "completion", "answer", "output", "target")
_SPEAKERS = ("user", "assistant", "prompter")


def choices_in(rows: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the column of choices that holds something in any of the rows; those that are called A, B, C together."""
    for row in rows:
        if name := next((name for name in CHOICES if is_filled(row.get(name))), None):
            return name
        if all(is_filled(row.get(name)) for name in "ABC"):
            return "A, B, C, …"
    return None


def choices_unread(name: str) -> str:
    """Return the part of an error that says what is wrong and what to do."""
    return (
        f"column {name} holds what the answer is chosen from, and no kind reads it: write the choices into the "
        "question and the chosen one into the answer, with --map FILE.py:FUNCTION"
    )


def check_beside(
    rows: Sequence[Mapping[str, Any]], kind: str, *, found: Mapping[str, str], left: Sequence[str]
) -> None:
    """DataError if columns that are left out belong to those that are read.

    Choices and a text to a question, an answer to messages that end with the user's, a speaker to a text. found: role
    -> column.
    """
    wrong = _context_unread(rows, kind, found, left) or _question_unread(rows, kind, found, left)
    if kind == "question-answer":
        unread = [{name: row[name] for name in left if not _is_said(row.get(name), row, found)} for row in rows]
        if name := choices_in(unread):
            wrong = choices_unread(name)
    if kind in ("messages", "sharegpt"):
        answers = [name for name in left if name.lower().startswith(_ANSWERS)]
        names = [name for name in answers if any(_answers(row, found, name) for row in rows)]
        if names:
            one = names[0] if len(names) == 1 else "COLUMN"
            wrong = (
                f"column {names[0]} holds what answers the messages, which end with the user's, and nothing reads it: "
                f"pass --columns prompt={found['messages']} response={one}"
            )
    if kind == "text" and "role" in left and any(_speaks(row.get("role")) for row in rows):
        wrong = (
            "column role says who speaks, so that each row is a message and no document: join the messages of a "
            "conversation to one row first"
        )
    if wrong is not None:
        raise DataError(f"{wrong}, or pass --kind {kind} to leave the column out")


def _context_unread(
    rows: Sequence[Mapping[str, Any]], kind: str, found: Mapping[str, str], left: Sequence[str]
) -> str | None:
    asked, answered = (found.get(role) for role in _ASKED.get(kind, ("", "")))
    texts = [(each, row) for each in _CONTEXT if each in left for row in rows if _is_text(row.get(each))]
    name = next((each for each, row in texts if not _is_said(row[each], row, found)), None)
    if name is None or asked is None or answered is None or not any(_is_text(row.get(asked)) for row in rows):
        return None
    instruction, given = (name, asked) if name == "definition" else (asked, name)
    return (
        f"column {name} holds what {asked} is about, and nothing reads it: pass --kind alpaca --columns "
        f"instruction={instruction} input={given} output={answered}"
    )


def _question_unread(
    rows: Sequence[Mapping[str, Any]], kind: str, found: Mapping[str, str], left: Sequence[str]
) -> str | None:
    """Of whole texts that are compared, and of labels of images."""
    if kind == "image-label":
        name = next(
            (each for each in _QUESTIONS if each in left and any(_is_text(row.get(each)) for row in rows)), None
        )
        remedy = f"--columns prompt={name} response={found.get('label')}"
    elif kind == "preference" and not {"prompt", "messages", "input"} & found.keys():
        name = next((each for each in left if any(_ends_with_user(row.get(each)) for row in rows)), None)
        remedy = f"--columns messages={name}"
        if name is None and any(_is_text(row.get(found.get("chosen", ""))) for row in rows):
            name = next((each for each in _QUESTIONS if each in left), None)
            remedy = f"--columns prompt={name}"
    else:
        return None
    return None if name is None else f"column {name} holds what is asked, and nothing reads it: pass {remedy}"


def _ends_with_user(value: Any) -> bool:
    messages = unpacked(value)
    last = messages[-1] if isinstance(messages, list) and messages else None
    speaker = (last.get("role") or last.get("from")) if isinstance(last, Mapping) else None
    return isinstance(speaker, str) and usual_role(speaker) == "user"


def _is_said(value: Any, row: Mapping[str, Any], found: Mapping[str, str]) -> bool:
    """Whether a text, or all texts of a list, are in the question of a row; also of nothing."""
    asked = next((row.get(found[role]) for role in ("question", "prompt") if role in found), None)
    texts = value if isinstance(value, list) else [value]
    return not is_filled(value) or (
        isinstance(asked, str) and all(isinstance(each, str) and each in asked for each in texts)
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _answers(row: Mapping[str, Any], found: Mapping[str, str], name: str) -> bool:
    return _is_text(row.get(name)) and _ends_with_user(row.get(found.get("messages", "messages")))


def _speaks(value: Any) -> bool:
    return isinstance(value, str) and usual_role(value) in _SPEAKERS
