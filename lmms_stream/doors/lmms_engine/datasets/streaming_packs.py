"""Pieces of samples in order -> packs, with a few packs open at a time. Arithmetic only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from ....checks import check_fields
from ....errors import ConfigError

StreamingStrategy = Literal["first_fit", "best_fit", "balanced"]
PACKING_KEYS: Mapping[str, tuple[str, ...]] = {  # strategy -> its keys of packing_kwargs
    "first_fit": (),
    "best_fit": ("num_open_buckets", "fill_threshold"),
    "balanced": ("num_buckets", "fill_threshold", "max_swap_iters", "min_gain"),
}
PACKED_AGAIN = 8  # open packs of best_fit packed again together, starting with the emptiest
MOOT_KEYS = ("fill_threshold", "max_swap_iters", "min_gain")  # keys of balanced without effect


class PieceRef(NamedTuple):
    """Location of a piece of a sample: piece `piece` of the row read as number `row` of a unit.

    file: key of a file. length: tokens.
    """

    file: str
    unit: int
    row: int
    piece: int
    length: int


class SamplePiece(NamedTuple):
    """A piece of a sample. content: material of a pack, not inspected here."""

    ref: PieceRef
    content: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamingPackConfig:
    """Packing of pieces during reading; see StreamingPacker.

    max_open: maximum number of open packs. fill_threshold: share of packing_length from which a pack of best_fit counts
    as full and is emitted first.
    """

    packing_length: int
    strategy: StreamingStrategy = "first_fit"
    max_open: int = 1
    fill_threshold: float = 1.0
    max_samples_per_pack: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.strategy not in get_args(StreamingStrategy):
            raise ConfigError(
                f"packing_strategy must be one of {', '.join(get_args(StreamingStrategy))} for rows that are packed "
                f"during reading, got {self.strategy!r}: choose one, or convert the sources to shards, which support "
                "all strategies"
            )
        if self.packing_length < 1:
            raise ConfigError(f"packing_length must be at least 1 token, got {self.packing_length}")
        if not 1 <= self.max_open <= 1024:
            raise ConfigError(f"open packs (num_open_buckets, num_buckets) must be from 1 to 1024, got {self.max_open}")
        if not 0 < self.fill_threshold <= 1:
            raise ConfigError(f"fill_threshold must be above 0 and at most 1, got {self.fill_threshold}")
        if self.max_samples_per_pack is not None and self.max_samples_per_pack < 1:
            raise ConfigError(f"max_samples_per_pack must be at least 1, got {self.max_samples_per_pack}")

    @staticmethod
    def of(
        strategy: str, *, packing_length: int, options: Mapping[str, Any], max_samples_per_pack: int | None = None
    ) -> StreamingPackConfig:
        """Return a config from LMMS Engine's names and defaults; options: packing_kwargs."""
        known = PACKING_KEYS.get(strategy, ())
        for name, value in options.items():
            if name not in known:
                raise ConfigError(
                    f"packing_kwargs has {name!r}, and {strategy} takes {', '.join(known) or 'none'}: correct it"
                )
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"packing_kwargs.{name} must be a number, got {value!r}")
        buckets = {"best_fit": options.get("num_open_buckets", 4), "balanced": options.get("num_buckets", 8)}
        return StreamingPackConfig(
            packing_length=packing_length,
            strategy=strategy,  # type: ignore[arg-type]
            max_open=int(buckets.get(strategy, 1)),
            fill_threshold=float(options.get("fill_threshold", 1.0 if strategy == "first_fit" else 0.95)),
            max_samples_per_pack=max_samples_per_pack,
        )


@dataclass(slots=True)
class OpenPack:
    """A pack in progress. work: sum of its squared lengths, the cost of attention."""

    pieces: list[SamplePiece] = field(default_factory=list)
    num_tokens: int = 0
    work: int = 0

    def add(self, piece: SamplePiece) -> None:
        self.pieces.append(piece)
        self.num_tokens += piece.ref.length
        self.work += piece.ref.length**2


class StreamingPacker:
    """Packer of pieces in order of arrival.

    first_fit: one open pack, emitted when the next piece does not fit (LMMS Engine's flush when full). best_fit: a
    piece goes to the fullest open pack with room. If no pack has room, up to PACKED_AGAIN open packs are packed again
    in decreasing order, and another pack is opened if the piece still does not fit. Up to max_open open packs may hold
    less than fill_threshold of packing_length, and the same number may hold more and wait for a fitting piece; the
    fullest pack is emitted first. balanced: max_open packs are filled by first_fit, then packed again together: into
    fewer packs if the pieces fit, with about equal cost. All of them except the pack with the fewest tokens are
    emitted; its pieces are packed again with the next group. Therefore there are never more packs than with first_fit.

    Each piece is in an emitted pack or in `open_refs`; after `restore` packing continues unchanged. With balanced, an
    empty pack marks the end of the packs that were packed together: the last of them has the fewest tokens, and the
    packs before it are due.
    """

    def __init__(self, config: StreamingPackConfig):
        self.config = config
        self._open: list[OpenPack] = []

    @property
    def open_refs(self) -> tuple[tuple[PieceRef, ...], ...]:
        """The pieces of open packs, in the order of opening."""
        return tuple(tuple(piece.ref for piece in pack.pieces) for pack in self._open)

    def put(self, piece: SamplePiece) -> Iterator[list[SamplePiece]]:
        """Add a piece; yield packs, each just removed from open_refs.

        A piece longer than packing_length is a separate pack.
        """
        if piece.ref.length > self.config.packing_length:
            yield [piece]
            return
        pack, evicted = self._choose(piece.ref.length), None
        if pack is None and self.config.strategy == "best_fit":
            self._repack()
            pack = self._choose(piece.ref.length)
        if pack is None:
            evicted = self._make_room()
            pack = OpenPack()
            self._open.append(pack)
        pack.add(piece)
        if evicted is not None:
            yield self._take(evicted)
        yield from self.due()

    def flush(self) -> Iterator[list[SamplePiece]]:
        """Yield all open packs."""
        if self.config.strategy == "balanced":
            self._open = self._packed_again()
        while self._open:
            yield self._take(self._open[0])

    def due(self) -> Iterator[list[SamplePiece]]:
        """Yield the packs that are due; a restored pack may be due."""
        while (pack := self._due()) is not None:
            yield self._take(pack)

    def restore(self, packs: Iterable[Sequence[SamplePiece]]) -> None:
        self._open = []
        for pieces in packs:
            pack = OpenPack()
            for piece in pieces:
                pack.add(piece)
            self._open.append(pack)

    @property
    def _num_again(self) -> int:
        """Number of packs packed together, including the empty pack after them."""
        return next((at for at, each in enumerate(self._open, start=1) if not each.pieces), 0)

    def _fits(self, pack: OpenPack, length: int) -> bool:
        limit, most = self.config.packing_length, self.config.max_samples_per_pack
        return pack.num_tokens + length <= limit and (most is None or len(pack.pieces) < most)

    def _choose(self, length: int) -> OpenPack | None:
        if self.config.strategy == "balanced":
            last = self._open[-1] if len(self._open) > self._num_again else None
            return last if last is not None and self._fits(last, length) else None
        fitting = [each for each in self._open if self._fits(each, length)]
        return max(fitting, key=lambda each: each.num_tokens, default=None)

    def _due(self) -> OpenPack | None:
        """Return a pack that is due now; None without a due pack."""
        if self.config.strategy == "balanced":
            return self._open[0] if self._num_again > 2 else None
        for pack in self._open:
            if not self._fits(pack, 1):
                return pack
        full = [each for each in self._open if self._is_full(each)]
        return max(full, key=lambda each: each.num_tokens) if len(full) > self.config.max_open else None

    def _is_full(self, pack: OpenPack) -> bool:
        return pack.num_tokens >= self.config.fill_threshold * self.config.packing_length

    def _make_room(self) -> OpenPack | None:
        """Make room for another open pack; return the pack to emit for it, if any."""
        if self.config.strategy == "balanced":
            if len(self._open) - self._num_again >= self.config.max_open:
                self._open = [*self._packed_again(), OpenPack()]
            return None
        others = [each for each in self._open if not self._is_full(each)]
        return max(others, key=lambda each: each.num_tokens) if len(others) >= self.config.max_open else None

    def _repack(self) -> None:
        """Pack the open packs with the most room again, in decreasing order, unless this takes more packs."""
        chosen = sorted(self._open, key=lambda each: each.num_tokens)[:PACKED_AGAIN]
        packs = self._decreasing(chosen)
        if len(packs) <= len(chosen):
            self._open = [each for each in self._open if all(each is not other for other in chosen)] + packs

    def _decreasing(self, opened: Sequence[OpenPack]) -> list[OpenPack]:
        """Return packs of the pieces of `opened`: longest first, each into the fullest pack with room."""
        packs: list[OpenPack] = []
        for piece in _longest_first(opened):
            fitting = [each for each in packs if self._fits(each, piece.ref.length)]
            if not fitting:
                packs.append(OpenPack())
            max(fitting, key=lambda each: each.num_tokens, default=packs[-1]).add(piece)
        return packs

    def _packed_again(self) -> list[OpenPack]:
        """Return packs of all open pieces, never more than the open packs; the pack with the fewest tokens is last.

        The longest piece goes first, into the pack with the least work and enough room; pieces that fit nowhere make
        the last pack. If they exceed one pack, each piece goes into the fullest pack with room.
        """
        opened = [each for each in self._open if each.pieces]
        packs = self._decreasing(opened)
        if len(packs) > len(opened):
            packs = opened
        even, rest = [OpenPack() for _ in packs[1:]], OpenPack()
        for piece in _longest_first(opened):
            fitting = [each for each in even if self._fits(each, piece.ref.length)]
            if not fitting and not self._fits(rest, piece.ref.length):
                return sorted(packs, key=lambda each: -each.num_tokens)
            min(fitting, key=lambda each: each.work, default=rest).add(piece)
        return [each for each in (*even, rest) if each.pieces]

    def _take(self, pack: OpenPack) -> list[SamplePiece]:
        self._open = [each for each in self._open if each is not pack]
        return pack.pieces


def _longest_first(packs: Iterable[OpenPack]) -> list[SamplePiece]:
    return sorted((piece for pack in packs for piece in pack.pieces), key=lambda piece: -piece.ref.length)
