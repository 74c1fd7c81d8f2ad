"""What is asked about the rows of sources, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol, get_args

from ...checks import check_fields
from ...errors import ConfigError, did_you_mean
from ..sources.specs import TAGS
from .kinds import KINDS, column_roles
from .references import CheckMedia
from .row_kind import RowKind

_LATER = ("map", "filter", "tags", "dataset_info")


class DescribedRows(Protocol):
    """Entry of a list of datasets, such as LLaMA-Factory's, with a description of rows: a dataclass of JSON values."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def columns(self) -> Mapping[str, str]:
        """Role -> column of the rows."""

    def check_columns(self, names: Sequence[str]) -> None:
        """DataError for columns of the entry that are not among these names of the first rows."""

    def describe(self, names: Sequence[str], *, kept: Sequence[str]) -> str:
        """Return for people how rows with columns of these names are read. kept: columns stored as they are."""

    def align(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row as one of its kind, with the usual names of columns; DataError for one that does not fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchemaOptions:
    """How rows are read; the defaults find it out.

    kind: the kind of rows that is insisted on (a key of KINDS). columns: role -> column, where it has another than the
    usual name, nested ones with dots (json.conversations); "" for none. keep: columns that are kept as they are, or
    True for all that nothing else reads; NAME:json for one whose values may be null or of several types after the first
    rows. system: prompt of conversations without one. roles: what the data calls a speaker -> user, assistant, …
    learn: whether the loss is on all that the assistant says or on its last message, or a row gives a sample for each
    of its messages, which ends with it. media_root: folder or URL that references to media start from, and do not leave
    (default: the source's own folder). max_image_pixels: larger images are made smaller. check_media: media are broken
    where their header is, or with "decode" where any of them cannot be decoded. filter: a function of the
    user's, as module:function or path/to/file.py:function, which says of a row (a dict) whether it is taken. map: one
    that makes of a row that is taken a row, several (a list), or None; what is said above is of the rows that it makes.
    tags: what keys of a message and its speakers are called, by LLaMA-Factory's names (role_tag, user_tag, …).
    dataset_info: how LLaMA-Factory's file says the rows are.
    """

    kind: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    keep: tuple[str, ...] | bool = ()
    system: str | None = None
    roles: Mapping[str, str] = field(default_factory=dict)
    learn: Literal["assistant", "last", "each"] = "assistant"
    media_root: str | None = None
    max_image_pixels: int | None = None
    check_media: CheckMedia = "header"
    map: str | None = None
    filter: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    dataset_info: DescribedRows | None = None

    def __post_init__(self) -> None:
        check_fields(self, paths=("media_root",))
        keep: Any = self.keep
        if isinstance(keep, str):
            raise ConfigError(f"keep must be names of columns, got {keep!r}: write ({keep!r},)")
        if self.kind is not None and self.kind not in KINDS:
            raise ConfigError(f"kind {self.kind!r} is not known: choose one of {', '.join(KINDS)}")
        unknown = sorted(set(self.columns) - set(column_roles())) if self.columns else []
        if unknown:
            raise ConfigError(f"no column has the role {', '.join(unknown)}: choose of {', '.join(column_roles())}")
        unknown = sorted(set(self.tags) - set(TAGS))
        if unknown:
            raise ConfigError(f"there is no tag {unknown[0]!r}: {did_you_mean(unknown[0], TAGS)}")
        if self.learn not in ("assistant", "last", "each"):
            raise ConfigError(f"learn must be 'assistant', 'last' or 'each', got {self.learn!r}")
        if self.max_image_pixels is not None and self.max_image_pixels < 1:
            raise ConfigError(f"max_image_pixels must be at least 1, got {self.max_image_pixels}")
        if self.check_media not in get_args(CheckMedia):
            raise ConfigError(f"check_media must be 'header' or 'decode', got {self.check_media!r}")

    def changed(self, settings: Mapping[str, Any]) -> SchemaOptions:
        """With what is said of one source, by field, in place of what is said of all; ConfigError for what is wrong.

        How LLaMA-Factory says its rows are is all that is said of their columns, roles and tags.
        """
        if "dataset_info" in settings:
            settings = {"columns": {}, "roles": {}, "tags": {}, **settings}
        return replace(self, **settings) if settings else self

    @property
    def identity(self) -> dict[str, Any]:
        """JSON values that a conversion is resumed by: `schema` is what the kind is called in them.

        Fields that earlier versions did not have are among them where they are set.
        """
        values = {name: value for name, value in asdict(self).items() if value or name not in _LATER}
        return {"schema": values.pop("kind"), **values}


# Options that only some kinds hear, with their defaults; on the command line they are called so with hyphens.
_OF_CHATS: Mapping[str, Any] = {"system": None, "learn": "assistant", "roles": {}, "tags": {}}
_OF_IMAGES: Mapping[str, Any] = {"max_image_pixels": None}
_WITHOUT_IMAGES = ("text", "tokens", "columns")  # schemas of samples in which no image is read


def check_heard(options: SchemaOptions, kind: RowKind) -> None:
    """ConfigError for options that rows of this kind would not hear."""
    name = kind.schema.name
    unheard = {
        **({} if name in ("messages", "preference") else _OF_CHATS),
        **(_OF_IMAGES if name in _WITHOUT_IMAGES else {}),
    }
    given = [option for option, default in unheard.items() if getattr(options, option) != default]
    if given:
        raise ConfigError(
            f"--{given[0].replace('_', '-')} changes nothing in rows that are {kind.name}: leave it out, or name the "
            "kind that they are with --kind"
        )
