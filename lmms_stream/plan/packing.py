"""Fill packs with samples. lengths in order -> [packing] -> packs; integer arithmetic only.

A pack holds whole samples of at most `packing_length` tokens together. PackingConfig chooses the strategy, and the
treatment of samples longer than a pack; the compiled loops release the GIL.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..checks import check_fields, whole_number
from ..errors import ConfigError, PackingError
from .kernels.best_fit import FILLER_SHARE, best_fit, first_fit, next_fit
from .kernels.even_fit import even_fit
from .kernels.window_fit import window_fit


@dataclass(frozen=True, kw_only=True, slots=True)
class PackRange:
    """A sequence of packs.

    sample_ids: int64[num_segments], global sample ids, pack after pack.
    starts: int64[num_segments], first token of each segment in its sample (0 unless samples are split).
    lengths: int64[num_segments], tokens of each segment.
    offsets: int64[num_packs + 1]; pack p holds segments [offsets[p], offsets[p + 1]).
    canonical_nodes: int64[num_packs], canonical node of each pack.
    sources: int64[num_packs], number of each pack's source (0 in a plan of one source).
    patches: int64[num_packs], patches of each pack for its media tower; None if no source has media.
    epochs: int64[num_packs], epoch of each pack in its source; None if unknown.
    repeats: int64[num_segments], times that each sample came earlier in its epoch; None for zeros.
    """

    sample_ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    offsets: NDArray[np.int64]
    canonical_nodes: NDArray[np.int64]
    sources: NDArray[np.int64]
    patches: NDArray[np.int64] | None = None
    epochs: NDArray[np.int64] | None = None
    repeats: NDArray[np.int64] | None = None

    @staticmethod
    def joined(ranges: Sequence[PackRange]) -> PackRange:
        """Return one or more ranges of a plan as one."""
        if len(ranges) == 1:
            return ranges[0]
        names = "sample_ids", "starts", "lengths", "canonical_nodes", "sources"
        columns = {name: np.concatenate([getattr(each, name) for each in ranges]) for name in names}
        patches = [each.patches for each in ranges if each.patches is not None]
        counts = np.concatenate([np.diff(each.offsets) for each in ranges])
        return PackRange(**columns, offsets=ends_of(counts), patches=np.concatenate(patches) if patches else None)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def take(self, numbers: NDArray[np.int64]) -> PackRange:
        """Return packs by their numbers in this range, in the order of the numbers."""
        counts = np.diff(self.offsets)[numbers]
        segments = runs(self.offsets[numbers], counts)
        return PackRange(
            sample_ids=self.sample_ids[segments],
            starts=self.starts[segments],
            lengths=self.lengths[segments],
            offsets=ends_of(counts),
            canonical_nodes=self.canonical_nodes[numbers],
            sources=self.sources[numbers],
            patches=None if self.patches is None else self.patches[numbers],
            epochs=None if self.epochs is None else self.epochs[numbers],
            repeats=None if self.repeats is None else self.repeats[segments],
        )


def no_packs(*, has_media: bool) -> PackRange:
    """Return a range of no packs; with media, patches is an empty array."""
    none = np.empty(0, np.int64)
    return PackRange(
        sample_ids=none,
        starts=none,
        lengths=none,
        offsets=np.zeros(1, np.int64),
        canonical_nodes=none,
        sources=none,
        patches=none if has_media else None,
    )


def ends_of(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the beginning of each of several adjacent runs, and the end of the last run.

    >>> ends_of(np.array([3, 2]))
    array([0, 3, 5])
    """
    ends = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=ends[1:])
    return ends


def runs(begins: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the numbers [begin, begin + count) of each run, run after run.

    >>> runs(np.array([5, 20]), np.array([3, 2]))
    array([ 5,  6,  7, 20, 21])
    """
    ends = np.cumsum(counts)
    numbers: NDArray[np.int64] = np.arange(counts.sum()) + np.repeat(begins - ends + counts, counts)
    return numbers


Overlong = Literal["error", "drop", "truncate", "split", "keep"]

LaterLengths = tuple[tuple[int, int], ...]
STRATEGIES = "best_fit, even_fit, first_fit, next_fit, window_N"
MAX_LENGTH = (1 << 31) - 1  # tokens
MAX_PACKING_LENGTH = 1 << 30  # tokens
_WINDOW_N = re.compile(r"window_([1-9]\d{0,7})")


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingConfig:
    """Settings of packing; see `pack` for the strategies."""

    packing_length: int  # maximum tokens per pack, from step 0 on
    strategy: str = "best_fit"  # one of STRATEGIES (N a number of samples)
    window: int = 16384  # samples that best_fit packs together; more samples make denser packs and read further ahead
    overlong: Overlong = "error"  # treatment of samples longer than a pack; keep: a longer pack with this sample only
    max_samples_per_pack: int | None = None
    later_lengths: LaterLengths = ()  # first step and packing_length of later parts of a run, as ((20000, 32768),)

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "later_lengths", _later_lengths(self.later_lengths))
        for length in self.lengths:
            if not 1 <= length <= MAX_PACKING_LENGTH:
                raise ConfigError(f"packing_length must be from 1 to {MAX_PACKING_LENGTH} tokens, got {length}")
        if not 1 <= self.window <= 1 << 26:
            raise ConfigError(f"window must be from 1 to {1 << 26} samples, got {self.window}")
        if self.strategy not in STRATEGIES.split(", ")[:-1] and not _WINDOW_N.fullmatch(str(self.strategy)):
            raise ConfigError(f"strategy must be one of {STRATEGIES} (as window_1024), got {self.strategy!r}")
        if self.overlong not in get_args(Overlong):
            raise ConfigError(f"overlong must be one of {', '.join(get_args(Overlong))}, got {self.overlong!r}")
        if self.max_samples_per_pack is not None and self.max_samples_per_pack < 1:
            raise ConfigError(f"max_samples_per_pack must be at least 1, got {self.max_samples_per_pack}")

    @property
    def lengths(self) -> list[int]:
        """The packing_lengths in turn."""
        return [self.packing_length, *(length for _, length in self.later_lengths)]

    def length_at(self, step: int) -> int:
        """Return the packing_length of a step."""
        return self.lengths[sum(first <= step for first, _ in self.later_lengths)]

    def of_length(self, packing_length: int) -> PackingConfig:
        """Return the same settings with one packing_length for all steps."""
        return replace(self, packing_length=packing_length, later_lengths=())

    @property
    def description(self) -> dict[str, Any]:
        """Fields that name packs from step 0 on; the cursor of a run keeps later lengths."""
        values = asdict(self)
        del values["later_lengths"]
        return values

    @property
    def is_window_n(self) -> bool:
        return self.strategy.startswith("window_")

    @property
    def samples_at_once(self) -> int | None:
        """Number of samples packed together; None for a whole shuffle block (first_fit)."""
        if self.strategy == "first_fit":
            return None
        return _window_n(self.strategy) if self.is_window_n else self.window

    @property
    def evens(self) -> bool:
        return self.strategy == "even_fit"

    @property
    def counted(self) -> PackingConfig:
        """Settings for equally many packs in less time: best_fit for even_fit."""
        return replace(self, strategy="best_fit") if self.evens else self


def split_lengths(lengths: int | Mapping[int, int]) -> tuple[int, LaterLengths]:
    """Return the packing_length from step 0 on, and the later lengths, of a number or {0: 4096, 20000: 32768}."""
    if not isinstance(lengths, Mapping):
        return whole_number("packing_length", lengths, least=1), ()
    if 0 not in lengths:
        raise ConfigError(f"packing_length by steps must begin at step 0, got {dict(lengths)!r}")
    return lengths[0], tuple((step, length) for step, length in lengths.items() if step != 0)


def _later_lengths(lengths: Any) -> LaterLengths:
    """Return the lengths by step. Lists, as JSON has them, become tuples."""
    try:
        by_step = dict(lengths)
    except (TypeError, ValueError):
        raise ConfigError(f"later_lengths must be pairs like ((20000, 32768),), got {lengths!r}") from None
    first, length = "a first step of packing_length", "packing_length"
    found = (
        (whole_number(first, step, least=1), whole_number(length, each, least=1)) for step, each in by_step.items()
    )
    return tuple(sorted(found))


@dataclass(frozen=True, kw_only=True, slots=True)
class Packs:
    """Packs over positions 0..N-1 of a sequence of lengths.

    order: int32[num_segments]; order[offsets[p]:offsets[p + 1]] are the positions in pack p, each position once (a
    position that was split: once for each of its pieces). offsets: int64[num_packs + 1]. num_tokens: tokens in all
    packs. num_overlong: positions longer than a pack, dropped, truncated, split or kept; num_overlong_media: number of
    these with media, always dropped. pieces: None, or int32[num_segments] when samples were split: piece k of a
    position starts at its token k * packing_length. segments: tokens of the packed segments, and their order in packs.
    """

    order: NDArray[np.int32]
    offsets: NDArray[np.int64]
    num_tokens: int
    num_overlong: int = 0
    num_overlong_media: int = 0
    pieces: NDArray[np.int32] | None = None
    segments: tuple[NDArray[np.int32], NDArray[np.int32]] = (np.empty(0, np.int32), np.empty(0, np.int32))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Tokens of each pack: int32[num_packs]."""
        lengths, order = self.segments
        return np.add.reduceat(lengths[order], self.offsets[:-1]) if len(self) else np.empty(0, np.int32)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSegments:
    """Segments of a sequence of samples, to be packed.

    lengths: int32[num_segments], tokens, each from 1 to packing_length. positions: int32[num_segments], the sample of
    each segment. pieces: None, or int32[num_segments], as in Packs. whole: None, or int32[num_segments], tokens of kept
    segments: a segment longer than a pack counts as a full pack, and has a pack to itself. num_overlong,
    num_overlong_media: as in Packs, if known.
    """

    lengths: NDArray[np.int32]
    positions: NDArray[np.int32]
    pieces: NDArray[np.int32] | None = None
    whole: NDArray[np.int32] | None = None
    num_overlong: int = 0
    num_overlong_media: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenPacks:
    """Open packs waiting for the next window, in the packer's order.

    lengths: int32[num_segments], pack after pack. offsets: int64[num_packs + 1]. firsts: int64[num_packs], the position
    of each pack's first segment in the whole sequence.
    """

    lengths: NDArray[np.int32]
    offsets: NDArray[np.int64]
    firsts: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowPacks:
    """Packs of a window and of the open packs before the window.

    order, offsets: see Packs; positions count the segments of the open packs first, then the window's segments. The
    first num_closed packs are done, the rest waits for the next window. firsts: see OpenPacks, of the waiting packs.
    """

    order: NDArray[np.int32]
    offsets: NDArray[np.int64]
    num_closed: int
    firsts: NDArray[np.int64]


NO_OPEN_PACKS = OpenPacks(lengths=np.empty(0, np.int32), offsets=np.zeros(1, np.int64), firsts=np.empty(0, np.int64))


def pack(
    lengths: NDArray[np.integer[Any]],
    *,
    config: PackingConfig,
    seed: int = 0,
    patches: NDArray[np.integer[Any]] | None = None,
) -> Packs:
    """Return deterministic packs of `lengths` (any integer dtype, tokens, in order), of at most packing_length tokens.

    best_fit works through windows of samples. In a window it places one sample after the other into the fullest pack
    with room; the shortest samples, a fifth of the tokens, wait until the end and fill the gaps in decreasing order.
    Packs with little room left are closed, the rest stays open for another window: the samples of a pack are within two
    windows. window_N has windows of N samples. It packs a window together with the samples of waiting packs, in three
    orders (longest first, the order of best_fit, the given order), and keeps the order with the fewest packs. Packs
    with a sample of the previous window, and packs with little room left, are closed. Both emit packs in hash order
    (`seed`): the number of a pack does not depend on the content. first_fit puts each sample into the oldest pack with
    room; next_fit closes a pack when the next sample does not fit. even_fit exchanges samples between the packs that
    best_fit closes in a window, for similar sums of squared lengths; the number of packs is equal.

    patches: patches of each sample; samples with patches are never cut: every policy but "error" and "keep" drops
    overlong samples with patches.

    Raises PackingError for a length below 1 or above MAX_LENGTH, and with overlong "error" for a length above
    packing_length. With "keep" longer samples have longer packs.
    """
    segments = to_segments(lengths, config=config, patches=patches)
    packs = pack_segments(segments.lengths, config, seed)
    if not segments.num_overlong:
        return packs
    return replace(
        packs,
        num_tokens=packs.num_tokens if segments.whole is None else int(segments.whole.sum(dtype=np.int64)),
        segments=(segments.lengths if segments.whole is None else segments.whole, packs.order),
        order=segments.positions[packs.order],
        num_overlong=segments.num_overlong,
        num_overlong_media=segments.num_overlong_media,
        pieces=None if segments.pieces is None else segments.pieces[packs.order],
    )


def to_segments(
    lengths: NDArray[np.integer[Any]], *, config: PackingConfig, patches: NDArray[np.integer[Any]] | None = None
) -> BlockSegments:
    """Return the segments of samples of these lengths, by the config's policy; raises the errors of `pack`."""
    lengths = np.asarray(lengths)
    if len(lengths) and int(lengths.min()) < 1:
        at = int(lengths.argmin())
        raise PackingError(f"length {lengths[at]} at position {at}: a sample must have at least one token")
    if len(lengths) and int(lengths.max()) > MAX_LENGTH:
        at = int(lengths.argmax())
        raise PackingError(f"length {lengths[at]} at position {at}: a sample may have up to {MAX_LENGTH} tokens")
    tokens = np.ascontiguousarray(lengths, dtype=np.int32)
    num_overlong = int(np.count_nonzero(tokens > config.packing_length))
    if not num_overlong:
        return BlockSegments(lengths=tokens, positions=np.arange(len(tokens), dtype=np.int32))
    if config.overlong == "error":
        raise PackingError(
            f"{num_overlong} of {len(tokens)} samples are longer than packing_length {config.packing_length} (the "
            f"longest has {tokens.max()} tokens): raise packing_length, or set overlong to drop, truncate, split or "
            "keep"
        )
    has_media = None if patches is None or config.overlong == "keep" else np.asarray(patches) > 0
    num_media = 0 if has_media is None else int(np.count_nonzero(has_media & (tokens > config.packing_length)))
    segments = cut_overlong(tokens, config=config, has_media=has_media)
    return replace(segments, num_overlong=num_overlong, num_overlong_media=num_media)


def block_seed(seed: int, *, epoch: int, node: int, block: int) -> int:
    """Return the seed of a shuffle block's packs, of another stream than the block's order (see EpochOrder.block)."""
    return int(np.random.SeedSequence([seed, epoch, node + 1, block, 1]).generate_state(1, np.uint64)[0])


def cut_overlong(
    tokens: NDArray[np.int32], *, config: PackingConfig, has_media: NDArray[np.bool_] | None = None
) -> BlockSegments:
    """Return the segments of samples of these lengths (1 or more), for any policy but "error".

    has_media: mask of samples to drop instead of cut (default: none).
    """
    limit = config.packing_length
    if config.overlong == "keep":
        packed = np.minimum(tokens, np.int32(limit))
        return BlockSegments(lengths=packed, positions=np.arange(len(tokens), dtype=np.int32), whole=tokens)
    if has_media is not None and config.overlong != "drop":
        kept = np.flatnonzero(~has_media | (tokens <= limit)).astype(np.int32)
        if len(kept) < len(tokens):
            segments = cut_overlong(tokens[kept], config=config)
            return replace(segments, positions=kept[segments.positions])
    if config.overlong == "drop":
        kept = np.flatnonzero(tokens <= limit).astype(np.int32)
        return BlockSegments(lengths=tokens[kept], positions=kept)
    positions = np.arange(len(tokens), dtype=np.int32)
    if config.overlong != "split":
        return BlockSegments(lengths=np.minimum(tokens, np.int32(limit)), positions=positions)
    num_pieces = -(-tokens // limit)
    positions = np.repeat(positions, num_pieces)
    first_piece = np.cumsum(num_pieces) - num_pieces
    pieces = (np.arange(len(positions)) - first_piece[positions]).astype(np.int32)
    lengths = np.minimum(tokens[positions] - pieces * np.int32(limit), limit).astype(np.int32)
    return BlockSegments(lengths=lengths, positions=positions, pieces=pieces)


def pack_window(
    lengths: NDArray[np.int32], *, config: PackingConfig, seed: int, waiting: OpenPacks, position: int, last: bool
) -> WindowPacks:
    """Return the packs of the next window of a sequence, equal to the packs by `pack` of the whole sequence.

    lengths: of the window's segments, each from 1 to packing_length; config.samples_at_once segments, or the rest of
    the sequence. waiting: open packs of the previous window. position: position of the window's first segment in the
    sequence. last: whether the sequence ends with the window; then no pack stays open.
    """
    tokens = np.concatenate([waiting.lengths, lengths])
    if config.strategy == "next_fit":
        # The open pack starts at a pack boundary: packing its samples again gives the same pack.
        packs = pack_segments(tokens, config, seed)
        num_closed = len(packs) if last else max(0, len(packs) - 1)
        firsts = packs.offsets[num_closed:-1] + (position - len(waiting.lengths))
        return WindowPacks(order=packs.order, offsets=packs.offsets, num_closed=num_closed, firsts=firsts)
    if config.strategy == "first_fit":
        packs = pack_segments(tokens, config, seed)
        return WindowPacks(order=packs.order, offsets=packs.offsets, num_closed=len(packs), firsts=waiting.firsts)
    order, offsets, firsts = _best_fit(tokens, config, seed, waiting=waiting, position=position, last=last)
    return WindowPacks(order=order, offsets=offsets, num_closed=len(offsets) - 1 - len(firsts), firsts=firsts)


def pack_segments(tokens: NDArray[np.int32], config: PackingConfig, seed: int) -> Packs:
    """Pack lengths of at most packing_length by the strategy of the config."""
    tokens = np.ascontiguousarray(tokens, dtype=np.int32)
    limit, max_samples = config.packing_length, config.max_samples_per_pack or len(tokens) + 1
    if config.strategy == "next_fit":
        order, offsets = next_fit(tokens, limit, max_samples)
    elif config.strategy == "first_fit":
        order, offsets = first_fit(tokens, limit, max_samples)
    else:
        order, offsets, _ = _best_fit(tokens, config, seed, waiting=NO_OPEN_PACKS, position=0, last=True)
    return Packs(order=order, offsets=offsets, num_tokens=int(tokens.sum(dtype=np.int64)), segments=(tokens, order))


def _best_fit(
    tokens: NDArray[np.int32], config: PackingConfig, seed: int, *, waiting: OpenPacks, position: int, last: bool
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """Pack by best_fit, even_fit or window_N; see the kernels."""
    limit, max_samples = config.packing_length, config.max_samples_per_pack or len(tokens) + 1
    packed: tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]
    if config.is_window_n:
        settings = (limit, max_samples, _window_n(config.strategy), seed)
        packed = window_fit(tokens, waiting.firsts, position, last, *settings)
    else:
        rules = (limit, max_samples, config.window, FILLER_SHARE, seed)
        fit = even_fit if config.evens else best_fit
        packed = fit(tokens, waiting.offsets, waiting.firsts, position, last, *rules)
    return packed


def _window_n(strategy: str) -> int:
    return int(strategy.removeprefix("window_"))
