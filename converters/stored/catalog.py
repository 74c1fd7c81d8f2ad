"""Description of a stored dataset in small files: index.json, `_lmms/dataset.json`, lengths indexes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...errors import DataError, LengthsError, ObjectMissingError, ShardError
from ...mds.index import DATASET_NAME, ShardInfo, is_safe_name, no_dataset, read_if_there, read_listing
from ...mds.lengths import (
    LENGTHS_FOLDER,
    LengthIndex,
    array_matches,
    lengths_names,
    parse_description,
    patches_name,
)
from ...mds.shard import fetch_shard, open_shard
from ...processors import ProcessorChoice
from ...processors.base import Processor, processor_fingerprint
from ...processors.text import TokensProcessor
from ...storage.cache import LocalCache
from ...storage.local import LocalStorage
from ...storage.storage import Storage, open_storage
from ...types import Sample
from ..rows.schemas import READ_SCHEMAS

REJECTS_NAME = "_lmms/rejects.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Catalog:
    """Index entries of a dataset, and its description in `_lmms/dataset.json` (None for a plain MDS dataset).

    index: content of index.json: JSON values.
    """

    storage: Storage
    index: Mapping[str, Any]
    shards: tuple[ShardInfo, ...]
    dataset: Mapping[str, Any] | None

    @property
    def num_samples(self) -> int:
        return sum(info.num_samples for info in self.shards)

    @property
    def schema(self) -> str | None:
        """Name of a processor schema that fits the columns, preferably the description's schema; None without a fit."""
        return schema_of(self.shards, self.dataset)

    @property
    def fingerprints(self) -> list[str]:
        """Fingerprints of possible lengths indexes, in the order of their writing."""
        return list(dict.fromkeys([*listed_fingerprints(self.storage, self.dataset), *known_fingerprints(self.shards)]))


def read_catalog(storage: Storage, *, refused: dict[str, str] | None = None) -> Catalog:
    """Return the catalog of a dataset; StorageError without an index, ShardError for an unsafe index.

    refused: filled with columns that cannot be decoded and the reasons. None: raise an error for an undecodable column.
    """
    listing = read_listing(storage)
    if listing is None:
        raise no_dataset(storage)
    shards, described = listing.shards(refused=refused), listing.dataset
    dataset = None if described is None else parse_dataset(described, source=f"{storage.url}/{DATASET_NAME}")
    return Catalog(storage=storage, index=json.loads(listing.index), shards=shards, dataset=dataset)


def parse_dataset(data: bytes, *, source: str) -> dict[str, Any]:
    """Return the content of a `_lmms/dataset.json`; ShardError for a damaged description or an unsafe file name."""
    try:
        dataset = dict(json.loads(data))
        names = [name for shard in dataset["shards"] for name in (shard["name"], shard.get("file", shard["name"]))]
        names += list(dataset["other_files"])
        names += [name for part in dataset.get("parts", ()) for name in part["files"]]
        unsafe = [name for name in names if not is_safe_name(name)]
        unsafe += [name for name in dataset["lengths"] if not is_safe_name(name) or "/" in name]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ShardError(
            f"{source}: not the description of a dataset ({error!r}): convert the dataset again"
        ) from error
    if unsafe:
        raise ShardError(f"{source} names {unsafe[0]!r}, which is not a plain path below the dataset: refused")
    return dataset


def stored_processor(url: str, choice: ProcessorChoice) -> Processor:
    """Return the user's processor for a stored dataset; without a type, the processor for the samples."""
    if choice.type is not None:
        return choice.build()
    catalog = read_catalog(open_storage(url))
    schema = catalog.schema if catalog.schema in ("messages", "text", "preference") else None
    return choice.build(schema, has_media=holds_media(catalog))


def holds_media(catalog: Catalog) -> bool:
    """Return whether media of a dataset were measured, or a sample of its first shard holds media."""
    if catalog.schema not in ("messages", "preference"):
        return False
    listed = (catalog.dataset or {}).get("other_files", ())
    if any(patches_name(fingerprint) in listed for fingerprint in catalog.fingerprints):
        return True
    with TemporaryDirectory(prefix="lmms_stream-media-", ignore_cleanup_errors=True) as folder:
        info = catalog.shards[0]
        shard = open_shard(fetch_shard(LocalCache(catalog.storage, Path(folder)), info), info, columns=["media"])
        return any(shard[number]["media"] for number in range(info.num_samples))


def own_files(dataset: Mapping[str, Any]) -> list[str]:
    """Return the files owned by a dataset, without `dataset.json`.

    Shards in folders below belong to other datasets too, except shards of appended parts.
    """
    files = [shard.get("file", shard["name"]) for shard in dataset["shards"]]  # "file": name of a compressed shard
    of_parts = [name for part in dataset.get("parts", ()) for name in part["files"]]
    return [*dataset["other_files"], *(name for name in files if "/" not in name), *of_parts]


def schema_of(shards: Sequence[ShardInfo], dataset: Mapping[str, Any] | None = None) -> str | None:
    """Return the name of a processor schema that fits the columns of the shards; None without a fit.

    dataset: its description, which decides between several schemas with the same columns.
    """
    columns = columns_of(shards).items()
    fitting = [schema.name for schema in READ_SCHEMAS.values() if schema.columns.items() <= columns]
    said = None if dataset is None else dataset.get("schema")
    return said if said in fitting else next(iter(fitting), None)


def columns_of(shards: Sequence[ShardInfo]) -> dict[str, str]:
    """Return column -> encoding, from the first shard."""
    return shards[0].encodings if shards else {}


def listed_fingerprints(storage: Storage, dataset: Mapping[str, Any] | None) -> list[str]:
    """Return the lengths indexes listed by a dataset, or found in a local dataset without `dataset.json`."""
    if dataset is not None:
        return list(dataset["lengths"])
    if isinstance(storage, LocalStorage):
        return sorted(path.stem for path in (storage.folder / LENGTHS_FOLDER).glob("[!.]*.json"))
    return []


def known_fingerprints(shards: Sequence[ShardInfo]) -> list[str]:
    """Return fingerprints of lengths indexes that may exist unlisted, because no tokenizer is needed."""
    return [processor_fingerprint(TokensProcessor())] if schema_of(shards) == TokensProcessor.schema else []


def local_file(storage: Storage, name: str, folder: Path) -> Path:
    """Return the path of a dataset's file, local or downloaded into `folder`; StorageError, also if it is missing."""
    if isinstance(storage, LocalStorage):
        path = storage.folder / name
        if not path.is_file():
            raise ObjectMissingError(f"{path} does not exist: check the path")
        return path
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    storage.download(name, path)
    return path


def check_processed(processor: Processor, sample: Sample, *, length: int) -> None:
    """Raise DataError unless the number of processed tokens of a sample equals its measured length."""
    num_tokens = len(processor.process(sample)["input_ids"])
    if num_tokens != length:
        raise DataError(
            f"the sample is measured as {length} tokens and processed to {num_tokens}: correct the processor's measure"
        )


def open_lengths(
    storage: Storage, fingerprint: str, *, folder: Path, num_samples: int | None = None
) -> LengthIndex | None:
    """Open, verify and memory-map a lengths index; download a remote index into `folder`. None without an index.

    LengthsError if its files do not match each other, or the number of lengths is not num_samples.
    """
    array_name, description_name = lengths_names(fingerprint)
    description = read_if_there(storage, description_name)
    if description is None:
        return None
    described = parse_description(description, fingerprint=fingerprint)
    arrays = [(array_name, described.content_hash, "lengths")]
    if described.patches_hash is not None:
        arrays.append((patches_name(fingerprint), described.patches_hash, "patches"))
    paths = []
    for name, _, _ in arrays:
        try:
            paths.append(local_file(storage, name, folder))
        except ObjectMissingError as error:
            raise LengthsError(f"{name} is missing: write it again with lmms-stream index") from error
    index = LengthIndex.open(
        paths[0], description, fingerprint=fingerprint, patches_path=paths[1] if len(paths) > 1 else None
    )
    for path, (name, content_hash, what) in zip(paths, arrays, strict=True):
        if not array_matches(path, content_hash=content_hash):
            raise LengthsError(
                f"{name} does not hold the {what} that {description_name} was written for: "
                "write it again with lmms-stream index"
            )
    if num_samples is not None and len(index.lengths) != num_samples:
        raise LengthsError(
            f"lengths index {fingerprint} has {len(index.lengths)} lengths for {num_samples} samples: "
            "write it again with lmms-stream index"
        )
    return index
