"""LLaMA-Factory's `dataset_info.json`, and YAML files of its v1 -> specs of the chosen datasets; their rows.

Both are read like in LLaMA-Factory's own loaders.
Keys, columns and tags are documented in LLaMA-Factory's data/README.md and decided by its parser: a column or tag has
its default only if the entry names no columns or no tags at all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import orjson

from ..converters.rows.chat_kinds import exchanges
from ..converters.rows.fields import head_of, unpacked, value_at
from ..converters.rows.speakers import tag_of, untagged_message
from ..converters.sources.specs import ALL, TAGS, Settings, Spec, num_rows_of, resolved
from ..errors import ConfigError, DataError, did_you_mean
from ..storage.failures import disk_errors

logger = logging.getLogger("lmms_stream")
FORMATTINGS = ("alpaca", "sharegpt", "openai")
COLUMNS = (
    "prompt", "query", "response", "history", "messages", "system", "tools", "images", "videos", "audios", "chosen",
    "rejected", "kto_tag",
)  # fmt: skip
_DEFAULT_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
_TAGS_OF_SHAREGPT = dict(
    zip(TAGS, ("from", "value", "human", "gpt", "observation", "function_call", "system"), strict=True)
)
_TAGS_OF_OPENAI = dict(zip(TAGS, ("role", "content", "user", "assistant", "tool", "function", "system"), strict=True))
_PLACES = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name", "file_name")
_REFUSED = {
    "ms_hub_url": "a dataset of ModelScope", "om_hub_url": "a dataset of OpenMind", "script_url": "a loading script"
}  # fmt: skip
KEYS = (  # of an entry; docs/llama_factory.md has the effect of each
    *_PLACES, "formatting", "ranking", "subset", "split", "folder", "num_samples", "revision", "columns", "tags",
    "file_sha1",
)  # fmt: skip
_MOOT = {"file_sha1": "not compared, the dataset keeps its own digest", "streaming": "shards are always streamed"}


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetInfo:
    """Description of the rows of an entry.

    formatting: one of FORMATTINGS. columns, tags: names of COLUMNS and TAGS in effect, including defaults. named:
    columns named by the entry. query_after: separator between prompt and query.
    """

    formatting: str
    ranking: bool
    columns: Mapping[str, str]
    tags: Mapping[str, str]
    named: tuple[str, ...] = ()
    query_after: str = "\n"

    @property
    def kind(self) -> Literal["messages", "text", "preference", "kto"]:
        """Our kind of rows for the entry: see KINDS."""
        if "kto_tag" in self.columns:
            return "kto"
        if self.ranking:
            return "preference"
        return "text" if self.formatting == "alpaca" and "response" not in self.columns else "messages"

    def check_columns(self, names: Sequence[str]) -> None:
        """Raise DataError if the entry names columns that are missing in the first rows."""
        missing = [
            f"{self.columns[role]} ({role})" for role in self.named if head_of(self.columns[role], names) not in names
        ]
        if missing:
            raise DataError(
                f"no column {', '.join(missing)}, found {', '.join(names)}: correct columns of its entry in "
                "dataset_info.json"
            )

    def describe(self, names: Sequence[str], *, kept: Sequence[str]) -> str:
        """Return a text for people: the reading of rows with columns of these names."""
        read = [
            f"{column} as {role}" if column != role else role
            for role, column in self.columns.items()
            if column in names
        ]
        left = [name for name in names if name not in (*self.columns.values(), *kept)]
        said = [f"{self.kind}, as LLaMA-Factory describes them ({self.formatting})", f"reads {', '.join(read)}"]
        said += [f"keeps {', '.join(kept)}"] if kept else []
        return "; ".join([*said, *([f"leaves out {', '.join(left)}"] if left else [])])

    def align(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row as a row of `kind`, with the usual names of columns.

        DataError for a row skipped by LLaMA-Factory.
        """
        row = _Row(values, self)
        if self.kind == "text":
            return {"text": row.asked()}
        extras = {name: row.value(name) for name in _EXTRAS if row.value(name) is not None}
        prompt = row.prompt()
        if self.kind == "preference":
            return {"prompt": prompt, "chosen": [row.answer("chosen")], "rejected": [row.answer("rejected")], **extras}
        *before, last = prompt if self.formatting != "alpaca" else [*prompt, row.answer("response")]
        if self.kind == "kto":
            return {"prompt": before, "completion": [last], "label": row.label(), **extras}
        return {"messages": [*before, last], **extras}


def describes_datasets(path: Path) -> bool:
    """Return whether a file dataset_info.json is LLaMA-Factory's; `datasets` writes other files with this name."""
    try:
        content = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError:
        return True  # reading the file raises the error
    return isinstance(content, dict) and any(
        isinstance(entry, dict) and not entry.keys().isdisjoint(_PLACES) for entry in content.values()
    )


def dataset_info_specs(
    path: Path, chosen: str | None, *, refused: Callable[[DataError], None] | None = None
) -> list[Spec]:
    """Return the specs of the datasets named in `chosen`, separated by commas; "*" for all. None for the only dataset.

    Relative paths, also of media, start from the file's folder. refused: with "*", called with the errors of datasets
    that are never read (of ModelScope, of OpenMind, of loading scripts); these are left out. None raises the first
    error.
    """
    with disk_errors(str(path)):
        data = path.read_bytes()
    try:
        content = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{path}: not valid JSON ({error}): correct it") from error
    if chosen is None and len(content) != 1:
        some = ", ".join(list(content)[:10]) + (", …" if len(content) > 10 else "")
        raise DataError(
            f"{path} names {len(content)} datasets ({some}): choose by {path}#NAME, several by #NAME,NAME, all by #*"
        )
    specs = []
    for name in _chosen(path, content, chosen):
        try:
            specs.append(_spec(path, content[name], where=f"{path}#{name}"))
        except _NeverReadError as error:
            if refused is None or chosen != ALL:
                raise
            refused(error)
    return specs


def _chosen(path: Path, content: Mapping[str, Any], chosen: str | None) -> list[str]:
    """Return the names in `chosen`, separated by commas; all names for None and "*"."""
    names = list(content) if chosen in (None, ALL) else [each.strip() for each in str(chosen).split(",")]
    for name in names:
        if name not in content:
            raise DataError(f"{path} names no dataset {name!r}: {did_you_mean(name, content)}")
    return names


class _NeverReadError(DataError):
    """An entry names a dataset in an unsupported location."""


def _spec(path: Path, entry: Any, *, where: str) -> Spec:
    if not isinstance(entry, dict):
        raise DataError(f'{where}: expected an object, found {entry!r}: write {{"file_name": …}}')
    _check_names(entry, KEYS, what=where)
    info = dataset_info(entry, where=where)
    settings = Settings(rows={"dataset_info": info, "kind": info.kind}, limit=_limit(entry, where=where))
    place = next((key for key in _PLACES if entry.get(key) is not None), None)
    if place is None:
        raise DataError(f"{where}: has no path of its rows: add a file_name")
    said = _texts(entry, [place, "split", "subset", "folder", "revision"], where=where)
    if place in _REFUSED:
        raise _NeverReadError(
            f"{where}: {place} {entry[place]!r} names {_REFUSED[place]}, which is not read: download it, and name the "
            "files by file_name"
        )
    if place == "hf_hub_url":
        return Spec(text=where, path=_hub_path(said, path.parent), settings=settings)
    if entry.get("split") not in (None, "train"):
        raise DataError(
            f"{where}: split is {entry['split']!r}, and the rows of files are all of split train: leave it out, and "
            "name the files of the split"
        )
    named = resolved(said[place], path.parent)
    format = "lines" if named.lower().endswith(".txt") else None  # a row per line, like LLaMA-Factory
    if Path(named).is_dir():
        named = f"{named.rstrip('/')}/*"
    return Spec(text=where, path=named, format=format, folder=str(path.parent.absolute()), settings=settings)


def _limit(entry: Mapping[str, Any], *, where: str, key: str = "num_samples") -> int | None:
    try:
        return None if entry.get(key) is None else num_rows_of(entry[key])
    except ConfigError as error:
        raise DataError(f"{where}: {key} is {error}") from error


def _hub_path(said: Mapping[str, str], base: Path) -> str:
    """Return a spec of the hub, or of a local folder with this name next to the file."""
    query = {
        "config": said.get("subset"),
        "split": said.get("split", "train"),
        "data_dir": said.get("folder"),
        "revision": said.get("revision"),
    }
    text = "&".join(f"{key}={quote(value)}" for key, value in query.items() if value is not None)
    return resolved(f"hf:{said['hf_hub_url']}?{text}", base)


def dataset_info(entry: Mapping[str, Any], *, where: str) -> DatasetInfo:
    """Return the description of an entry's rows. DataError, which begins with `where`, for an invalid entry."""
    formatting, ranking = entry.get("formatting") or "alpaca", entry.get("ranking") or False
    if formatting not in FORMATTINGS:
        raise DataError(f"{where}: formatting {formatting!r} is not known: {did_you_mean(formatting, FORMATTINGS)}")
    if not isinstance(ranking, bool):
        raise DataError(f"{where}: ranking is {ranking!r}: write true or false")
    named = _named(entry, "columns", COLUMNS, where=where)
    tags = _named(entry, "tags", TAGS, where=where)
    usual_tags = _TAGS_OF_OPENAI if formatting == "openai" else _TAGS_OF_SHAREGPT
    # Keys and speakers needed by every row always have their defaults.
    needed = {key: usual_tags[key] for key in TAGS[:4]}
    columns = _DEFAULT_COLUMNS if named is None else named
    if ranking:
        columns = {**({"chosen": "chosen", "rejected": "rejected"} if named is None else {}), **columns}
        missing = [name for name in ("chosen", "rejected") if name not in columns]
        if missing:
            raise DataError(
                f"{where}: ranking is true, but columns has no {' and no '.join(missing)}: add them to columns"
            )
    asked = ("prompt", "query") if formatting == "alpaca" else ("messages",)
    if columns.keys().isdisjoint(asked):
        raise DataError(f"{where}: columns has no {asked[0]}, which formatting {formatting} needs: add it to columns")
    return DatasetInfo(
        formatting=formatting,
        ranking=ranking,
        columns=columns,
        tags=usual_tags if tags is None else {**needed, **tags},
        named=tuple(named or ()),
    )


def _named(entry: Mapping[str, Any], key: str, known: Sequence[str], *, where: str) -> dict[str, str] | None:
    """Return the names of columns or tags, without null names; None if the entry names none."""
    given = entry.get(key)
    if given is None:
        return None
    if not isinstance(given, dict):
        raise DataError(f"{where}: {key} is {given!r}: expected an object of names")
    _check_names(given, known, what=f"{where}: {key}")
    return _texts(given, list(given), where=f"{where}: {key}")


def _texts(given: Mapping[str, Any], keys: Sequence[str], *, where: str) -> dict[str, str]:
    found = {key: given[key] for key in keys if given.get(key) is not None}
    for key, value in found.items():
        if not isinstance(value, str) or not value:
            raise DataError(f"{where}: {key} is {value!r}: expected text")
    return found


def _check_names(given: Mapping[str, Any], known: Sequence[str], *, what: str) -> None:
    for name in given:
        if name not in known:
            raise DataError(f"{what}: unknown key {name!r}: {did_you_mean(name, known)}")
        if name in _MOOT and given[name]:
            logger.warning("%s: %s cannot matter here: %s", what, name, _MOOT[name])


# YAML files of LLaMA-Factory v1: name -> {path, source, split, converter, size, weight, streaming}.

V1_KEYS = ("path", "source", "split", "converter", "size", "weight", "streaming")
_V1_SOURCES = ("hf_hub", "local")  # the default first
_V1_MEDIA = {name: name for name in ("images", "videos", "audios")}
_V1_CONVERTERS: Mapping[str | None, Mapping[str, Any]] = {
    None: {},  # rows of messages, or of chosen_messages and rejected_messages
    "sharegpt": {"kind": "sharegpt", "columns": {"messages": "conversations", "system": ""}},
    "pair": {"kind": "preference", "columns": {"chosen": "chosen", "rejected": "rejected", "prompt": "", "system": ""}},
    "alpaca": {
        "kind": "messages",
        "dataset_info": DatasetInfo(
            formatting="alpaca",
            ranking=False,
            columns={"prompt": "instruction", "query": "input", "response": "output", "system": "system", **_V1_MEDIA},
            tags=_TAGS_OF_SHAREGPT,
            query_after="",
        ),
    },
}


def v1_specs(path: Path, content: Mapping[str, Any], chosen: str | None) -> list[Spec]:
    """Return the specs of the datasets of a YAML file named in `chosen`, separated by commas; None for all datasets.

    Relative paths start from the working directory; if nothing exists there, from the file's folder or its parent
    folder.
    Paths of media start from the same folder as their dataset's path.
    """
    return [_v1_spec(path, content[name], where=f"{path}#{name}") for name in _chosen(path, content, chosen)]


def _v1_spec(path: Path, entry: Mapping[str, Any], *, where: str) -> Spec:
    _check_names(entry, V1_KEYS, what=where)
    said = _texts(entry, ["path", "source", "split", "converter"], where=where)
    source, converter = said.get("source", _V1_SOURCES[0]), said.get("converter")
    if "path" not in said:
        raise DataError(f"{where}: path is empty: name a file, a folder or a dataset of the hub")
    if source not in _V1_SOURCES:
        raise _NeverReadError(
            f"{where}: source {source!r} is not read: download the dataset, and name its files by path, with "
            "source: local"
        )
    if converter not in _V1_CONVERTERS:
        known = [each for each in _V1_CONVERTERS if each is not None]
        raise DataError(
            f"{where}: converter {converter!r} is not known: {did_you_mean(converter, known)}; rows of your own "
            "converter are read with lmms-stream convert FILES --map FILE.py:FUNCTION"
        )
    if entry.get("weight") not in (None, 1):
        raise DataError(
            f"{where}: weight {entry['weight']!r} repeats or leaves out rows at random, which is not supported: leave "
            "it out, and give the run's datasets weights (shares of tokens), or set size"
        )
    settings = Settings(rows=_V1_CONVERTERS[converter], limit=_limit(entry, where=where, key="size"))
    if source == "hf_hub":
        hub = {"hf_hub_url": said["path"], "split": said.get("split", "train")}
        return Spec(text=where, path=_hub_path(hub, path.parent), settings=settings)
    if said.get("split", "train") != "train":
        raise DataError(
            f"{where}: split is {said['split']!r}, and the rows of files are all of split train: leave it out, and "
            "name the files of the split, or the first rows by size"
        )
    bases = (Path(), path.absolute().parent, path.absolute().parent.parent)
    base = next((each for each in bases if (each / said["path"]).exists()), bases[0])
    named = resolved(said["path"], base)
    format = "lines" if named.lower().endswith(".txt") else None
    named = f"{named.rstrip('/')}/*" if Path(named).is_dir() else named
    return Spec(text=where, path=named, format=format, folder=str(base.absolute()), settings=settings)


# Rows described by an entry -> equivalent rows of a kind. Pure. For speakers out of turn and surplus messages,
# LLaMA-Factory only warns: here the row is refused.

_EXTRAS = ("tools", "images", "videos", "audios")  # allowed in every kind of chat
_ASKING = ("user_tag", "observation_tag")  # speakers of the first, third, … turn
_ANSWERING = ("assistant_tag", "function_tag")


class _Row:
    """Values of a row, by the role of their columns."""

    def __init__(self, values: Mapping[str, Any], info: DatasetInfo):
        self._values = values
        self._info = info

    def value(self, role: str) -> Any:
        column = self._info.columns.get(role)
        return None if column is None else value_at(self._values, column)

    def text(self, role: str) -> str:
        """Return the text of a role; "" if empty."""
        value = self.value(role)
        if value is None or isinstance(value, str):
            return value or ""
        raise DataError(f"column {self._info.columns[role]!r} ({role}) holds {str(value)[:80]!r}: expected text")

    def asked(self) -> str:
        """Return the prompt followed by the query."""
        return self._info.query_after.join(text for text in (self.text("prompt"), self.text("query")) if text)

    def prompt(self) -> list[dict[str, Any]]:
        """Return all messages except the answers: the answer of an alpaca row, and both answers of a preference."""
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
        """Return the messages of a row; speakers must take turns after an optional system prompt."""
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
