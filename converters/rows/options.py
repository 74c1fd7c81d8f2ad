"""Options for the rows of sources, checked."""

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
        """Raise DataError if the entry names columns other than `names`, the columns of the first rows."""

    def describe(self, names: Sequence[str], *, kept: Sequence[str]) -> str:
        """Return for people how rows with these columns are read. kept: columns stored unchanged."""

    def align(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row of the entry's kind, with the usual names of columns; DataError for a row that does not fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchemaOptions:
    """Settings for reading rows; the defaults detect the kind and the columns.

    kind: requested kind of rows (a key of KINDS). columns: role -> column with an unusual name, nested columns with
    dots (json.conversations); "" for no column. keep: columns to keep unchanged, or True for all unread columns;
    NAME:json for a column with null or several types after the first rows. system: prompt of conversations without a
    system prompt. roles: a dataset's name of a speaker -> user, assistant, … learn: the loss covers all assistant
    messages ("assistant"), only the last ("last"), or each row gives a sample per assistant message, ending with it
    ("each"). media_root: folder or URL in which references to media must stay, and from which they start (default: the
    source's folder). max_image_pixels: larger images are reduced. check_media: "header" finds media with a broken
    header, "decode" media that cannot be decoded completely. filter: the user's function, in module:function or
    path/to/file.py:function notation; returns whether a row (a dict) is taken. map: the user's function that returns a
    row, several (a list), or None for each row taken; the other settings apply to the returned rows. tags: keys and
    speakers of messages, under LLaMA-Factory's names (role_tag, user_tag, …). dataset_info: LLaMA-Factory's description
    of the rows.
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
        """Return the options with the settings of one source; ConfigError for invalid settings.

        A description by LLaMA-Factory replaces all settings of columns, roles and tags.
        """
        if "dataset_info" in settings:
            settings = {"columns": {}, "roles": {}, "tags": {}, **settings}
        return replace(self, **settings) if settings else self

    @property
    def identity(self) -> dict[str, Any]:
        """JSON values that a conversion is resumed by; `schema` is the kind.

        Fields that are newer than the first version are included only if set.
        """
        values = {name: value for name, value in asdict(self).items() if value or name not in _LATER}
        return {"schema": values.pop("kind"), **values}


# Options of only some schemas: default, and the schemas; on the command line with hyphens.
_CHATS = ("messages", "preference")
_OF_SCHEMAS: Mapping[str, tuple[Any, tuple[str, ...]]] = {
    "system": (None, _CHATS), "learn": ("assistant", _CHATS), "roles": ({}, _CHATS), "tags": ({}, _CHATS),
    "max_image_pixels": (None, (*_CHATS, "image")),
}  # fmt: skip


def check_heard(options: SchemaOptions, kind: RowKind) -> None:
    """Raise ConfigError for options without effect on rows of this kind."""
    for option, (default, schemas) in _OF_SCHEMAS.items():
        if kind.schema.name not in schemas and getattr(options, option) != default:
            raise ConfigError(
                f"--{option.replace('_', '-')} has no effect on rows of kind {kind.name}: leave it out, or name "
                "another kind with --kind"
            )
