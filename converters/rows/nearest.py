"""Columns that fit no kind of rows -> the kind that they are nearest to, and what is to be said for them to be it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from shlex import quote
from typing import Any

from ...errors import DataError
from ..media.references import SampleMedia
from .chat import MEDIA_COLUMNS, ROLES, USUAL_ROLES
from .content import MEDIA_ROLES
from .fields import Fields, is_filled, unpacked, value_at
from .media_columns import media_columns
from .options import SchemaOptions
from .row_kind import RowKind

_ALIKE = 0.75  # of SequenceMatcher: one letter of five missing, doubled or swapped
_MOST_SPEAKERS = 4
_PAIRS = (  # usual names of a question and its answer that are too general to tell a kind by
    ("problem", "solution"), ("question", "response"), ("query", "answer"), ("user", "assistant"),
    ("human", "assistant"), ("input", "output"), ("input", "target"), ("source", "target"), ("prompt", "output"),
    ("prompt", "answer"), ("instruction", "completion"), ("instruction", "answer"),
)  # fmt: skip
_AS_USUAL = SchemaOptions()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Remedy:
    """kind: of the rows, if it is applied. columns: role -> column, "COLUMN" if only users know. tags: see --tags."""

    kind: RowKind
    columns: Mapping[str, str]
    tags: Mapping[str, str] = field(default_factory=dict)

    def said(self, names: Sequence[str]) -> str:
        """The options, and what of the rows is not read with them."""
        words = [f"--columns {' '.join(quote(f'{role}={name}') for role, name in self.columns.items())}"]
        words += [f"--tags {' '.join(quote(f'{tag}={name}') for tag, name in self.tags.items())}"] if self.tags else []
        usual = {name for role, each in self.kind.columns.items() if role not in self.columns for name in each}
        heads = {name.partition(".")[0]: name for name in self.columns.values()}
        left = [name for name in names if name not in usual and name not in heads and name != "__key__"]
        left += [f"the rest of {head}" for head, name in heads.items() if head != name]
        leaves = f" (which leaves out {', '.join(left)})" if left and "COLUMN" not in self.columns.values() else ""
        return f"pass {' '.join(words)} for what has another name{leaves}"


def no_kind(rows: Sequence[Mapping[str, Any]], names: Sequence[str], kinds: Iterable[RowKind]) -> DataError:
    """The error for rows with columns of these names."""
    needy = {kind.name: kind for kind in kinds if kind.needs}
    found = f"columns {', '.join(names)} fit no kind of rows"
    keep = "or keep columns as they are with --keep"
    media = media_columns(rows, names)
    remedy = next((each for each in _remedies(rows, names, media, needy) if each is not None), None)
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
    """Remedies, the best first: by the values of a column, by names, by usual pairs of names, by a lone text.

    All but the first were tried on the rows; the last, by names, leaves a column to the user.
    """
    yield _conversation(rows, names, media, kinds)
    by_names = _by_names(names, media, kinds)
    if by_names is not None and not by_names.columns:
        yield by_names
    for each in (by_names, _pair(names, media, kinds), _lone_text(rows, names, media, kinds)):
        if each is not None and "COLUMN" not in each.columns.values() and _reads(each, rows):
            yield each
    if by_names is not None and "COLUMN" in by_names.columns.values():
        yield by_names


class _NoMedia(SampleMedia):
    """Takes any reference, and reads nothing."""

    def add(self, kind: str, reference: Any, *, said: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        return {"type": kind, "mime": f"{kind}/x", "span": [0, 0], "width": 1, "height": 1}


def _reads(remedy: _Remedy, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether any of the rows can be read with it; yes if no row holds anything to try it on."""
    tried = [row for row in rows if all(is_filled(value_at(row, name)) for name in remedy.columns.values())]
    for row in tried:
        fields = Fields(row, remedy.kind.columns, remedy.columns)
        if remedy.kind.fits(row, remedy.columns):
            try:
                remedy.kind.read(fields, _AS_USUAL, _NoMedia(None))
            except DataError:
                continue
            return True
    return not tried


def _pair(names: Sequence[str], media: Mapping[str, str], kinds: Mapping[str, RowKind]) -> _Remedy | None:
    """How to read columns that are usually a question and its answer."""
    lower, kind = {name.lower(): name for name in names}, kinds["prompt-response"]
    for prompt, response in _PAIRS:
        if prompt in lower and response in lower:
            columns = {"prompt": lower[prompt], "response": lower[response]}
            return _Remedy(kind=kind, columns={**_media_roles(kind, names, media), **columns})
    return None


def _by_names(names: Sequence[str], media: Mapping[str, str], kinds: Mapping[str, RowKind]) -> _Remedy | None:
    """How to read columns whose names are most alike to those of a kind; of rows with media, one that reads media."""
    able = [kind for kind in kinds.values() if not media or "images" in kind.columns]
    usual = {name for kind in kinds.values() for each in kind.columns.values() for name in each}
    others = [name for name in names if name not in media or name in usual]
    nearest = max(able, key=lambda kind: _nearness(kind, others))
    if not _nearness(nearest, others):
        return None
    missing = [role for role, usual in nearest.needs.items() if not set(usual) & set(names)]
    columns = {role: _most_alike(nearest.needs[role], others)[1] or "COLUMN" for role in missing}
    return _Remedy(kind=nearest, columns={**_media_roles(nearest, names, media), **columns})


def _media_roles(kind: RowKind, names: Sequence[str], media: Mapping[str, str]) -> dict[str, str]:
    """Roles of media that a kind may have -> the first column that holds such media under no usual name."""
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
    """How to read the column, or what is nested in one, that holds lists of messages or of exchanges."""
    for row in rows:
        for name, value in _columns_of(row):
            messages = _listed(value)
            kind, tags = _kind_of_messages(messages, kinds), dict[str, str]()
            if messages and kind is None:
                tags = _tags(messages, [each for other in rows for each in _listed(value_at(other, name))])
                kind = kinds["messages"] if tags else None
            if kind is not None:
                columns = {**_media_roles(kind, names, media), "messages": name}
                return _Remedy(kind=kind, columns=columns, tags=tags)
    return None


def _kind_of_messages(messages: Sequence[Mapping[str, Any]], kinds: Mapping[str, RowKind]) -> RowKind | None:
    """The kind of rows that hold such messages or exchanges; None where their keys have other names."""
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
    """Columns of a row and of the objects that it holds, whose names have dots."""
    for name, value in row.items():
        yield name, value
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", each) for inner, each in value.items())


def _listed(value: Any) -> list[Mapping[str, Any]]:
    """The objects of a list, also of one as JSON text."""
    listed = unpacked(value)
    return [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []


def _tags(first: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What messages call their speaker, their content, the user and the assistant; {} where that cannot be told.

    The speaker is the key with few values, which come again, or are known names; the user speaks first. first: the
    messages of a row, from among all.
    """
    keys = [key for key in first[0] if all(isinstance(each.get(key), str) for each in messages)]
    speakers: dict[str, list[str]] = {key: list(dict.fromkeys(each[key] for each in messages)) for key in keys}
    known = {*USUAL_ROLES, *ROLES}
    few = [key for key in keys if 2 <= len(speakers[key]) <= _MOST_SPEAKERS]
    roles = [key for key in few if known & set(speakers[key])] or [
        key for key in few if len(speakers[key]) < len(messages)
    ]
    contents = [key for key in keys if key not in roles[:1]]
    if not roles or len(contents) != 1:
        return {}
    named = [name for name in speakers[roles[0]] if name not in ("system", "developer")]
    if len(named) < 2:
        return {}
    tags = {"role_tag": roles[0], "content_tag": contents[0], "user_tag": named[0], "assistant_tag": named[1]}
    usual = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    return {tag: name for tag, name in tags.items() if name != usual[tag]}


def _lone_text(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], media: Mapping[str, str], kinds: Mapping[str, RowKind]
) -> _Remedy | None:
    """How to read rows with one column of texts: as documents, or as what is said of media; None for several texts."""
    texts = [
        name
        for name in names
        if name not in media
        and name not in ("id", "__key__")
        and all(isinstance(row.get(name), str) for row in rows if is_filled(row.get(name)))
        and any(is_filled(row.get(name)) for row in rows)
    ]
    if len(texts) != 1:
        return None
    has_media = bool(media) or any(name in names for usual in MEDIA_COLUMNS.values() for name in usual)
    kind = kinds["caption" if has_media else "text"]
    return _Remedy(kind=kind, columns={**_media_roles(kind, names, media), "text": texts[0]})


def _nearness(kind: RowKind, names: Sequence[str]) -> float:
    """1 for each needed column that is there, less for one of a similar name, over the columns that it needs.

    What a kind may have besides decides between kinds of which equally much is there.
    """
    needed = sum(_most_alike(usual, names)[0] for usual in kind.needs.values()) / len(kind.needs)
    may = sum(bool(set(usual) & set(names)) for usual in kind.may.values())
    return needed + may / 1000 if needed else 0.0


def _most_alike(usual: Sequence[str], names: Sequence[str]) -> tuple[float, str]:
    """How much the name that is most alike to one of the usual ones is so, and that name; 0 and "" for none."""
    found = [(SequenceMatcher(None, name.lower(), other).ratio(), name) for name in names for other in usual]
    best = max(found, key=lambda each: each[0], default=(0.0, ""))
    return best if best[0] >= _ALIKE else (0.0, "")
