"""Sample lengths that resemble real datasets, and shards of samples, the same on every machine. seed -> [data].

Lengths are made in blocks with a random stream each, so that a billion of them can be written to a file without
being held, and so that the first N are the same whatever the total. Shards are written once by MDSWriter; a larger
dataset is made of hard links to them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["chat", "vision"]
Lengths = NDArray[np.uint32]

SHORTEST = 8  # tokens
BLOCK = 5_000_000  # lengths made at a time
VOCABULARY = 32_000
TEXT_BYTES = 1024
_POOL = 1 << 20  # random letters or tokens that samples are cut from


def sample_lengths(kind: Kind, count: int, *, limit: int, seed: int = 0) -> Lengths:
    """`count` lengths of a kind, clipped to [8, limit]: uint32[count], tokens."""
    return np.concatenate([*length_blocks(kind, count, limit=limit, seed=seed)])


def length_blocks(kind: Kind, count: int, *, limit: int, seed: int = 0) -> Iterator[Lengths]:
    """What `sample_lengths` returns, in blocks.

    chat: lognormal, median 350, sigma 0.9. vision: 60 % uniform from 700 to 1500 (an image and a question), 40 %
    lognormal, median 300, sigma 0.9 (text alone).
    """
    for number, start in enumerate(range(0, count, BLOCK)):
        rng = np.random.default_rng([seed, number])
        median = np.float32(350 if kind == "chat" else 300)
        lengths = np.exp(rng.standard_normal(BLOCK, dtype=np.float32) * np.float32(0.9)) * median
        if kind == "vision":
            with_image = rng.random(BLOCK, dtype=np.float32) < 0.6
            lengths[with_image] = rng.integers(700, 1501, int(with_image.sum()))
        yield np.clip(lengths[: count - start], SHORTEST, limit).astype(np.uint32)


def write_lengths(path: Path, kind: Kind, count: int, *, limit: int, seed: int = 0) -> None:
    """Write `sample_lengths` as a .npy file that can be memory-mapped, block by block."""
    lengths = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint32, shape=(count,))  # type: ignore[no-untyped-call]
    start = 0
    for block in length_blocks(kind, count, limit=limit, seed=seed):
        lengths[start : start + len(block)] = block
        start += len(block)
    lengths.flush()


def fewest_packs(lengths: Lengths, *, limit: int) -> int:
    """A number of packs below which no packing of these lengths can go (the bound L2 of Martello and Toth, 1990).

    For a size k up to half a pack: samples longer than limit - k take a pack each and leave no room for k or more;
    those longer than half a pack take one each as well; tokens of samples from k to half a pack that do not fit
    beside the latter need packs of their own. The bound is the best over all k; k = 0 counts tokens.
    """
    counts = np.bincount(lengths, minlength=limit + 1).astype(np.int64)
    samples_up_to = np.cumsum(counts)
    tokens_up_to = np.cumsum(counts * np.arange(limit + 1))
    half = limit // 2
    sizes = np.arange(half + 1)
    alone = samples_up_to[limit] - samples_up_to[limit - sizes]
    large = samples_up_to[limit - sizes] - samples_up_to[half]
    room_beside_large = large * limit - (tokens_up_to[limit - sizes] - tokens_up_to[half])
    below = np.where(sizes > 0, tokens_up_to[sizes - 1], 0)
    needed = np.maximum(0, -(-(tokens_up_to[half] - below - room_beside_large) // limit))
    return int((alone + large + needed).max())


def text_samples(count: int, *, seed: int = 0) -> Iterator[dict[str, str]]:
    """`count` samples {"text": str} of 1 KB each."""
    rng = np.random.default_rng([seed, 1])
    letters = rng.choice(np.frombuffer(b"etaoin shrdlu", np.uint8), _POOL + TEXT_BYTES).tobytes().decode()
    for start in rng.integers(0, _POOL, count).tolist():
        yield {"text": letters[start : start + TEXT_BYTES]}


def token_samples(
    lengths: Lengths, *, seed: int = 0, vocabulary: int = VOCABULARY
) -> Iterator[dict[str, NDArray[np.int32]]]:
    """Tokenized samples of these lengths, the second half of each trained on (schema "tokens")."""
    rng = np.random.default_rng([seed, 2])
    tokens = rng.integers(0, vocabulary, _POOL + int(lengths.max())).astype(np.int32)
    starts = rng.integers(0, _POOL, len(lengths))
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        spans = np.array([[length // 2, length]], np.int32)
        yield {"input_ids": tokens[start : start + length], "loss_spans": spans}


def write_texts(folder: Path, count: int, *, shard_bytes: int, seed: int = 0) -> None:
    """`text_samples` as MDS shards."""
    from lmms_stream import MDSWriter

    columns = {"text": "str"}
    with MDSWriter(columns=columns, out=str(folder), hashes=["xxh3_64"], size_limit=shard_bytes) as writer:
        for sample in text_samples(count, seed=seed):
            writer.write(sample)


def write_tokens(
    folder: Path, lengths: Lengths, *, shard_bytes: int, seed: int = 0, vocabulary: int = VOCABULARY
) -> None:
    """`token_samples` as MDS shards with their lengths index."""
    from lmms_stream import MDSWriter
    from lmms_stream.converters.rows import schemas

    columns = dict(schemas.TOKENS.columns)
    with MDSWriter(columns=columns, out=str(folder), hashes=["xxh3_64"], size_limit=shard_bytes) as writer:
        for sample in token_samples(lengths, seed=seed, vocabulary=vocabulary):
            writer.write(sample)
    write_lengths_index(folder, lengths)


def link_tokens(source: Path, folder: Path, *, samples: int = 0, shards: int = 0) -> int:
    """A dataset of hard links to the shards of `source`, over and over, until both sizes are reached; its samples.

    Every shard has a name, an entry in index.json and its part of the lengths index of its own.
    """
    index = json.loads((source / "index.json").read_text())
    lengths = np.load(next((source / "_lmms/lengths").glob("*.npy")))
    ends = np.cumsum([shard["samples"] for shard in index["shards"]])
    parts = np.split(lengths, ends[:-1])
    entries: list[dict[str, object]] = []
    num_samples = 0
    folder.mkdir(parents=True)
    while num_samples < samples or len(entries) < shards:
        shard = index["shards"][len(entries) % len(parts)]
        name = f"shard.{len(entries):06}.mds"
        os.link(source / shard["raw_data"]["basename"], folder / name)
        entries.append(shard | {"raw_data": shard["raw_data"] | {"basename": name}})
        num_samples += shard["samples"]
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))
    write_lengths_index(folder, np.concatenate([parts[number % len(parts)] for number in range(len(entries))]))
    return num_samples


def write_litdata(
    folder: Path, samples: Callable[[], Iterator[Any]], *, chunk_bytes: int, tokens_only: bool = False
) -> None:
    """Samples in litdata's format; with tokens_only, their tokens alone, end to end, as its TokensLoader reads them.

    Runs litdata's own processes: call it in a process whose environment may change.
    """
    from litdata import TokensLoader, optimize

    os.environ["DATA_OPTIMIZER_CACHE_FOLDER"] = f"{folder}-cache"
    os.environ["DATA_OPTIMIZER_DATA_CACHE_FOLDER"] = f"{folder}-data-cache"
    optimize(
        _LitdataSource(samples, tokens_only),
        [0],
        str(folder),
        chunk_bytes=chunk_bytes,
        num_workers=1,
        item_loader=TokensLoader() if tokens_only else None,
        verbose=False,
    )


class _LitdataSource:
    """A function that litdata may call in a process of its own: all samples for its one input."""

    def __init__(self, samples: Callable[[], Iterator[Any]], tokens_only: bool):
        self._samples = samples
        self._tokens_only = tokens_only

    def __call__(self, _: int) -> Iterator[Any]:
        for sample in self._samples():
            yield sample["input_ids"] if self._tokens_only else sample


def write_lengths_index(folder: Path, lengths: Lengths) -> None:
    from lmms_stream.mds.lengths import LengthIndex
    from lmms_stream.processors.base import processor_fingerprint
    from lmms_stream.processors.text import TokensProcessor

    processor = TokensProcessor()
    fingerprint = processor_fingerprint(processor)
    LengthIndex.from_array(lengths, fingerprint=fingerprint, processor=processor.description).write(folder)
