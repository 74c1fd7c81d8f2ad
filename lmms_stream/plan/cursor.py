"""The position of training: a few integers for any number of ranks, nodes and workers."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, NamedTuple

from ..errors import CursorError, LmmsStreamError

CURSOR_VERSION = 2  # 1: shares began at 0 in each phase of a mixture, and unshuffled order had other canonical nodes
WINDOW_VERSION = 3  # of a cursor inside a window
LENGTHS_VERSION = 4  # of a cursor after a change of packing_length
ACROSS_VERSION = 5  # of a cursor inside a window across sources, also after such a change
TOKENS_VERSION = 6  # of a cursor with turns by tokens, also inside a window and after such a change
TOKENS, EPOCHS = "tokens", "epochs"  # what sources share in turns: tokens by weights, or packs by those of their epochs
MANY_SOURCES = 64  # more sources are written in a packed string
MAX_COUNT = 1 << 40  # steps, epochs and packs of a state; more would overflow
MAX_WINDOW_PACKS = 1 << 28  # more would fill the memory
MAX_PACKED_BYTES = 1 << 28  # maximum text of this string
_OF_PACKED = "packed_sources"  # `order` of packed sources: the string has it
SOURCE = "data"  # name of a run's only source
SEEDED = "the order settings (seed, shuffle, num_canonical_nodes, shuffle_block_size)"
FINGERPRINT_FIELDS = (  # of a plan's fingerprint, between its dashes
    "the plan version (release)",
    "the lengths index (dataset or processor)",
    "the shards (dataset), or the samples of its streams in an epoch",
    SEEDED,
    "the packing settings (packing_length, strategy, window, overlong, max_samples_per_pack)",
    "the random streams (the NumPy that is installed)",
)
_OF_GROWTH = (
    " (a dataset that has grown since, by lmms-stream convert --append, is read as it was with num_parts, and its new "
    "part, parts/…, beside it as a further dataset)"
)


class LengthChange(NamedTuple):
    """A change of packing_length after `packs` packs of an epoch of a source."""

    epoch: int
    packs: int
    length: int


Changes = tuple[LengthChange, ...]


class SourceCursor(NamedTuple):
    """Position in a source: `packs` packs of epoch `epoch` of its plan are consumed.

    plan: fingerprint of the plan. credit: the source's lack of its share in the mixture (below 0: has too much), in
    2**-36 tokens, or 2**-40 packs. changes: former changes of packing_length, each with the epoch and the packs
    consumed before it, and the new length; see changed_plan.py.
    """

    plan: str
    epoch: int = 0
    packs: int = 0
    credit: int = 0
    changes: Changes = ()

    @property
    def place(self) -> tuple[int, int]:
        """Epoch and packs, in the order of reading."""
        return self.epoch, self.packs


class WindowCursor(NamedTuple):
    """Position in a window of `balance`, see windows.py: `num_done` of num_packs packs are consumed.

    step: first step. sources: cursors before this step. global_batch: packs of a step, when the window began.
    linear_cost: see pack_costs. mix: weights and max_epochs of the mixture, as JSON. across_sources: whether packs of
    all sources are sorted together; then `sources` of the Cursor count turns, see windows.py. turns: digest of all
    packs in turn; "" in states of earlier releases.
    """

    step: int
    sources: Mapping[str, SourceCursor]
    global_batch: int
    num_packs: int
    linear_cost: int
    mix: str
    num_done: int = 0
    across_sources: bool = False
    turns: str = ""

    @property
    def num_left(self) -> int:
        return self.num_packs - self.num_done

    @property
    def num_steps(self) -> int:
        return -(-self.num_packs // self.global_batch)

    @property
    def begin(self) -> WindowCursor:
        """The position before the first pack."""
        return self._replace(num_done=0)

    def after(self, num_packs: int) -> WindowCursor | None:
        """Return the position after more packs; None at the end."""
        return self._replace(num_done=self.num_done + num_packs) if num_packs < self.num_left else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """Position of a run. step: number of finished steps. sources: cursor of each source, by name, in their order.

    The order of the sources decides between equal turns. window: None outside of windows. has_order: whether the order
    is known; False for states of earlier releases. shares: TOKENS or EPOCHS; "" in states of earlier releases of
    several sources, whose weights are shares of packs.
    """

    step: int = 0
    sources: Mapping[str, SourceCursor]
    window: WindowCursor | None = None
    has_order: bool = field(default=True, compare=False)
    shares: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle tuples: each step sends a cursor, and dataclasses take several times as long."""
        window = self.window and (*self.window[:1], _tuples(self.window.sources), *self.window[2:])
        return _unpickled, (self.step, _tuples(self.sources), window, self.shares)

    def to_dict(self) -> dict[str, Any]:
        """Return ints and strings, for JSON; see from_dict. More than MANY_SOURCES sources are a packed string.

        A thousand unpacked sources would take 250 KB per stretch of the run in a checkpoint. A list holds the order of
        the sources, because JSON and YAML may sort the keys of objects.
        """
        written = {"version": CURSOR_VERSION, "step": self.step, **_written(self.sources)}
        if self.window is not None:
            window = self.window._asdict() | _written(self.window.sources)
            if "packed_sources" in window:
                del window["sources"]
            for name in ("across_sources", "turns"):
                if not window[name]:
                    del window[name]
            written |= {"version": WINDOW_VERSION, "window": window}
        if any(at.changes for at in self.sources.values()):
            written["version"] = LENGTHS_VERSION
        if self.window is not None and self.window.across_sources:
            written["version"] = ACROSS_VERSION
        if len(self.sources) > 1 and self.shares:  # a source alone takes no turns
            written |= {"version": TOKENS_VERSION if self.shares == TOKENS else written["version"]}
            written["shares"] = self.shares
        return written

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Cursor:
        """Read what to_dict wrote; CursorError for another version or a damaged state."""
        if not isinstance(data, Mapping):
            raise CursorError(f"the saved cursor is damaged ({data!r}): use another checkpoint")
        if "lanes" in data:
            raise CursorError(
                "the saved cursor is one of lanes, and this run takes its packs from a lengths index: "
                "set packing_mode to lanes"
            )
        refuse_state_of_samples(data)
        version = data.get("version")
        of_windows = WINDOW_VERSION, LENGTHS_VERSION, ACROSS_VERSION, TOKENS_VERSION
        is_in_window = version in of_windows and "window" in data
        if not is_in_window and version not in (LENGTHS_VERSION, TOKENS_VERSION):
            check_version(version)
        try:
            shares = data.get("shares", "")
            if shares not in ("", TOKENS, EPOCHS) or (version == TOKENS_VERSION) != (shares == TOKENS):
                raise ValueError(f"sources cannot share {shares!r} in version {version}")
            step, window = checked_count(data["step"]), _read_window(data["window"]) if is_in_window else None
            if window is not None and not bool(window.num_done) <= step - window.step <= window.num_done:
                raise ValueError(f"step {step} is not in the window of step {window.step}")
            return Cursor(step=step, sources=_read(data), window=window, has_order="order" in data, shares=shares)
        except LmmsStreamError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CursorError(f"the saved cursor is damaged ({error!r}): use another checkpoint") from error

    def check_plans(self, fingerprints: Mapping[str, str]) -> None:
        """Raise CursorError, with the differences, if a source follows another plan."""
        for name, built in fingerprints.items():
            saved = self.sources[name].plan if name in self.sources else built
            if saved != built:
                raise CursorError(explain_other_plan(name, saved, built))


def _packed(sources: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the sources as compressed text, field by field: values of a field are similar."""
    fields = next(iter(sources.values()))
    columns = [list(sources), *([at[field] for at in sources.values()] for field in fields)]
    return base64.b64encode(zlib.compress(json.dumps(columns, separators=(",", ":")).encode(), 9)).decode()


def _unpacked(packed: str) -> dict[str, dict[str, Any]]:
    """Return the sources from the text of _packed; ValueError or TypeError for another text."""
    reader = zlib.decompressobj()
    try:
        text = reader.decompress(base64.b64decode(packed, validate=True), MAX_PACKED_BYTES)
    except zlib.error as error:
        raise ValueError(f"packed_sources cannot be read: {error}") from error
    if not reader.eof:
        raise ValueError("packed_sources is cut short, or too long")
    names, *columns = json.loads(text)
    fields = SourceCursor._fields[: max(len(columns), len(SourceCursor._fields) - 1)]
    return {str(name): dict(zip(fields, values, strict=True)) for name, *values in zip(names, *columns, strict=True)}


def _written(sources: Mapping[str, SourceCursor]) -> dict[str, Any]:
    found = {name: at._asdict() for name, at in sources.items()}
    if not any(at.changes for at in sources.values()):
        for each in found.values():
            del each["changes"]
    if len(found) > MANY_SOURCES:
        return {"packed_sources": _packed(found), "order": _OF_PACKED}
    return {"sources": found, **({"order": list(found)} if len(found) > 1 else {})}


def _read(data: Mapping[str, Any]) -> dict[str, SourceCursor]:
    """Return the sources that `_written` wrote."""
    packed = data.get("packed_sources")
    sources = data["sources"] if packed is None else _unpacked(packed)
    if (order := data.get("order", _OF_PACKED)) != _OF_PACKED:
        if sorted(order) != sorted(sources):
            raise ValueError(f"order has {order!r}, and the sources are {sorted(sources)}")
        sources = {name: sources[name] for name in order}
    return {
        str(name): SourceCursor(
            plan=_text(at["plan"]),
            epoch=checked_count(at["epoch"]),
            packs=checked_count(at["packs"]),
            credit=checked_count(at["credit"], 1 << 61, least=-1 << 61),
            changes=_read_changes(at.get("changes", ())),
        )
        for name, at in sources.items()
    }


def _read_changes(changes: Sequence[Sequence[Any]]) -> Changes:
    found = tuple(LengthChange(*map(checked_count, each)) for each in changes)
    if any(each.length < 1 for each in found) or [each[:2] for each in found] != sorted(each[:2] for each in found):
        raise ValueError(f"{changes!r} are no changes of packing_length in turn")
    return found


def _read_window(data: Mapping[str, Any]) -> WindowCursor:
    counts = {
        name: checked_count(data[name]) for name in ("step", "global_batch", "num_packs", "linear_cost", "num_done")
    }
    across_sources = bool(checked_count(data.get("across_sources", False)))
    window = WindowCursor(
        sources=_read(data), mix=_text(data["mix"]), across_sources=across_sources,
        turns=_text(data.get("turns", "")), **counts,
    )  # fmt: skip
    if window.global_batch < 1 or window.num_left < 1 or max(window.num_packs, window.linear_cost) > MAX_WINDOW_PACKS:
        raise ValueError(f"a window of {window.num_packs} packs cannot be at pack {window.num_done}")
    return window


_Tuples = Sequence[tuple[str, tuple[Any, ...]]]


def _tuples(sources: Mapping[str, SourceCursor]) -> _Tuples:
    return [(name, tuple(at)) for name, at in sources.items()]


def _unpickled(step: int, sources: _Tuples, window: tuple[Any, ...] | None, shares: str) -> Cursor:
    found = None if window is None else WindowCursor(window[0], _from_tuples(window[1]), *window[2:])
    return Cursor(step=step, sources=_from_tuples(sources), window=found, shares=shares)


def _from_tuples(sources: _Tuples) -> dict[str, SourceCursor]:
    return {name: SourceCursor(*at) for name, at in sources}


def refuse_state_of_samples(data: Mapping[str, Any]) -> None:
    """Raise CursorError for a state of a StreamingDataLoader."""
    if "sample_in_epoch" in data:
        raise CursorError(
            "the saved state is of a StreamingDataLoader, at a sample of its epoch, and packs have another order: read "
            "the epoch to its end with StreamingDataLoader, and begin the next epoch with packs, without a state"
        )


def check_version(version: Any) -> None:
    """Raise CursorError for a cursor of a release with other packs."""
    if version is True or version != CURSOR_VERSION:
        raise CursorError(
            f"the saved cursor has version {version!r}, this release reads {CURSOR_VERSION}, with different packs: "
            "finish the run with the release that wrote the cursor, or start the data over (train.resume never, in "
            "another output_dir)"
        )


def differing_fields(one: str, other: str) -> str:
    """Return the names of the settings in which two fingerprints of plans differ."""
    hashes = one.split("-"), other.split("-")
    if not len(hashes[0]) == len(hashes[1]) == len(FINGERPRINT_FIELDS):
        return "everything"
    return " and ".join(field for field, a, b in zip(FINGERPRINT_FIELDS, *hashes, strict=True) if a != b)


def explain_other_plan(name: str, saved: str, built: str) -> str:
    """Return the message for a cursor of another plan: the differences, and the remedy."""
    difference = differing_fields(saved, built)
    return (
        f"the checkpoint follows plan {saved} of {name!r}, this run built {built}: they differ in "
        f"{difference}; restore that, or start over in another output_dir{_OF_GROWTH if 'shards' in difference else ''}"
    )


def checked_count(value: Any, largest: int = MAX_COUNT, *, least: int = 0) -> int:
    number = index(value)
    if not least <= number <= largest:
        raise ValueError(f"{number} is out of range")
    return number


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value
