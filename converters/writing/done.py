"""Whether a conversion was finished before. targets + what is asked -> the datasets that are there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ...mds.index import DATASET_NAME
from ...mds.lengths import lengths_names
from ...mds.listing import read_if_there
from ...processors.not_shown import loses_calls
from ...storage.storage import Storage
from .replacing import read_claim, read_described
from .work import MAY_CHANGE

_CHANGES_NOTHING = ("unit_bytes", "units", *MAY_CHANGE)  # in what is written, as long as no row is rejected
_OF_ONE_CONVERSION = (  # of a dataset that grows by several, each may have its own
    "sources", "format", "quote", "delimiter", "encoding", "limit", "shuffle_seed", "split_seed", "shard_bytes",
    "compression", "num_shards", "samples_per_shard", "drop", "version of lmms_stream",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A dataset that is there. description: its dataset.json. num_tokens: None where nothing measured them."""

    description: Mapping[str, Any]
    num_tokens: int | None


def digest_of(asked: Mapping[str, Any]) -> str:
    """The same for conversions that write the same. asked: JSON values."""
    values = {name: value for name, value in asked.items() if name not in _CHANGES_NOTHING}
    return xxhash.xxh3_128(json.dumps(values, sort_keys=True).encode()).hexdigest()


def options_of(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The options that decide how a row is stored, which may not change when a dataset grows.

    How files are read, how many rows, in which order, and how shards are filled is none of them.
    """
    values = {name: value for name, value in asked.items() if name not in (*_CHANGES_NOTHING, *_OF_ONE_CONVERSION)}
    return dict(json.loads(json.dumps(values)))


def place_of(name: str) -> str:
    """Where a source lies, whatever the working directory: its URL, or its absolute path."""
    return name if "://" in name or name.startswith("hf:") else str(Path(name).absolute())


def finished_before(targets: Sequence[Storage], asked: Mapping[str, Any]) -> list[Finished] | None:
    """The datasets at all targets, if the same was asked of them; None otherwise, and where one is unfinished."""
    finished = []
    for target in targets:
        described = read_described(target, DATASET_NAME)
        if not described or described.get("asked") != digest_of(asked) or read_claim(target) is not None:
            return None
        finished.append(Finished(description=described, num_tokens=_num_tokens(target, described)))
    if asked["on_error"] == "fail" and any(each.description.get("num_rejected") for each in finished):
        return None
    if asked["on_dropped"] == "error" and any(loses_calls(each.description.get("not_shown", {})) for each in finished):
        return None
    return finished


def _num_tokens(target: Storage, described: Mapping[str, Any]) -> int | None:
    for fingerprint in described["lengths"]:
        data = read_if_there(target, lengths_names(fingerprint)[1])
        if data is not None:
            return int(json.loads(data)["num_tokens"])
    return None
