"""Pieces of samples, one after another -> packs, with a few packs open at a time. Arithmetic only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from ..checks import check_fields
from ..errors import ConfigError

StreamingStrategy = Literal["first_fit", "best_fit", "balanced"]
PACKING_KEYS: Mapping[str, tuple[str, ...]] = {  # strategy -> its keys of packing_kwargs
    "first_fit": (),
    "best_fit": ("num_open_buckets", "fill_threshold"),
    "balanced": ("num_buckets", "fill_threshold"),
}


class PieceRef(NamedTuple):
    """Where a piece of a sample is read: piece number `piece` of the row that is read as number `row` of a unit.

    file: the key of a file. length: its tokens.
    """

    file: str
    unit: int
    row: int
    piece: int
    length: int


class Piece(NamedTuple):
    """content: what a pack is made of, which is not looked at here."""

    ref: PieceRef
    content: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamingPackConfig:
    """How pieces are packed while they pass; see StreamingPacker.

    max_open: packs that are open at once. fill_threshold: the share of packing_length from which a pack is given out.
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
                f"packing_strategy must be one of {', '.join(get_args(StreamingStrategy))} where rows are packed while "
                f"they are read, got {self.strategy!r}: choose one, or convert the sources to shards, whose packs may "
                "be of the others"
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
        """With LMMS Engine's names and defaults; options: packing_kwargs."""
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
    """work: the sum of the squares of its lengths, as attention has it."""

    pieces: list[Piece] = field(default_factory=list)
    num_tokens: int = 0
    work: int = 0

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.num_tokens += piece.ref.length
        self.work += piece.ref.length**2


class StreamingPacker:
    """Packs pieces in the order in which they come.

    first_fit: one pack is open, and given out when the next piece does not fit (LMMS Engine's flush when full).
    best_fit: a piece goes to the fullest open pack that has room. balanced: to the one with the least work that has
    room, so that packs cost about the same. Where none has room another is opened, and if max_open are open, the
    fullest is given out first. A pack is given out as soon as it holds fill_threshold of the packing_length.

    What was put is in a pack that was given out, or in `open_refs`; after `restore` packing goes on as if it had not
    been ended.
    """

    def __init__(self, config: StreamingPackConfig):
        self.config = config
        self._open: list[OpenPack] = []

    @property
    def open_refs(self) -> tuple[tuple[PieceRef, ...], ...]:
        """The pieces of packs that were not given out, in the order in which these were opened."""
        return tuple(tuple(piece.ref for piece in pack.pieces) for pack in self._open)

    def put(self, piece: Piece) -> Iterator[list[Piece]]:
        """Take a piece, of packing_length at most; gives packs, each of which left open_refs just before."""
        pack = self._choose(piece.ref.length)
        evicted = None
        if pack is None:
            if len(self._open) >= self.config.max_open:
                evicted = max(self._open, key=lambda each: each.num_tokens)
            pack = OpenPack()
            self._open.append(pack)
        pack.add(piece)
        if evicted is not None:
            yield self._take(evicted)
        if self._is_full(pack):
            yield self._take(pack)

    def flush(self) -> Iterator[list[Piece]]:
        """Give out all that is open."""
        while self._open:
            yield self._take(self._open[0])

    def due(self) -> Iterator[list[Piece]]:
        """Give out what is full, which a pack may be that was restored."""
        for pack in [each for each in self._open if self._is_full(each)]:
            yield self._take(pack)

    def restore(self, packs: Iterable[Sequence[Piece]]) -> None:
        self._open = []
        for pieces in packs:
            pack = OpenPack()
            for piece in pieces:
                pack.add(piece)
            self._open.append(pack)

    def _choose(self, length: int) -> OpenPack | None:
        limit, most = self.config.packing_length, self.config.max_samples_per_pack
        fitting = [
            each
            for each in self._open
            if each.num_tokens + length <= limit and (most is None or len(each.pieces) < most)
        ]
        if self.config.strategy == "balanced":
            if len(self._open) < self.config.max_open:
                return None  # first all are opened
            return min(fitting, key=lambda each: each.work, default=None)
        return max(fitting, key=lambda each: each.num_tokens, default=None)

    def _is_full(self, pack: OpenPack) -> bool:
        most = self.config.max_samples_per_pack
        is_filled = pack.num_tokens >= self.config.fill_threshold * self.config.packing_length
        return is_filled or (most is not None and len(pack.pieces) >= most)

    def _take(self, pack: OpenPack) -> list[Piece]:
        self._open = [each for each in self._open if each is not pack]
        return pack.pieces
