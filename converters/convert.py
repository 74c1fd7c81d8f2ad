"""Source files -> a dataset: read -> map -> measure -> write."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import orjson
import xxhash

from ..errors import ConfigError, DataError
from ..lengths import LengthIndex
from ..processors.base import Processor, processor_fingerprint
from ..processors.text import TokensProcessor
from ..storage import open_storage
from ..types import Sample
from .readers import Row, read_rows
from .schema import COLUMNS, to_messages, to_tokens
from .writer import open_writer

DEFAULT_SHARD_BYTES = 1 << 26


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertReport:
    """What a conversion did. num_tokens is None without a lengths index; num_rejected rows were left out."""

    num_rows: int
    num_rejected: int
    num_tokens: int | None
    num_shards: int
    num_bytes: int
    seconds: float


def convert(
    sources: Sequence[Path],
    target: str,
    *,
    processor: Processor | None = None,
    tokenize: bool = False,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    on_error: Literal["fail", "skip"] = "fail",
    overwrite: bool = False,
    on_row: Callable[[], None] = lambda: None,
) -> ConvertReport:
    """Write the rows of `sources`, in order, as MDS shards below `target` (a folder or a URL).

    processor: measures each sample, and a lengths index is written beside the shards; with `tokenize` its tokens
    are stored in place of the messages. on_error: a row that does not fit its schema ends the conversion, or goes
    to `_lmms/rejects.jsonl` with the reason and is counted. Raises DataError, StorageError, ConfigError.
    """
    from .. import __version__

    if tokenize and processor is None:
        raise ConfigError("--tokenize needs a tokenizer: pass --tokenizer")
    started = time.monotonic()
    measured: Processor | None = TokensProcessor() if tokenize else processor
    schema = "tokens" if tokenize else "messages"
    lengths: list[int] = []
    rejects: list[bytes] = []
    num_rows = 0
    storage = open_storage(target)
    with open_writer(storage, columns=COLUMNS[schema], shard_bytes=shard_bytes, overwrite=overwrite) as writer:
        for source in sources:
            for row in read_rows(source):
                try:
                    sample = _to_sample(row, processor if tokenize else None)
                    length = measured.measure(sample) if measured else None
                    writer.write(sample)
                except DataError as error:
                    if on_error == "fail":
                        raise DataError(
                            f"{row.where}: {error} (or pass --on-error skip to leave such rows out)"
                        ) from error
                    rejects.append(_reject(row, error))
                else:
                    num_rows += 1
                    if length is not None:
                        lengths.append(length)
                on_row()
        if num_rows == 0:
            raise DataError(f"none of {len(rejects)} rows fits its schema: {rejects[0].decode()}")
        index = None
        if measured is not None:
            index = LengthIndex.from_array(
                np.array(lengths, np.uint32),
                fingerprint=processor_fingerprint(measured),
                processor=measured.description,
            )
        description = {
            "schema": schema,
            "columns": COLUMNS[schema],
            "num_samples": num_rows,
            "num_rejected": len(rejects),
            "source": [_source_fingerprint(source) for source in sources],
            "converter": f"lmms_stream {__version__}",
        }
        dataset = writer.commit(description, index, b"".join(line + b"\n" for line in rejects))
    return ConvertReport(
        num_rows=num_rows,
        num_rejected=len(rejects),
        num_tokens=sum(lengths) if measured else None,
        num_shards=len(dataset["shards"]),
        num_bytes=sum(shard["size"] for shard in dataset["shards"]),
        seconds=time.monotonic() - started,
    )


def _to_sample(row: Row, tokenizer: Processor | None) -> Sample:
    sample = to_messages(row.values)
    return sample if tokenizer is None else to_tokens(sample, tokenizer)


def _reject(row: Row, error: DataError) -> bytes:
    return orjson.dumps({"source": str(row.source), "row": row.number, "reason": str(error)})


def _source_fingerprint(path: Path) -> dict[str, object]:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return {"name": path.name, "size": path.stat().st_size, "xxh3_64": digest.hexdigest()}
