"""Rows as LLaMA-Factory's dataset_info.json describes them -> rows of a kind, which say the same. Pure.

What LLaMA-Factory passes over with a warning (speakers out of turn, a message too many) is an error of its row here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import DataError
from ..sources.dataset_info import DatasetInfo
from .content import tool_calls
from .exchanges import exchanges
from .fields import head_of, unpacked, value_at

_EXTRAS = ("tools", "images", "videos", "audios")  # which every kind of chat may have
_ASKING = ("user_tag", "observation_tag")  # whose turn is the first, the third, …
_ANSWERING = ("assistant_tag", "function_tag")


def check_columns(names: Sequence[str], info: DatasetInfo) -> None:
    """DataError where the entry names columns that the first rows do not have."""
    missing = [
        f"{info.columns[role]} ({role})" for role in info.named if head_of(info.columns[role], names) not in names
    ]
    if missing:
        raise DataError(
            f"no column {', '.join(missing)}, found {', '.join(names)}: correct columns of its entry in "
            "dataset_info.json"
        )


def described(info: DatasetInfo, names: Sequence[str], *, kept: Sequence[str]) -> str:
    """How rows with columns of these names are read, for people."""
    read = [
        f"{column} as {role}" if column != role else role for role, column in info.columns.items() if column in names
    ]
    left = [name for name in names if name not in (*info.columns.values(), *kept)]
    said = [f"{info.kind}, as LLaMA-Factory describes them ({info.formatting})", f"reads {', '.join(read)}"]
    said += [f"keeps {', '.join(kept)}"] if kept else []
    return "; ".join([*said, *([f"leaves out {', '.join(left)}"] if left else [])])


def aligned(values: Mapping[str, Any], info: DatasetInfo) -> dict[str, Any]:
    """The row as one of `info.kind`, its columns named as usual. DataError for a row that LLaMA-Factory passes over."""
    row = _Row(values, info)
    if info.kind == "text":
        return {"text": row.asked()}
    extras = {name: row.value(name) for name in _EXTRAS if row.value(name) is not None}
    prompt = row.prompt()
    if info.kind == "preference":
        return {"prompt": prompt, "chosen": [row.answer("chosen")], "rejected": [row.answer("rejected")], **extras}
    *before, last = prompt if info.formatting != "alpaca" else [*prompt, row.answer("response")]
    if info.kind == "kto":
        return {"prompt": before, "completion": [last], "label": row.label(), **extras}
    return {"messages": [*before, last], **extras}


class _Row:
    """The values of a row, by what their columns are for."""

    def __init__(self, values: Mapping[str, Any], info: DatasetInfo):
        self._values = values
        self._info = info

    def value(self, role: str) -> Any:
        column = self._info.columns.get(role)
        return None if column is None else value_at(self._values, column)

    def text(self, role: str) -> str:
        """Its text, empty for none."""
        value = self.value(role)
        if value is None or isinstance(value, str):
            return value or ""
        raise DataError(f"column {self._info.columns[role]!r} ({role}) holds {str(value)[:80]!r}: expected text")

    def asked(self) -> str:
        """The prompt, and the query behind it."""
        return self._info.query_after.join(text for text in (self.text("prompt"), self.text("query")) if text)

    def prompt(self) -> list[dict[str, Any]]:
        """All messages but the answer of an alpaca row, and the two of a preference."""
        if self._info.formatting == "alpaca":
            turns = [*exchanges(self.value("history")), {"role": "user", "content": self.asked()}]
        else:
            turns = self._conversation()
        system = self.text("system")
        if system and turns[0]["role"] != "system":
            turns.insert(0, {"role": "system", "content": system})
        return turns

    def answer(self, role: str) -> dict[str, Any]:
        value = unpacked(self.value(role)) if self._info.formatting != "alpaca" else self.value(role)
        if self._info.formatting == "alpaca":
            if not isinstance(value, str):
                raise DataError(f"no text in column {self._info.columns[role]!r} ({role}): complete or remove the row")
            return {"role": "assistant", "content": value}
        message = self._message(value)
        if self._tag(message) not in _ANSWERING:
            raise DataError(
                f"{role} is from {self._speaker(message)!r}, who gives no answers: correct the row or its tags"
            )
        return self._untagged(message)

    def label(self) -> bool:
        value = self.value("kto_tag")
        if not isinstance(value, bool):
            raise DataError(f"column {self._info.columns['kto_tag']!r} (kto_tag) is {value!r}: expected true or false")
        return value

    def _conversation(self) -> list[dict[str, Any]]:
        """Its messages, whose speakers take turns; the first may be the system prompt."""
        column, given = self._info.columns["messages"], unpacked(self.value("messages"))
        if not isinstance(given, list) or not given:
            raise DataError(
                f"expected a list of messages in column {column!r}, found {str(given)[:80]!r}: correct the row"
            )
        messages = [self._message(each) for each in given]
        self._check_turns(messages[1:] if self._tag(messages[0]) == "system_tag" else messages)
        return [self._untagged(each) for each in messages]

    def _untagged(self, message: Mapping[str, Any]) -> dict[str, Any]:
        turn = untagged_message(message, self._info.tags)
        return {"role": turn["role"], "content": turn["content"]} | turn

    def _check_turns(self, messages: Sequence[Mapping[str, Any]]) -> None:
        tags = [self._tag(message) for message in messages]
        if self._info.formatting == "openai":  # results of several calls are one turn
            tags = [tag for n, tag in enumerate(tags) if tag != "observation_tag" or tags[n - 1 : n] != [tag]]
        for number, tag in enumerate(tags):
            if tag not in (_ANSWERING if number % 2 else _ASKING):
                raise DataError(
                    f"turn {number + 1} of {len(tags)} is of {tag or 'nobody whom a tag names'}, and "
                    f"{' or '.join(_ANSWERING if number % 2 else _ASKING)} is due there: correct the row or its tags"
                )
        is_whole = bool(tags) and len(tags) % 2 == (1 if self._info.ranking else 0)
        if not is_whole:
            last = "a question, which chosen and rejected answer" if self._info.ranking else "an answer"
            raise DataError(
                f"the conversation has {len(tags)} turns and is to end with {last}: correct or remove the row"
            )

    def _message(self, value: Any) -> Mapping[str, Any]:
        key = self._info.tags["role_tag"]
        if not isinstance(value, Mapping) or key not in value:
            raise DataError(f"a message must be an object with {key!r}, found {str(value)[:80]!r}: correct the row")
        return value

    def _speaker(self, message: Mapping[str, Any]) -> Any:
        return message[self._info.tags["role_tag"]]

    def _tag(self, message: Mapping[str, Any]) -> str | None:
        return tag_of(self._speaker(message), self._info.tags)


# Messages whose keys and speakers have names of their own (LLaMA-Factory's tags) -> messages as OpenAI names them.
#
# Pure. Kinds of rows are found, and rows read, after that: a row of tagged messages is like any other.

Tags = Mapping[str, str]
SPEAKERS = {
    "user_tag": "user", "assistant_tag": "assistant", "observation_tag": "tool", "function_tag": "assistant",
    "system_tag": "system",
}  # fmt: skip


def untagged(values: Mapping[str, Any], tags: Tags) -> dict[str, Any]:
    """A row in which messages, and lists of them, whatever their column, have `role` and `content`."""
    return {name: _column(value, tags) for name, value in values.items()}


def untagged_message(message: Mapping[str, Any], tags: Tags) -> dict[str, Any]:
    """A message with `role` and `content`; what a function tag's speaker says becomes tool_calls.

    Speakers that no tag names stay as they are called.
    """
    role_key, content_key = tags.get("role_tag", "role"), tags.get("content_tag", "content")
    speaker, content = message.get(role_key), message.get(content_key)
    rest = {key: value for key, value in message.items() if key not in (role_key, content_key)}
    tag = tag_of(speaker, tags)
    role = SPEAKERS[tag] if tag else speaker
    if tag == "function_tag":
        return {**rest, "role": role, "content": None, "tool_calls": tool_calls(content, content_key)}
    return {**rest, "role": role, "content": content}


def tag_of(speaker: Any, tags: Tags) -> str | None:
    """The tag that names a speaker; None where none does."""
    return next((tag for tag in SPEAKERS if tag in tags and tags[tag] == speaker), None)


def _column(value: Any, tags: Tags) -> Any:
    role_key = tags.get("role_tag", "role")
    listed = unpacked(value)
    if isinstance(listed, dict) and role_key in listed:
        return untagged_message(listed, tags)
    if not isinstance(listed, list) or not any(isinstance(each, dict) and role_key in each for each in listed):
        return value
    for each in listed:
        if not isinstance(each, dict) or role_key not in each:
            raise DataError(f"a message must be an object with {role_key!r}, found {str(each)[:80]!r}: correct the row")
    return [untagged_message(each, tags) for each in listed]
