"""Rows -> samples: which kind of rows they are, by the first of them, and each row as that kind says.

Stored schemas: messages (`messages`: JSON text, `media`: bytes), tokens (`input_ids`, `loss_spans`), text (`text`) and
columns. The JSON of messages is the list of them, or {"messages": […], "tools": […]} where the row has tools; what the
loss leaves out has "learn": false; parts of media have {"type", "mime", "span": [offset, size]} into `media`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from ...errors import ConfigError, DataError
from ...types import Sample
from ..media.references import SampleMedia
from .chat import READERS, USUAL_ROLES, add_system, check_learnt, plain_chat, read_tools
from .columns import check_text, column_encoding, fit_value
from .content import KINDS, store_content
from .fields import USUAL_COLUMNS, Fields, unpacked
from .kinds import FORMATS, SINGLE_TURN, STORED_COLUMNS, formats_of
from .tokens import read_tokens
from .tokens import to_tokens as to_tokens

COLUMNS = STORED_COLUMNS
_VERSION = 1  # of what is stored for a row


@dataclass(frozen=True, kw_only=True, slots=True)
class SchemaOptions:
    """How rows are read; the defaults find it out.

    schema: the kind of rows that is insisted on (a key of FORMATS). columns: role -> column, where it has another
    than the usual name; "" for none. keep: columns that are kept as they are, or True for all that nothing else
    reads. system: prompt of conversations without one. roles: what the data calls a speaker -> user, assistant, …
    learn: whether the loss is on all that the assistant says or on its last message. media_root: folder or URL that
    references to media start from, and do not leave (default: the source's own folder). max_image_pixels: larger
    images are made smaller.
    """

    schema: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    keep: tuple[str, ...] | bool = ()
    system: str | None = None
    roles: Mapping[str, str] = field(default_factory=dict)
    learn: Literal["assistant", "last"] = "assistant"
    media_root: str | None = None
    max_image_pixels: int | None = None

    def __post_init__(self) -> None:
        if self.schema is not None and self.schema not in FORMATS:
            raise ConfigError(f"schema {self.schema!r} is not known: choose one of {', '.join(FORMATS)}")
        unknown = sorted(set(self.columns) - set(USUAL_COLUMNS))
        if unknown:
            raise ConfigError(f"no column has the role {', '.join(unknown)}: choose of {', '.join(USUAL_COLUMNS)}")
        if self.learn not in ("assistant", "last"):
            raise ConfigError(f"learn must be 'assistant' or 'last', got {self.learn!r}")
        if self.max_image_pixels is not None and self.max_image_pixels < 1:
            raise ConfigError(f"max_image_pixels must be at least 1, got {self.max_image_pixels}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mapper:
    """Maps rows of one kind; can be pickled.

    format: the kind of rows. found: role -> column of the first rows. kept: columns that are kept beside those, and
    their encodings. description: what was found, in a line for people.
    """

    format: str
    options: SchemaOptions
    found: Mapping[str, str]
    kept: Mapping[str, str]
    description: str

    def __call__(self, values: Mapping[str, Any], folder: str | None) -> Sample:
        """A row as a sample; relative paths of media start from folder. DataError for a row that does not fit."""
        if self._may_be_plain and values.keys().isdisjoint(_OTHER_COLUMNS):
            text = plain_chat(values.get(self.found.get("messages", "messages")), self.options.roles)
            if text is not None:
                return {"messages": text, "media": b""}
        root = self.options.media_root or folder
        media = SampleMedia(root, max_image_pixels=self.options.max_image_pixels)
        sample = self._sample(Fields(values, self.options.columns, self.found), media)
        for name, encoding in self.kept.items():
            sample[name] = fit_value(name, encoding, values.get(name), read_media=media.read)
        return sample

    @property
    def _may_be_plain(self) -> bool:
        options = self.options
        return (
            self.format == "messages"
            and not self.kept
            and self.found.keys() <= {"messages"}
            and options.system is None
            and options.learn == "assistant"
        )

    @property
    def schema(self) -> str:
        """What is stored: "messages", "tokens", "text" or "columns"."""
        return FORMATS[self.format].schema

    @property
    def columns(self) -> dict[str, str]:
        """Stored column -> MDS encoding."""
        return {**_stored_columns(self.format), **self.kept}

    @property
    def fingerprint_text(self) -> str:
        """JSON of all that changes what is stored for a row."""
        from PIL import __version__ as pillow_version

        options = {name: getattr(self.options, name) for name in ("system", "learn", "media_root", "max_image_pixels")}
        described = {
            **options,
            "version": _VERSION,
            "format": self.format,
            "found": dict(self.found),
            "columns": dict(self.options.columns),
            "kept": dict(self.kept),
            "roles": dict(self.options.roles),
            "pillow": pillow_version if self.options.max_image_pixels else None,
        }
        return json.dumps(described, sort_keys=True)

    def _sample(self, fields: Fields, media: SampleMedia) -> dict[str, Any]:
        if self.format == "tokens":
            return read_tokens(fields)
        if self.format == "text":
            return {"text": _text(fields)}
        if self.format == "image-label":
            return _image_label(fields, media)
        return self._conversation(fields, media) if self.schema == "messages" else {}

    def _conversation(self, fields: Fields, media: SampleMedia) -> dict[str, Any]:
        turns = READERS[self.format](fields, {**USUAL_ROLES, **self.options.roles})
        turns = add_system(turns, fields, self.options.system)
        waiting = {kind: _references(fields.get(role)) for kind, role in KINDS.items() if fields.column(role)}
        stored: Any = store_content(turns, waiting, media, in_front=self.format in SINGLE_TURN)
        check_learnt(stored, last_only=self.options.learn == "last")
        tools = read_tools(fields)
        try:
            text = orjson.dumps({"messages": stored, "tools": tools} if tools else stored).decode()
        except TypeError as error:
            raise DataError(f"the messages hold what JSON cannot ({error}): correct or remove the row") from error
        return {"messages": text, "media": media.data}


# Columns that change what is stored of a conversation.
_OTHER_COLUMNS = {name for role, names in USUAL_COLUMNS.items() if role != "messages" for name in names}


def find_mapper(rows: Sequence[Mapping[str, Any]], options: SchemaOptions) -> Mapper:
    """The mapper for rows like these, the first of their source.

    DataError when none of them fits a schema, or they fit different ones; rows that fit none beside others that do
    are passed over here, and refused when they are mapped.
    """
    if not rows:
        raise DataError("there are no rows, so no schema can be found: name a source that has some")
    names = list(dict.fromkeys(str(name) for row in rows for name in row))
    missing = [f"{column} ({role})" for role, column in options.columns.items() if column and column not in names]
    if missing:
        raise DataError(f"no column {', '.join(missing)}, found {', '.join(names)}: correct --columns")
    form = _find_format(rows, names, options)
    found: dict[str, str] = {}
    read: list[str] = []
    for role in FORMATS[form].roles:
        columns = [column for row in rows if (column := Fields(row, options.columns).column(role))]
        found |= {role: columns[0]} if columns else {}
        read += columns
    kept_names = _kept_names(form, names, read, options)
    kept = {name: column_encoding(name, [row.get(name) for row in rows]) for name in kept_names}
    return Mapper(
        format=form,
        options=options,
        found=found,
        kept=kept,
        description=_describe(form, found, kept, [name for name in names if name not in {*read, *kept}]),
    )


def to_messages(row: Mapping[str, Any]) -> Sample:
    """A row with OpenAI `messages` as a messages sample."""
    return Mapper(format="messages", options=SchemaOptions(), found={}, kept={}, description="messages")(row, None)


def _find_format(rows: Sequence[Mapping[str, Any]], names: Sequence[str], options: SchemaOptions) -> str:
    if options.schema == "columns":
        return "columns"
    fitting = [formats_of(row, options.columns) for row in rows]
    if options.schema is not None:
        if not any(options.schema in formats for formats in fitting):
            raise DataError(
                f"no row fits --schema {options.schema}, which needs columns {_needs(options.schema)}; found "
                f"{', '.join(names)}: name them with --columns, or leave --schema out"
            )
        return options.schema
    best = {formats[0]: number for number, formats in reversed(list(enumerate(fitting, start=1))) if formats}
    if len(best) > 1:
        where = ", ".join(f"{form} (row {number})" for form, number in sorted(best.items(), key=lambda item: item[1]))
        raise DataError(
            f"rows of several schemas in one source: {where}: convert each kind on its own, or pass --schema"
        )
    if best:
        return next(iter(best))
    if options.keep:
        return "columns"
    known = "; ".join(f"{name}: {_needs(name)}" for name, form in FORMATS.items() if form.needs)
    raise DataError(
        f"columns {', '.join(names)} fit no schema ({known}): name one's columns with --columns ROLE=COLUMN and "
        "--schema, or keep columns as they are with --keep"
    )


def _kept_names(form: str, names: Sequence[str], read: Sequence[str], options: SchemaOptions) -> list[str]:
    if isinstance(options.keep, bool):
        kept = [name for name in names if name not in read] if options.keep or form == "columns" else []
    else:
        kept = list(options.keep) or (list(names) if form == "columns" else [])
    absent = [name for name in kept if name not in names]
    if absent:
        raise DataError(f"--keep {' '.join(absent)}: no such column, found {', '.join(names)}: correct it")
    taken = [name for name in kept if name in _stored_columns(form)]
    if taken:
        raise DataError(
            f"--keep {' '.join(taken)}: schema {form} stores a column of that name: rename it in the source"
        )
    return kept


def _stored_columns(form: str) -> dict[str, str]:
    return STORED_COLUMNS.get(form) or STORED_COLUMNS[FORMATS[form].schema]


def _needs(form: str) -> str:
    needs = " and ".join("/".join(USUAL_COLUMNS[role]) for role in FORMATS[form].needs)
    return f"question or media, and {needs}" if form == "question-answer" else needs


def _describe(form: str, read: Mapping[str, str], kept: Mapping[str, str], left: Sequence[str]) -> str:
    parts = [form]
    if read:
        parts.append("reads " + ", ".join(f"{name} as {role}" if name != role else name for role, name in read.items()))
    if kept:
        parts.append("keeps " + ", ".join(f"{name} ({encoding})" for name, encoding in kept.items()))
    if left:
        parts.append(f"leaves out {', '.join(left)}")
    return "; ".join(parts)


def _references(value: Any) -> list[Any]:
    """References in a column of media: a list of them, also as JSON text, one, or none."""
    value = unpacked(value)
    if value is None or value in ("", b""):
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _text(fields: Fields) -> str:
    text, name = fields.text("text"), fields.column("text") or "text"
    if not text:
        raise DataError(f"column {name!r} is empty, so nothing would be learnt: complete or remove the row")
    check_text(name, text)
    return text


def _image_label(fields: Fields, media: SampleMedia) -> dict[str, Any]:
    references = _references(fields.get("images"))
    if len(references) != 1:
        raise DataError(
            f"{len(references)} images in column {fields.column('images')!r}, expected one: correct the row"
        )
    media.add("image", references[0])
    label = fields.text("label")
    check_text("label", label)
    return {"image": media.data, "label": label}
