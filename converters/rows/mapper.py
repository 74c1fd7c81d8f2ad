"""The first rows of a source -> a mapper of all rows to samples, by the kind of the rows."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from ...errors import DataError
from ...extras import need
from ...processors.base import or_error
from ...types import Sample
from .chat_kinds import EXTRA_COLUMNS, check_texts
from .column_names import ANSWERS
from .fields import Fields, head_of, is_filled, value_at
from .kept_columns import column_encoding, fit_value, named_encoding
from .kinds import COLUMNS, KINDS, column_roles, usual_names
from .nearest import PROMPTS, chosen, decided, no_kind, only_asks, proved, sure_choice
from .options import SchemaOptions, check_heard
from .preference_kinds import VERDICT_COLUMNS, check_pairs, check_verdict, check_verdicts
from .references import NoMedia, SampleMedia
from .row_kind import ReadOptions, ReadSimple, RowKind, UndecidedError
from .schemas import MESSAGES, TEXT, Schema
from .side_columns import OF_EACH_ROW, check_each_row, check_side_columns
from .speakers import untagged
from .vendors import MARKS, usual_row

ROWS_VERSION = 12  # raised when rows are stored differently
COUNTS_VERSION = 11  # raised when rows give other numbers of samples, by which states name their place


@dataclass(frozen=True, kw_only=True, slots=True)
class Mapper:
    """Maps rows of one kind to samples; can be pickled.

    found: role -> column of the first rows. synonyms: role -> columns, if the first rows have several; each row is read
    from one of the columns. kept: columns kept in addition, with their encodings. names: columns with a value in the
    first rows. description: kind and columns in a line, for people.
    """

    kind: RowKind
    options: SchemaOptions
    found: Mapping[str, str]
    kept: Mapping[str, str]
    names: frozenset[str]
    description: str
    synonyms: Mapping[str, Sequence[str]] = field(default_factory=dict)
    left: Sequence[str] = ()
    read_simple: ReadSimple | None = field(init=False, compare=False)

    def __post_init__(self) -> None:
        """Set read_simple: faster reader of rows with only columns of the first rows; None for a row to be mapped."""
        options, read = self.options, self.kind.simple(self.found, self.options)
        if self.kept or self.synonyms or options.tags or options.dataset_info is not None or read is None:
            simple = None
        else:
            others = self.names & _OF_RULES if self.kind.columns else frozenset[str]()
            simple = partial(_read_usual, names=self.names, others=others, read=read)
        object.__setattr__(self, "read_simple", simple)

    def read_without_media(self, values: Mapping[str, Any]) -> Sample:
        """Return the sample of a row without opening media."""
        row = _usually_named(values, self.options)
        fields = Fields(row, self.kind.columns, self.options.columns, self.found)
        kept = {
            name: fit_value(name, each, row[name], read_media=lambda _: b"")
            for name, each in self.kept.items()
            if name in row
        }
        return {**self.kind.read(fields, self.options, NoMedia(None)), **kept}

    def __call__(self, values: Mapping[str, Any], folder: str | None, unread: set[str] | None = None) -> Sample:
        """Return the sample of a row; relative paths of media start from options.media_root or else from folder.

        unread: receives notes on content that nothing reads, for example keys of messages, unknown speakers and media
        slots. DataError for a row that does not fit.
        """
        if self.read_simple is not None and (sample := self.read_simple(values)) is not None:
            return sample
        late = [] if values.keys() <= self.names else late_columns(values, self.names)
        if self.options.tags or not values.keys().isdisjoint(MARKS) or self.options.dataset_info is not None:
            values = _usually_named(values, self.options)
        if self.options.kind is None and self.options.dataset_info is None:
            if not values.keys().isdisjoint(OF_EACH_ROW):
                check_each_row(values, self.kind.name, self.kept)
            if late:
                check_kind(values, late, self.kind, self.options.columns)
        if not values.keys().isdisjoint(VERDICT_COLUMNS) and self.schema == MESSAGES.name:
            check_verdict(values)
        root = self.options.media_root or folder
        options = self.options
        media = SampleMedia(root, max_image_pixels=options.max_image_pixels, check=options.check_media)
        noted = set() if unread is None else unread
        fields = Fields(values, self.kind.columns, self.options.columns, self.found, noted)
        sample = dict(self.kind.read(fields, self.options, media))
        noted |= media.unread
        keep = () if isinstance(self.options.keep, bool) else self.options.keep
        for name, encoding in self.kept.items():
            value = values.get(name)
            if value is None and encoding == "bytes" and (name not in self.names or f"{name}:bytes" in keep):
                value = b""  # the column starts in later rows, or was named COLUMN:bytes
            sample[name] = fit_value(name, encoding, value, read_media=media.read)
        return sample

    def samples(self, values: Mapping[str, Any], folder: str | None, unread: set[str] | None = None) -> list[Sample]:
        """Return the samples of a row: one, or one for each answer of a chat if `learn` is "each"."""
        sample = self(values, folder, unread)
        return list(each_answer(sample)) if self.options.learn == "each" and self.schema == MESSAGES.name else [sample]

    def unread(self, values: Mapping[str, Any]) -> list[str]:
        """Return the filled columns of this row that nothing reads.

        Columns with values in the first rows count only if some of these rows are read from them: the description
        already lists the other columns that are left out.
        """
        late = late_columns(values, self.names)
        late += [name for names in self.synonyms.values() for name in names if is_filled(values.get(name))]
        if not late:
            return []
        info = self.options.dataset_info
        fields = Fields(values, self.kind.columns, self.options.columns, self.found)
        read = {fields.column(role) for role in self.kind.columns} if info is None else {*info.columns.values()}
        heads = {head_of(name, values) for name in read if name}
        return [name for name in late if name not in read and name not in heads and name not in self.kept]

    def any_holds_media(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether one of these rows refers to media."""
        media = NoMedia(None)
        for row in _usual_rows(rows, self.options):
            with suppress(DataError):  # raised again when the row is read
                self.kind.read(Fields(row, self.kind.columns, self.options.columns, self.found), self.options, media)
            if media.num_added:
                return True
        return False

    @property
    def schema(self) -> str:
        """Name of the stored schema: "messages", "tokens", "text", "columns", …"""
        return self.kind.schema.name

    @property
    def columns(self) -> dict[str, str]:
        """Stored column -> MDS encoding."""
        return {**self.kind.schema.columns, **self.kept}

    @property
    def fingerprint_text(self) -> str:
        """JSON of all that changes the stored sample of a row: settings, kind, found columns and versions."""
        need("PIL", by="images")
        from PIL import __version__ as pillow_version

        options = self.options
        said: dict[str, Any] = {
            **{name: getattr(options, name) for name in ("system", "learn", "media_root", "max_image_pixels")},
            "version": ROWS_VERSION,
            "format": self.kind.name,
            "found": dict(self.found),
            "columns": dict(options.columns),
            "kept": dict(self.kept),
            "roles": dict(options.roles),
            "pillow": pillow_version if options.max_image_pixels else None,
            **({"tags": dict(options.tags)} if options.tags else {}),
            **({"dataset_info": asdict(options.dataset_info)} if options.dataset_info else {}),
        }
        return json.dumps(said, sort_keys=True)


_OF_RULES = {*MARKS, *OF_EACH_ROW, *VERDICT_COLUMNS, *EXTRA_COLUMNS}  # columns that change the reading of a row


def _read_usual(
    values: Mapping[str, Any], *, names: frozenset[str], others: frozenset[str], read: ReadSimple
) -> Sample | None:
    columns = values.keys()
    return read(values) if columns <= names and columns.isdisjoint(others) else None


def find_mapper(rows: Sequence[Mapping[str, Any]], options: SchemaOptions) -> Mapper:
    """Return the mapper for the rows of a source, from its first rows.

    DataError if no row is of a known kind, or if rows are of different kinds. Rows of no kind among other rows are
    passed over here, and rejected when mapped.
    """
    if not rows:
        raise DataError("there are no rows, so the kind of rows is unknown: name a source with rows")
    names, info = list(dict.fromkeys(str(name) for row in rows for name in row)), options.dataset_info
    if info is not None:
        info.check_columns(names)
    found = _usual_rows(rows, options)
    if not found:
        _usually_named(rows[0], options)  # raises
    try:
        mapper = _find(found, options)
    except UndecidedError as error:
        raise decided(error, rows, options, lambda rows, tried: _find(_usual_rows(rows, tried), tried)) from None
    if info is not None:
        return replace(mapper, names=filled_names(rows), description=info.describe(names, kept=list(mapper.kept)))
    forms = [] if found == list(rows) or options.tags else [or_error(usual_row, row) for row in rows]
    rules = dict.fromkeys(each[1] for each in forms if not isinstance(each, DataError))
    description = "; ".join(filter(None, (mapper.description, *rules)))
    return replace(mapper, names=filled_names(rows), description=description)


def _usual_rows(rows: Sequence[Mapping[str, Any]], options: SchemaOptions) -> list[Mapping[str, Any]]:
    """Return the rows with the usual names of columns and keys, without rows that do not fit."""
    named = [or_error(_usually_named, row, options) for row in rows]
    return [row for row in named if not isinstance(row, DataError)]


def _usually_named(values: Mapping[str, Any], options: SchemaOptions) -> Mapping[str, Any]:
    """Return a row with the usual names of columns and keys."""
    info = options.dataset_info
    if info is None and options.tags:
        return untagged(values, options.tags)
    if info is None:
        return values if options.kind or options.columns or options.keep else usual_row(values)[0]
    row = info.align(values)
    others = values.keys() - row.keys() - set(info.columns.values()) if options.keep else ()
    return {**row, **{name: values[name] for name in values if name in others}}


def _find(rows: Sequence[Mapping[str, Any]], options: SchemaOptions) -> Mapper:
    names = list(dict.fromkeys(str(name) for row in rows for name in row))
    missing = [
        f"{column} ({role})"
        for role, column in options.columns.items()
        if column and column not in names and all(value_at(row, column) is None for row in rows)
    ]
    if missing:
        raise DataError(f"no column {', '.join(missing)}, found {', '.join(names)}: correct --columns")
    kind = _find_kind(rows, names, options)
    if kind is None:
        choice = None if options.columns or options.tags else sure_choice(rows, names)
        if choice is not None and proved(choice, rows, options, _find) is not None:
            return _find(rows, chosen(choice, options))
        raise no_kind(rows, names)
    if kind.schema in (MESSAGES, TEXT):
        check_pairs(names, options.columns)
    if kind.schema == MESSAGES and options.kind is None:
        check_verdicts(rows, kind.name)
    check_heard(options, kind)
    columns_of = {
        role: [column for row in rows if (column := Fields(row, kind.columns, options.columns).column(role))]
        for role in kind.columns
    }
    found = {role: columns[0] for role, columns in columns_of.items() if columns}
    synonyms = {role: several for role in found if len(several := list(dict.fromkeys(columns_of[role]))) > 1}
    read = [column for columns in columns_of.values() for column in columns]
    kept_names = _kept_names(kind, names, read, options)
    kept = {
        name: encoding or column_encoding(name, [row.get(name) for row in rows])
        for name, encoding in kept_names.items()
    }
    check_texts(rows, found)
    left = _left(rows, names, read, kept)
    if options.kind is None and options.dataset_info is None:
        asked, answers = found.get("messages"), [name for name in left if name.lower().startswith(ANSWERS)]
        if kind.name in ("messages", "sharegpt") and asked and not answers and only_asks(rows, asked):
            raise UndecidedError(f"column {asked} {PROMPTS}", (), "complete the rows, by --map FILE.py:FUNCTION")
        check_side_columns(rows, kind, found=found, left=left, columns=options.columns)
    reads = [f"{name} as {role}" if name != role else name for role, name in found.items()]
    absent = {name: ", in none of the first rows" for name in kept if name not in names}
    keeps = [f"{name} ({kept[name]}{absent.get(name, '')})" for name in kept]
    verbs = {"reads": reads, "keeps": keeps, "leaves out": left}
    return Mapper(
        kind=kind,
        options=options,
        found=found,
        kept=kept,
        names=filled_names(rows),
        description="; ".join([kind.name, *(f"{verb} {', '.join(each)}" for verb, each in verbs.items() if each)]),
        synonyms=synonyms,
        left=left,
    )


def _left(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], read: Sequence[str], kept: Collection[str]
) -> list[str]:
    """Return the columns left out, and members of objects of which other members are read, with dots."""
    heads = dict.fromkeys(head_of(column, names) for column in read)
    inner = [f"{head}.{name}" for head in heads if head not in {*read, *kept} for name in _members(rows, head)]
    left = [name for name in names if name not in {*read, *kept, *heads}]
    return left + [name for name in inner if not any(f"{each}.".startswith(f"{name}.") for each in read)]


def _members(rows: Sequence[Mapping[str, Any]], column: str) -> dict[str, None]:
    return dict.fromkeys(name for row in rows if isinstance(row.get(column), Mapping) for name in row[column])


def _find_kind(rows: Sequence[Mapping[str, Any]], names: Sequence[str], options: SchemaOptions) -> RowKind | None:
    if options.kind is not None:
        insisted = KINDS[options.kind]
        if insisted.needs and not any(insisted.fits(row, options.columns) for row in rows):
            raise DataError(
                f"no row fits --kind {insisted.name}, which needs columns {insisted.needed}; found {', '.join(names)}: "
                "name them with --columns, or leave --kind out"
            )
        return insisted
    first_rows, empty_rows = dict[str, int](), dict[str, int]()  # kind -> number of its first row
    for number, row in enumerate(rows, start=1):
        kind = next((kind for kind in KINDS.values() if kind.fits(row, options.columns)), None)
        if kind is not None:
            fields = Fields(row, kind.columns, options.columns)
            is_empty = not any(is_filled(fields.get(role)) for role in kind.needs)
            (empty_rows if is_empty else first_rows).setdefault(kind.name, number)
    first_rows = first_rows or empty_rows
    if len(first_rows) > 1:
        where = ", ".join(f"{name} (row {number})" for name, number in first_rows.items())
        raise DataError(f"rows of several kinds in one source: {where}: convert each kind on its own, or pass --kind")
    if first_rows:
        return KINDS[next(iter(first_rows))]
    return COLUMNS if options.keep else None


def _kept_names(
    kind: RowKind, names: Sequence[str], read: Sequence[str], options: SchemaOptions
) -> dict[str, str | None]:
    """Return the columns to keep -> the user's encoding (COLUMN:json, COLUMN:ndarray:int32), or None."""
    keeps_all = not kind.columns  # a kind without read columns keeps all columns by default
    if options.keep is True or (keeps_all and not options.keep):
        kept: dict[str, str | None] = {name: None for name in names if name not in read}
    else:
        kept = dict(named_encoding(text, names) for text in options.keep or ())
    absent = [name for name, encoding in kept.items() if name not in names and encoding not in ("json", "bytes")]
    if absent:
        raise DataError(
            f"--keep {' '.join(absent)}: no such column in the first rows, found {', '.join(names)}: correct it, or "
            f"pass --keep {absent[0]}:json for a column of later rows ({absent[0]}:bytes for bytes)"
        )
    taken = [name for name in kept if name in kind.schema.columns]
    if taken:
        raise DataError(
            f"--keep {' '.join(taken)}: rows of kind {kind.name} already store a column of this name: rename the "
            "column in the source"
        )
    return kept


# Columns without values in the first rows, which decide the reading, and with values in a later row. Pure.
#
# Most rows have no late column: comparing the names is the only cost.


def filled_names(rows: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """Return the names of the columns with a value in any of these rows."""
    return frozenset(name for row in rows for name in row if is_filled(row[name]))


def late_columns(values: Mapping[str, Any], names: frozenset[str]) -> list[str]:
    """Return the names of the columns with a value in this row, except `names`, the columns of the first rows."""
    return [name for name in values if name not in names and is_filled(values[name])]


def check_kind(values: Mapping[str, Any], late: Sequence[str], kind: RowKind, columns: Mapping[str, str]) -> None:
    """Raise DataError if late columns change the kind of a row. columns: role -> the user's column."""
    known = usual_names() - {*VERDICT_COLUMNS}  # whether an answer is good is asked of every row (preference_kinds.py)
    usual = [name for name in late if name in known or name in columns.values()]
    if not usual or (kind.needs and not kind.fits(values, columns)):
        return  # rejected later, when read
    found = next((each for each in KINDS.values() if each.fits(values, columns)), kind)
    if found.name == kind.name:
        return
    are = "columns" if len(usual) > 1 else "column"
    raise DataError(
        f"{are} {', '.join(usual)}: the first rows have no such column, so their kind is {kind.name}, but this row's "
        f"kind is {found.name}: convert the rows of each kind separately, or pass --kind {kind.name} to leave the "
        "column out of all rows (counted)"
    )


# A stored chat -> a chat for each of its answers, ending with the answer. Pure.
#
# Some chat templates change earlier messages if others follow: training must see each answer in last place, in its own
# sample.


def each_answer(sample: Sample) -> Iterator[Sample]:
    """Yield a sample of the messages schema for each answer: only the answer is trained on, after its context.

    Answers outside of the loss and empty answers give no sample. Other columns are equal in all samples.
    """
    stored = json.loads(sample["messages"])
    messages = stored["messages"] if isinstance(stored, dict) else stored
    for index, message in enumerate(messages):
        is_answer = message["role"] == "assistant" and (message.get("content") or message.get("tool_calls"))
        if not is_answer or not message.get("learn", True):
            continue
        earlier = [{**each, "learn": False} if each["role"] == "assistant" else each for each in messages[:index]]
        chat = [*earlier, message]
        made = {**stored, "messages": chat} if isinstance(stored, dict) else chat
        text = json.dumps(made, ensure_ascii=False, separators=(",", ":"))
        contents = [content for each in chat if isinstance(content := each.get("content"), list)]
        num_bytes = max((sum(part["span"]) for content in contents for part in content if "span" in part), default=0)
        yield {**sample, "messages": text, "media": sample["media"][:num_bytes]}


# Samples of a stored dataset, stored again unchanged.


STORED = "stored samples"
_ROLES = {  # stored schema -> roles of the columns of its rows (see sources/mds.py)
    "messages": ("messages", "tools"),
    "preference": ("prompt", "chosen", "rejected", "response", "label", "tools"),
    "image": ("images", "label"),
    "text": ("text",),
    "tokens": ("input_ids", "loss_spans"),
}


def stored_mapper(schema: str, columns: Mapping[str, str]) -> Mapper:
    """Return the mapper of a dataset's samples. schema: name in its description. columns: name -> MDS encoding."""
    kind = RowKind(name=STORED, schema=Schema(schema, dict(columns)), read=_never, simple=_unchanged)
    shown = ", ".join(f"{name} ({encoding})" for name, encoding in columns.items())
    return Mapper(
        kind=kind,
        options=SchemaOptions(),
        found={},
        kept={},
        names=frozenset(columns),
        description=f"{STORED} of schema {schema}: {shown}",
    )


def is_stored(mapper: Mapper) -> bool:
    """Return whether a mapper is a stored_mapper: samples may be moved without decoding."""
    return mapper.kind.name == STORED


def _unchanged(found: Mapping[str, str], options: ReadOptions) -> ReadSimple:
    return _as_it_is


def _as_it_is(values: Mapping[str, Any]) -> Sample:
    return values


def _never(fields: Fields, options: ReadOptions, media: SampleMedia) -> Sample:
    raise DataError("a stored sample is not mapped again")


def stored_options(options: SchemaOptions, schema: str | None) -> SchemaOptions:
    """Return options for the rows of a stored dataset, which are read from the sources of its samples.

    Kept columns of other roles (system, label) are not read, unless the user names them.
    """
    if schema not in _ROLES:
        return options
    kept = {role: "" for role in column_roles() if role not in _ROLES[schema]}
    return replace(options, columns={**kept, **options.columns})
