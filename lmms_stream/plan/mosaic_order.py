"""MosaicML's orders: streams and settings -> the sample ids of all ranks and workers in an epoch.

sampled     the number of samples of each shard, and their ids
shuffled    numbers 0 to n - 1 in the order of a shuffle
partitioned numbers -> nodes, ranks, workers, batches
mosaic_work all steps together, by the batching method

The orders equal the orders of MosaicML's package, sample by sample, as tests check.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
PARTITIONS = ("orig", "relaxed")
_log = logging.getLogger("lmms_stream")


@dataclass(frozen=True, kw_only=True, slots=True)
class MosaicOrder:
    """Keywords of a StreamingDataset that determine its order.

    initial_physical_nodes: nodes at the start of the run; None at the start itself. epoch_seed_change: whether the draw
    of samples, and the mix of batches of several streams, change with the epoch. saved_ranks: ranks of the saved run.
    """

    batching_method: str
    partition_algo: str
    sampling_method: str
    sampling_granularity: int
    num_canonical_nodes: int
    initial_physical_nodes: int | None
    batch_size: int
    shuffle: bool
    shuffle_algo: str
    shuffle_seed: int
    shuffle_block_size: int
    epoch_seed_change: bool
    saved_ranks: int = 0


class StreamSamples(NamedTuple):
    """A stream: id of its first sample, samples of its shards, samples to take in an epoch, and its proportion."""

    first: int
    sizes: Ids
    choose: int
    proportion: float


class Readers(NamedTuple):
    """Readers of a run: nodes of equal size, ranks per node, and workers per rank."""

    num_nodes: int
    ranks_per_node: int
    workers_per_rank: int


def mosaic_work(
    order: MosaicOrder, sources: Sequence[StreamSamples], readers: Readers, epoch: int, position: int
) -> Ids:
    """Return all sample ids: int64[nodes, ranks of a node, workers of a rank, batches, batch size], -1 for padding.

    position: samples read before. ValueError for settings that contradict each other, or a position beyond the epoch.
    """
    check_position(order, sum(source.choose for source in sources), readers, position, len(sources))
    if order.batching_method == "random":
        return _random(order, sources, readers, epoch, position)
    return _dealt(order, _METHODS[order.batching_method](order, sources, readers, epoch), readers, position)


def check_position(order: MosaicOrder, num_samples: int, readers: Readers, position: int, num_streams: int) -> None:
    """Raise ValueError for a position beyond an epoch. Samples repeated for equal counts are part of the epoch.

    The limit is exact for "random" without a change of nodes or ranks: others repeat other numbers of samples.
    """
    nodes, num_canonical = order.initial_physical_nodes or readers.num_nodes, order.num_canonical_nodes
    num_ranks = readers.num_nodes * readers.ranks_per_node
    most = max(num_ranks, nodes * readers.ranks_per_node, order.saved_ranks)
    if order.batching_method == "random":
        num_repeats = -num_samples % num_canonical
        num_repeats += max(-(num_samples + num_repeats) % num_ranks, order.saved_ranks - 1)
        if nodes != readers.num_nodes or order.saved_ranks not in (0, num_ranks):
            num_repeats += most * order.batch_size
    elif order.batching_method == "device_per_stream":  # repeats of each canonical node, and batches of padding
        num_repeats = num_streams * most * (num_canonical + order.batch_size)
    else:
        num_repeats = num_streams * (most + num_canonical - 2)
    if position > num_samples + num_repeats:
        raise ValueError(
            f"Resuming further into the dataset ({position}) than it has samples ({num_samples}): the state is of "
            "another dataset, or damaged: name its dataset, or start the epoch without a state"
        )


# Samples of an epoch


def sampled(order: MosaicOrder, sources: Sequence[StreamSamples], epoch: int) -> tuple[Ids, Ids]:
    """Return the sizes of the pieces of shards taken in an epoch, and the ids of their samples, in stored order."""
    rng = np.random.default_rng(order.shuffle_seed + (epoch if order.sampling_method == "balanced" else 0))
    pieces: list[Ids] = [np.empty(0, np.int64)]
    sizes: list[int] = []
    for source in sources:
        firsts = source.first + np.cumsum(source.sizes) - source.sizes
        counts = _counts(order, source, epoch)
        for first, size, count in zip(firsts.tolist(), source.sizes.tolist(), counts.tolist(), strict=True):
            repeats, rest = divmod(count, size) if size else (0, 0)
            pieces += [np.arange(first, first + size)] * repeats
            sizes += [size] * repeats
            if rest:
                pieces.append(first + np.sort(rng.choice(size, rest, False)))
                sizes.append(rest)
    return np.array(sizes, np.int64), np.concatenate(pieces)


def _counts(order: MosaicOrder, source: StreamSamples, epoch: int) -> Ids:
    """Return the number of samples to take of each shard: full repeats of the stream, then drawn granules."""
    sizes, total = source.sizes, int(source.sizes.sum())
    repeats, rest = divmod(source.choose, total) if total else (0, 0)
    counts = sizes * repeats
    if not rest:
        return counts
    granularity = order.sampling_granularity
    granules = -(-sizes // granularity)
    shards = np.repeat(np.arange(len(sizes)), granules)
    before = granularity * (np.arange(len(shards)) - np.repeat(np.cumsum(granules) - granules, granules))
    drawn = _epoch_rng(order, epoch).permutation(len(shards))
    lengths = np.minimum(granularity, sizes[shards] - before)[drawn]
    taken = np.clip(rest - (np.cumsum(lengths) - lengths), 0, lengths)
    np.add.at(counts, shards[drawn], taken)
    return counts


def _epoch_rng(order: MosaicOrder, epoch: int) -> np.random.Generator:
    return np.random.default_rng(order.shuffle_seed + (epoch if order.epoch_seed_change else 0))


# Numbers among readers


def partitioned(order: MosaicOrder, num_samples: int, readers: Readers, *, batch_size: int, position: int = 0) -> Ids:
    """Return numbers 0 to num_samples - 1 for each reader, in the shape of mosaic_work; some last ones are repeated."""
    nodes, initial, canonical = readers.num_nodes, order.initial_physical_nodes, order.num_canonical_nodes
    if not num_samples:
        raise ValueError("an epoch takes no sample of a stream")
    num_ranks = nodes * readers.ranks_per_node
    if position > num_samples + num_ranks - num_samples % num_ranks:  # MosaicML's rule
        check_position(order, num_samples, readers, position, 1)
    if order.partition_algo == "orig" or initial is None or max(nodes, canonical) % min(nodes, canonical) == 0:
        return _partitioned(num_samples, canonical, readers, batch_size, position)
    if nodes * batch_size % initial:
        raise ValueError(
            f"a global batch of {nodes * readers.ranks_per_node * batch_size} samples is no multiple of the "
            f"{initial * readers.ranks_per_node} ranks that the run began with: keep the global batch size"
        )
    began = readers._replace(num_nodes=initial)
    numbers = _partitioned(num_samples, canonical, began, nodes * batch_size // initial, position)
    return _of_readers(_as_read(numbers), readers, batch_size)


def _partitioned(num_samples: int, num_canonical: int, readers: Readers, batch_size: int, position: int) -> Ids:
    nodes, ranks, workers = readers
    if max(nodes, num_canonical) % min(nodes, num_canonical):
        raise ValueError(
            f"{num_canonical} num_canonical_nodes and {nodes} nodes: one of them must be a multiple of the other"
        )
    numbers = _canonical_rows(num_samples, num_canonical, num_nodes=nodes)
    of_nodes = numbers.T.ravel()[position - position % nodes :].reshape(-1, nodes).T
    rows = np.concatenate([of_nodes, _repeated(of_nodes, ranks)], axis=1).reshape(nodes, -1, ranks)
    padding = np.full((nodes, -rows.shape[1] % (workers * batch_size), ranks), -1)
    of_ranks = np.concatenate([rows, padding], axis=1).transpose(0, 2, 1)
    work: Ids = of_ranks.reshape(nodes, ranks, -1, workers, batch_size).transpose(0, 1, 3, 2, 4)
    return work


def _canonical_rows(num_samples: int, num_canonical: int, *, num_nodes: int) -> Ids:
    """Return the numbers of each canonical node, in rows of equal length: int64[canonical nodes, samples per node]."""
    length = -(-num_samples // num_canonical)
    nodes_each = max(1, num_nodes // num_canonical)  # nodes that share a canonical node
    padding = -length % nodes_each
    if num_samples < num_canonical or (num_samples == num_canonical and num_canonical < num_nodes):
        _warn_of_repeats(num_samples, f"{num_canonical} canonical nodes")
        return np.resize(np.arange(num_samples), (num_canonical, length + padding))
    bounds = np.arange(num_canonical + 1) * num_samples // num_canonical
    rows = bounds[:-1, None] + np.arange(length + padding)
    rows[:, length - 1] -= np.diff(bounds) < length  # shorter rows repeat their last number
    if padding:
        stop = -padding - nodes_each + 1
        rows[:, -padding:] = rows[:, stop - padding : stop]
    return rows


def _repeated(of_nodes: Ids, ranks: int) -> Ids:
    """Return the numbers that a node repeats, for equal counts on all ranks."""
    length = of_nodes.shape[1]
    missing = -length % ranks
    if not missing:
        return of_nodes[:, :0]
    if ranks + missing - 1 <= length:
        return of_nodes[:, length - ranks - missing + 1 : length - ranks + 1]
    _warn_of_repeats(length, f"{ranks} ranks of a node")
    return of_nodes[:, np.arange(missing) % length]


def _warn_of_repeats(num_samples: int, among: str) -> None:
    warnings.warn(
        f"{num_samples} samples for {among}: many are read again, and batching methods may leave out batches: choose "
        "fewer num_canonical_nodes, or add samples",
        stacklevel=2,
    )


def _as_read(work: Ids) -> Ids:
    """Return the ids in the order in which a run reads them."""
    return work.transpose(3, 2, 0, 1, 4).ravel()


def _of_readers(ids: Ids, readers: Readers, batch_size: int) -> Ids:
    """Return ids in the shape of mosaic_work: the inverse of _as_read."""
    nodes, ranks, workers = readers
    return ids.reshape(-1, workers, nodes, ranks, batch_size).transpose(2, 3, 1, 0, 4)


# Batches of streams


def _random(order: MosaicOrder, sources: Sequence[StreamSamples], readers: Readers, epoch: int, position: int) -> Ids:
    """Return batches of samples from all streams."""
    sizes, ids = sampled(order, sources, epoch)
    numbers = partitioned(order, len(ids), readers, batch_size=order.batch_size, position=position)
    return _ids_of(numbers, _shuffled_ids(order, sizes, ids, epoch, order.shuffle_block_size))


def _stratified(order: MosaicOrder, sources: Sequence[StreamSamples], readers: Readers, epoch: int) -> Ids:
    """Return global batches with the same share of each stream."""
    rows = []
    one_node = readers._replace(num_nodes=1)
    for number, portion in enumerate(_portions(order, sources, readers)):
        ids = _as_read(_stream_ids(order, sources[number], one_node, epoch, batch_size=1))
        rows.append(_full(_rows(ids, portion), order, number))
    num_batches = min(map(len, rows))
    return np.concatenate([each[:num_batches] for each in rows], axis=1)


def _portions(order: MosaicOrder, sources: Sequence[StreamSamples], readers: Readers) -> list[int]:
    """Return the samples of each stream in a global batch."""
    num_all = order.batch_size * readers.ranks_per_node * readers.num_nodes
    exact = num_all * np.array([source.proportion for source in sources])
    portions = exact.astype(np.int64)
    portions[np.flip(np.argsort(exact - portions))[: num_all - portions.sum()]] += 1
    if 0 in portions:
        raise ValueError(
            f"stream {portions.tolist().index(0)} has no sample in a global batch of {num_all}: raise the batch size, "
            "or the share of the stream"
        )
    return [int(portion) for portion in portions]


def _per_stream(order: MosaicOrder, sources: Sequence[StreamSamples], readers: Readers, epoch: int) -> Ids:
    """Return global batches of a single stream each."""
    num_all = order.batch_size * readers.ranks_per_node * readers.num_nodes
    ids = [_as_read(_stream_ids(order, source, readers, epoch, batch_size=order.batch_size)) for source in sources]
    rows = [_full(each.reshape(-1, num_all), order, number) for number, each in enumerate(ids)]
    return _taken_in_turn(rows, _epoch_rng(order, epoch))


def _device_per_stream(order: MosaicOrder, sources: Sequence[StreamSamples], readers: Readers, epoch: int) -> Ids:
    """Return batches of a single stream each for every rank."""
    nodes, canonical = readers.num_nodes, order.num_canonical_nodes
    if canonical % nodes:
        raise ValueError(f"{canonical} num_canonical_nodes must be a multiple of the {nodes} nodes")
    if order.shuffle and not all(int(order.shuffle_block_size * source.proportion) for source in sources):
        raise ValueError(
            f"shuffle_block_size {order.shuffle_block_size} is too small for the share of a stream: raise it"
        )
    each_canonical = readers._replace(num_nodes=canonical)
    streams = [_stream_ids(order, source, each_canonical, epoch, batch_size=1) for source in sources]
    of_nodes = [
        [
            _full(_rows(_as_read(ids), order.batch_size), order, number)
            for number, part in enumerate(streams)
            for ids in [part[node * canonical // nodes : (node + 1) * canonical // nodes]]
        ]
        for node in range(nodes)
    ]
    num_ranks = nodes * readers.ranks_per_node
    most = max(sum(map(len, rows)) for rows in of_nodes)
    rng = _epoch_rng(order, epoch)
    batches = [_padded(_taken_in_turn(rows, rng), most + num_ranks - most % num_ranks) for rows in of_nodes]
    return np.stack(batches, axis=1).reshape(-1, num_ranks * order.batch_size)


_METHODS: dict[str, Callable[[MosaicOrder, Sequence[StreamSamples], Readers, int], Ids]] = {
    "stratified": _stratified,
    "per_stream": _per_stream,
    "device_per_stream": _device_per_stream,
}
BATCHING_METHODS = ("random", *_METHODS)


def _shuffled_ids(order: MosaicOrder, sizes: Ids, ids: Ids, epoch: int, block_size: int) -> Ids:
    if not order.shuffle:
        return ids
    nodes, seed = order.num_canonical_nodes, order.shuffle_seed
    return ids[
        shuffled(order.shuffle_algo, sizes, num_canonical_nodes=nodes, seed=seed, epoch=epoch, block_size=block_size)
    ]


def _stream_ids(order: MosaicOrder, source: StreamSamples, readers: Readers, epoch: int, *, batch_size: int) -> Ids:
    """Return the sample ids of a single stream, in the shape of mosaic_work."""
    sizes, ids = sampled(order, [source], epoch)
    numbers = partitioned(order, len(ids), readers, batch_size=batch_size)
    return _ids_of(numbers, _shuffled_ids(order, sizes, ids, epoch, int(order.shuffle_block_size * source.proportion)))


def _ids_of(numbers: Ids, ids: Ids) -> Ids:
    return np.where(numbers == -1, -1, ids[numbers])


def _rows(ids: Ids, length: int) -> Ids:
    rows: Ids = np.concatenate([ids, np.full(-len(ids) % length, -1)]).reshape(-1, length)
    return rows


def _full(rows: Ids, order: MosaicOrder, stream: int) -> Ids:
    """Return the full batches, which come first."""
    full = rows[: np.count_nonzero(rows.min(axis=1) >= 0)]
    if not len(full):
        raise ValueError(f"stream {stream} has too few samples for one batch: add samples, or choose smaller batches")
    if len(full) < len(rows):
        _log.warning("batching_method %s leaves out the last samples of stream %d", order.batching_method, stream)
    return full


def _taken_in_turn(rows: Sequence[Ids], rng: np.random.Generator) -> Ids:
    """Return the batches of all streams, mixed; the batches of each stream stay in order."""
    origins = np.repeat(np.arange(len(rows)), [len(each) for each in rows])
    rng.shuffle(origins)
    mixed = np.empty_like(np.concatenate(rows))
    mixed[np.argsort(origins, kind="stable")] = np.concatenate(rows)
    return mixed


def _padded(rows: Ids, count: int) -> Ids:
    return np.concatenate([rows, np.full((count - len(rows), rows.shape[1]), -1)])


def _dealt(order: MosaicOrder, batches: Ids, readers: Readers, position: int) -> Ids:
    """Return global batches in the shape of mosaic_work, from the first batch that was not read completely."""
    num_read, rest = divmod(position, batches.shape[1])
    if rest:
        method = order.batching_method
        _log.warning("batching_method %s resumes after a whole global batch: %d samples are read again", method, rest)
    left = batches[num_read:]
    return _of_readers(_padded(left, len(left) + -len(left) % readers.workers_per_rank), readers, order.batch_size)


# The shuffles of MosaicML's orders: sizes of pieces of shards -> numbers 0 to n - 1 in a new order.
#
# Generators are called in the same way as in MosaicML's code, which makes the orders equal sample by sample. A
# run has a single order of shards, laid end to end and cut into canonical nodes of equal size. Samples shuffled in an
# epoch stay in their canonical node.

ALGORITHMS = ("py1br", "py1e", "py1s", "py2s", "naive")

Span = tuple[int, int]  # the first number, and the one past the last


def shuffled(algorithm: str, sizes: Ids, *, num_canonical_nodes: int, seed: int, epoch: int, block_size: int) -> Ids:
    """Return the numbers of all pieces, shuffled.

    sizes: int64[num_pieces], each 1 or more. block_size: reach of py1br and py1e. ValueError for settings that
    MosaicML's orders refuse.
    """
    rng = np.random.default_rng(seed + epoch)
    total = int(sizes.sum())
    least = {"py1br": 2, "py1e": 1}.get(algorithm, block_size)
    if block_size < least:
        raise ValueError(f"shuffle_block_size must be at least {least} with {algorithm}, got {block_size}")
    if algorithm == "naive":
        return rng.permutation(total)
    run_rng = np.random.default_rng(seed)
    numbers, spans = (_mixed if algorithm == "py2s" else _in_order)(sizes, run_rng)
    nodes = _cut(spans, total, num_canonical_nodes)
    if algorithm == "py2s":
        return _concatenated([_mixed_node(numbers, node, rng) for node in nodes])
    for node in nodes:
        rng.shuffle(node)
    if algorithm == "py1s":
        return _concatenated([_mixed_spans(node, rng) for node in nodes])
    if algorithm == "py1br":
        staggers = rng.integers(0, int(0.75 * block_size), (num_canonical_nodes,)).tolist()
        return _concatenated([_in_blocks(node, s, rng, block_size) for node, s in zip(nodes, staggers, strict=True)])
    return _concatenated([_spread(node, rng, block_size) for node in nodes])


def _in_order(sizes: Ids, rng: np.random.Generator) -> tuple[Ids, list[Span]]:
    """Return the numbers, and the spans of the pieces in the order of the run."""
    stops = np.cumsum(sizes)
    spans = list(zip((stops - sizes).tolist(), stops.tolist(), strict=True))
    rng.shuffle(spans)
    return np.arange(sizes.sum()), spans


def _mixed(sizes: Ids, rng: np.random.Generator) -> tuple[Ids, list[Span]]:
    """Return the numbers with pieces in the order of the run, each shuffled once for the whole run, and the spans."""
    _, spans = _in_order(sizes, rng)
    stops = np.cumsum([stop - start for start, stop in spans]).tolist()
    return _mixed_spans(spans, rng), list(zip([0, *stops[:-1]], stops, strict=True))


def _cut(spans: Sequence[Span], total: int, num_nodes: int) -> list[list[Span]]:
    """Return spans laid end to end and cut into parts with equal numbers of samples."""
    left = list(reversed(spans))
    nodes: list[list[Span]] = []
    num_laid = 0
    for node in range(1, num_nodes + 1):
        nodes.append([])
        end = total * node // num_nodes
        while num_laid < end:
            start, stop = left.pop()
            middle = min(stop, start + end - num_laid)
            nodes[-1].append((start, middle))
            num_laid += middle - start
            if middle < stop:
                left.append((middle, stop))
    return nodes


def _mixed_node(numbers: Ids, node: list[Span], rng: np.random.Generator) -> Ids:
    rng.shuffle(node)
    return numbers[_mixed_spans(node, rng)]


def _mixed_spans(node: Sequence[Span], rng: np.random.Generator) -> Ids:
    """Return the numbers of each span, shuffled within the span."""
    pieces = [np.arange(start, stop) for start, stop in node]
    for piece in pieces:
        rng.shuffle(piece)
    return _concatenated(pieces)


def _in_blocks(node: Sequence[Span], stagger: int, rng: np.random.Generator, block_size: int) -> Ids:
    """Return the numbers of a canonical node, shuffled within blocks of random sizes.

    As in MosaicML's code, only the second block overlaps the block before, by the stagger. After the last block up to
    `stagger` numbers may keep their order.
    """
    numbers = _concatenated([np.arange(start, stop) for start, stop in node])
    for start, stop in list(_blocks(len(numbers), stagger, rng, block_size)):  # all are drawn before shuffles
        rng.shuffle(numbers[start:stop])
    return numbers


def _blocks(num_samples: int, stagger: int, rng: np.random.Generator, block_size: int) -> Iterator[Span]:
    end = 0
    while end < num_samples:
        size = int(rng.integers(int(0.75 * block_size), int(1.25 * block_size)))
        start, stop = max(end - stagger, 0), min(end + size - stagger, num_samples)
        yield start, stop
        end += stop - start


def _spread(node: Sequence[Span], rng: np.random.Generator, block_size: int) -> Ids:
    """Return the numbers of a canonical node, each moved by a random distance within the reach of its span."""
    numbers = _mixed_spans(node, rng)
    if not len(numbers):
        raise ValueError("a canonical node has no sample: set num_canonical_nodes to at most the number of samples")
    places = np.arange(len(numbers)).astype(np.float64)
    first, is_short = 0, False
    for start, stop in node:
        size = stop - start
        reach = (int(rng.integers(int(0.75 * block_size), int(1.25 * block_size))) - size) / 2
        is_short |= reach < 0
        reach = max(reach, 0)
        low, high = max(-reach, -first), min(reach, len(numbers) - first - size)
        places[first : first + size] += rng.uniform(low=low, high=high, size=size)
        first += size
    if is_short:
        warnings.warn(
            f"shuffle_block_size {block_size} is smaller than some shards, whose samples are not mixed with those of "
            "others: raise it",
            stacklevel=2,
        )
    return numbers[np.argsort(places)]


def _concatenated(pieces: Sequence[Ids]) -> Ids:
    return np.concatenate([np.empty(0, np.int64), *pieces])
