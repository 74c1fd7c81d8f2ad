"""Options that read rows -> the options that were proved on the rows, for the error that names them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from shlex import quote
from typing import TYPE_CHECKING, Any, Protocol

from ...errors import DataError, LmmsStreamError
from ...types import Sample
from .speakers import readings_said

if TYPE_CHECKING:
    from .options import SchemaOptions

PROVED_ROWS = 100  # first rows that options must read
_SHOWN = 40  # characters of a text of the decoded sample
_MOST = 3  # options in an error


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Options that may read the rows. why: the condition or the effect, for people; "" if the options tell."""

    columns: Mapping[str, str] = field(default_factory=dict)
    kind: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    keep: tuple[str, ...] = ()
    why: str = ""

    def options(self, options: SchemaOptions) -> SchemaOptions:
        return replace(
            options,
            kind=self.kind or options.kind,
            columns={**options.columns, **self.columns},
            tags={**options.tags, **self.tags},
            keep=options.keep if isinstance(options.keep, bool) else (*options.keep, *self.keep),
        )

    def said(self, options: SchemaOptions) -> str:
        """Return the options in words of the command line, with those that the user gave for columns."""
        columns = {**options.columns, **self.columns} if self.columns else {}
        return " ".join([
            *([f"--kind {self.kind}"] if self.kind else []),
            *([f"--columns {' '.join(quote(f'{role}={name}') for role, name in columns.items())}"] if columns else []),
            *([readings_said([self.tags])] if self.tags else []),
            *([f"--keep {' '.join(map(quote, self.keep))}"] if self.keep else []),
        ])  # fmt: skip


class UndecidedError(DataError):
    """Rows whose reading the user must choose. choices: the best first. rest: a remedy that cannot be tried."""

    def __init__(self, what: str, choices: Sequence[Choice], rest: str = ""):
        super().__init__(what)
        self.choices, self.rest = choices, rest


class Reader(Protocol):
    """The part of a Mapper that a proof needs."""

    @property
    def left(self) -> Sequence[str]: ...
    def read_without_media(self, values: Mapping[str, Any]) -> Sample: ...


Find = Callable[[Sequence[Mapping[str, Any]], "SchemaOptions"], Reader]


def proved(
    choice: Choice, rows: Sequence[Mapping[str, Any]], options: SchemaOptions, find: Find
) -> tuple[Sequence[str], Sample] | None:
    """Return the columns that rows leave out with these options, and the first sample; None if half of them fail."""
    rows, samples = rows[:PROVED_ROWS], list[Sample]()
    try:
        reader = find(rows, choice.options(options))
    except LmmsStreamError:
        return None
    for row in rows:
        try:
            samples.append(reader.read_without_media(row))
        except LmmsStreamError:
            continue
    return (reader.left, samples[0]) if 2 * len(samples) > len(rows) else None


def decided(error: UndecidedError, rows: Sequence[Mapping[str, Any]], options: SchemaOptions, find: Find) -> DataError:
    """Return the error with the choices that were proved, and the first sample of the best."""
    said: list[str] = []
    shown = ""
    for choice in error.choices:
        if len(said) == _MOST or (proof := proved(choice, rows, options, find)) is None:
            continue
        left, sample = proof
        notes = [choice.why] if choice.why else [f"leaves out {', '.join(left)}"] if left else []
        said.append(f"{choice.said(options)}{f' ({notes[0]})' if notes else ''}")
        shown = shown if len(said) > 1 else shown_sample(sample)
    rest = error.rest or ("" if said else "make other rows with --map FILE.py:FUNCTION")
    remedies = [*([f"pass {', or '.join(said)}"] if said else []), *([rest] if rest else [])]
    example = f"; the first gives {shown}" if shown else ""
    return DataError(f"{error}: {', or '.join(remedies)}{example}")


def shown_sample(sample: Sample) -> str:
    """Return the texts of a sample, shortened, each behind its speaker; "" for a sample of other columns."""
    if "messages" not in sample:
        return f"text {_shown(sample['text'])}" if "text" in sample else ""
    stored = json.loads(sample["messages"])
    named = stored if isinstance(stored, Mapping) else {"": stored}
    said = []
    for name, turns in named.items():
        if isinstance(turns, list) and name != "tools":
            before = f"{name} " if name not in ("", "messages") else ""
            said += [f"{before}{turn['role']}: {_shown(_content(turn))}" for turn in turns[:4]]
        elif isinstance(turns, str):
            said.append(f"{name} {_shown(turns)}")
    return ", ".join(said)


def _content(turn: Mapping[str, Any]) -> Any:
    content = turn.get("content")
    if isinstance(content, list):
        return "".join(part["text"] if part.get("type") == "text" else f"<{part.get('type')}>" for part in content)
    return content if content else turn.get("tool_calls")


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")
