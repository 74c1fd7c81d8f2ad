"""All fields of transformers' and TRL's arguments: errors and warnings for an object's values.

`python -m lmms_stream.doors.huggingface.table > docs/arguments.md` writes the page.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ...checks import of_type, whole_number
from ...errors import ConfigError
from . import fields
from .fields import FieldRule

if TYPE_CHECKING:
    from transformers import TrainingArguments

logger = logging.getLogger("lmms_stream")
_ROWS = {row.name: row for row in (*fields.ROWS, *fields.SFT_ROWS)}
_OF_PREFERENCES = _ROWS | {row.name: row for row in fields.PREFERENCE_ROWS}
_FATES = {
    "honoured": "honoured",
    "moot": "cannot matter: a warning names it where it is set",
    "refused": "refused where it is set",
}


def row_of(name: str, kind: type | None = None) -> FieldRule | None:
    """Return the rule of a field. kind: class of the arguments; TRL's DPOConfig and KTOConfig have their own rules."""
    names = {each.__name__ for each in kind.__mro__} if kind is not None else set()
    return (_OF_PREFERENCES if names & {"DPOConfig", "KTOConfig"} else _ROWS).get(name)


def check_numbers(arguments: TrainingArguments) -> None:
    """Raise ConfigError for a text in a field of numbers, as max_steps="3", and for batches and lengths below 1."""
    for field in dataclasses.fields(arguments):
        value = getattr(arguments, field.name)
        row = row_of(field.name, type(arguments))
        if isinstance(value, str) and row is not None and row.fate == "honoured":
            of_type(f"args.{field.name}", value, field.type, None)
    for name in ("gradient_accumulation_steps", "max_length", "per_device_train_batch_size"):
        if (value := getattr(arguments, name, None)) is not None:
            whole_number(f"args.{name}", value, least=1)


def check(arguments: TrainingArguments, *, tells: bool = True) -> None:
    """Raise ConfigError for a refused or unknown field whose value differs from its default.

    With `tells`, log one warning of all set moot fields.
    """
    values = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(arguments)}
    check_refused(values, type(arguments), source="args.")
    passed_over = [f"{name} ({row.text})" for name, _, row in _given(values, type(arguments), "moot")]
    if passed_over and tells:
        logger.warning("arguments that are set and cannot matter here: %s", "; ".join(passed_over))


def check_refused(values: Mapping[str, Any], kind: type[TrainingArguments], *, source: str) -> None:
    """Raise ConfigError for a refused or unknown field whose value differs from the default.

    kind: class of the arguments. Call also before the construction: transformers itself may refuse a value.
    """
    for name, value, row in _given(values, kind, "refused"):
        raise ConfigError(f"{source}{name} is {_shown(value)}, which is not supported: {row.text}")


def _given(values: Mapping[str, Any], kind: type[TrainingArguments], fate: str) -> Iterator[tuple[str, Any, FieldRule]]:
    """Yield the fields with this fate whose values differ from the default."""
    for field in dataclasses.fields(kind):
        row = row_of(field.name, kind) or _unknown(field.name, kind)
        if row.fate == fate and field.name in values and row.is_given(values[field.name], field):
            yield field.name, values[field.name], row


def check_texts(arguments: Mapping[str, Any], *, source: str) -> None:
    """Raise ConfigError for arguments of transformers with a numeric default and a non-numeric text."""
    from transformers import TrainingArguments

    for each in dataclasses.fields(TrainingArguments):
        said = arguments.get(each.name)
        if type(each.default) in (int, float) and isinstance(said, str):
            try:
                float(said)
            except ValueError:
                raise ConfigError(f"{source}: {each.name} must be a number, got {said!r}: write digits") from None


def effect_of_former(name: str, value: Any, source: str) -> str | None:
    """Return the rule's text for an argument that only other versions of transformers have; "" for an unset value.

    None for other names. ConfigError for a refused value.
    """
    row = next((each for each in fields.ROWS if each.name == name), None)
    if row is None or value in ((True,) if name == "save_safetensors" else (None, False, "", 0, -1, "auto", "random")):
        return None if row is None else ""
    if row.fate == "refused":
        raise ConfigError(f"{source}: {name} is {value!r}, which is not supported: {row.text}")
    return row.text


def markdown() -> str:
    """Return the text of docs/arguments.md."""
    lines = [
        "# Arguments of transformers and TRL",
        "",
        "What `FSDP2SFTTrainer` makes of each field of `transformers.TrainingArguments` and of TRL's `SFTConfig`;",
        "`DPOTrainer` and `KTOTrainer` of `lmms_stream.trl` of TRL's `DPOConfig` and `KTOConfig`.",
        "(`python -m lmms_stream.doors.huggingface.table > docs/arguments.md` writes this page.)",
    ]
    sections = (
        ("TrainingArguments", fields.ROWS),
        ("What SFTConfig adds", fields.SFT_ROWS),
        ("What DPOConfig and KTOConfig add", fields.PREFERENCE_ROWS),
    )
    for title, rows in sections:
        lines += ["", f"## {title}", "", "| field | | what becomes of it, or why not |", "|---|---|---|"]
        lines += [f"| `{row.name}` | {_FATES[row.fate]} | {row.text.replace('|', chr(92) + '|')} |" for row in rows]
    return "\n".join(lines) + "\n"


def _unknown(name: str, given: type) -> FieldRule:
    """Return the rule of an unknown field: refused for a newer version, honoured for a subclass of the user's."""
    owner = next(each for each in reversed(given.__mro__) if name in vars(each).get("__annotations__", {}))
    if owner.__module__.partition(".")[0] in ("transformers", "trl"):
        return FieldRule(name, "refused", "this version of lmms_stream does not know it: leave it at its default")
    return FieldRule(name, "honoured", f"a field of {owner.__name__}, for its own code")


def _shown(value: Any) -> str:
    text = str(getattr(value, "value", value))
    return text if len(text) <= 80 else f"{text[:77]}..."


if __name__ == "__main__":
    sys.stdout.write(markdown())
