"""Interface of processors: measure a sample cheaply, and make model input."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Literal, NamedTuple, ParamSpec, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..types import Columns, PackSegments, Processed, Sample, TokenRows
from ..version import VERSION
from .media.types import Memory as Memory

P = ParamSpec("P")
T = TypeVar("T")
U = TypeVar("U")

Tokens = tuple[NDArray[np.int32], list[tuple[int, int]]]

# Optional method `tokenize_all` of a processor whose `process` makes only tokens: tokenize several samples at once.
# Each result is input_ids int32[T] and the spans [first, stop) that are trained on, ascending and apart from each
# other, or the error that `process` raises. A class with another `process` needs another `tokenize_all` too; otherwise
# `process` is used.
TokenizeAll = Callable[[Sequence[Sample]], list[Tokens | DataError]]

# Optional method `measure_all` of a processor: the results of `measure` for several samples, or its DataErrors, in less
# time than one by one. A class with another `measure` or `process` needs another `measure_all` too; otherwise `measure`
# is used.
MeasureAll = Callable[[Sequence[Sample]], list[int | DataError]]


class Measured(NamedTuple):
    """Length of a sample.

    tokens: all, equal to the result of `measure`; image_tokens, video_tokens, audio_tokens: tokens of media. patches:
    rows of the tower's input, a measure of its work. num_cut: number of media read only in part. not_shown: the kinds
    of content that the chat template does not show, as bits of not_shown.KINDS.
    """

    tokens: int
    patches: int = 0
    image_tokens: int = 0
    video_tokens: int = 0
    audio_tokens: int = 0
    num_cut: int = 0
    not_shown: int = 0


AMOUNTS = 6  # fields of Measured with amounts: all but not_shown


def cut_media(num_cut: int) -> str:
    """Message for users about media that are read only in part."""
    return f"{num_cut:,} sounds are longer than the processor reads: it leaves out what comes later"


# Optional method `measure_media` of a processor of media: lengths of several samples with the amounts of their media,
# or the DataError that `measure` raises. It replaces `measure` and `measure_all`. A class with another `measure` or
# `process` needs another `measure_media` too; otherwise `measure` is used, and samples count as samples without media.
#
# Optional `measured_columns`, also of a processor of media: the columns that measuring needs, if fewer than `columns`.
# FactsMissingError for a sample means that these columns do not suffice: the sample is measured again with all columns.
MeasureMedia = Callable[[Sequence[Sample]], list[Measured | DataError]]


def measured_tokens(measure: MeasureAll | MeasureMedia, sample: Sample) -> int:
    """Return the tokens of one sample, or raise its DataError."""
    (measured,) = measure([sample])
    if isinstance(measured, DataError):
        raise measured
    return measured if isinstance(measured, int) else measured.tokens


# Optional method `not_shown` of a processor of chats: for each of several samples, the kinds of content that its chat
# template does not show, and other faults, as bits of not_shown.KINDS, or the DataError raised while reading. A class
# with another `measure` or `process` needs another `not_shown` too; otherwise nothing is counted.
NotShownOf = Callable[[Sequence[Sample]], list[int | DataError]]


# Optional method `measure_shown` of a processor with `not_shown`: the lengths of several samples with their content
# that is not shown, or the DataErrors of `measure`, from one reading of each sample. A class with another `measure` or
# `process` needs another `measure_shown` too; otherwise `measure` and `not_shown` are used.
MeasureShown = Callable[[Sequence[Sample]], list[Measured | DataError]]


# Optional method `first_changed` of a processor of chats: for each of several samples, the first answer whose text, or
# whose context, is changed by later messages (see Conversations), None without a change, or the DataError of reading.
FirstChanged = Callable[[Sequence[Sample]], list[int | DataError | None]]


class MediaWithoutTokensError(DataError):
    """A sample has media without a placeholder in its text."""


class TokensWithoutMediaError(DataError):
    """The text of a sample has placeholders, or tokens reserved for media, without media."""


class FactsMissingError(DataError):
    """A stored part of a sample lacks the facts for measuring; its bytes are needed instead."""


class SeenMedium(NamedTuple):
    """A medium as a model sees it. spans: of its tokens among input_ids, [first, stop) each.

    pixels: uint8[N, H, W, 3], an image, N frames, or a drawing of a sound; frames: frame numbers in the video, empty
    for other media. heard: description of the sound that is read, "" without a sound.
    """

    kind: str
    spans: Sequence[tuple[int, int]]
    pixels: NDArray[np.uint8]
    frames: Sequence[int]
    heard: str = ""


# Optional method `process_drawn` of a processor: the result of `process` with random changes (flips, crops), drawn only
# by [epoch, sample id], or [epoch, sample id, n] for repeat n in an epoch. Batches use it, and a resumed run draws the
# same values. A class with another `process` needs another `process_drawn` too; otherwise `process` is used.
ProcessDrawn = Callable[[Sample, Sequence[int]], Processed]


# Optional attribute `objective` of a processor: the name of the samples' task (train/tasks/registry.py), if other than
# causal language modelling. A trainer without a given task uses it.
Compared = Literal["dpo", "kto"]  # of answers: the better of two, or whether an answer is good


# Optional attribute `gives_sequences` of a processor: whether its samples may have several sequences (see Batch).


# Optional method `see_media` of a processor of media: the media of a sample in the order of their tokens, for people to
# look at.
SeeMedia = Callable[[Sample], Sequence[SeenMedium]]


# Optional method `process_into` of a processor of media: the result of `process`, with large arrays of media in given
# memory, to save a loader worker a copy. A class with another `process` needs another `process_into` too; otherwise
# `process` is used.
ProcessInto = Callable[[Sample, Memory], Processed]


def or_error(make: Callable[P, T], *args: P.args, **options: P.kwargs) -> T | DataError:
    """Return the result of `make`, or its DataError: each of several samples has its own."""
    try:
        return make(*args, **options)
    except DataError as error:
        return error
    except RecursionError as error:
        return DataError(f"its values are nested too deep ({error}): flatten them, or remove the sample")


def through(made: Sequence[T | DataError], make: Callable[[list[T]], Iterable[U | DataError]]) -> list[U | DataError]:
    """Call `make` once with all values that are not errors; errors stay at their indices."""
    following = iter(make([each for each in made if not isinstance(each, DataError)]))
    return [each if isinstance(each, DataError) else next(following) for each in made]


@cache
def works_together(kind: type, one: str, several: str) -> bool:
    """Return whether a class's method `several` matches its method `one`. A subclass may have replaced `one`, or
    `process`, which both stand for, but not `several`.
    """
    own = {"process", one, several}
    owner = next((each for each in kind.__mro__ if vars(each).keys() & own), object)
    return vars(owner).keys() >= {one, several}


class Processor(Protocol):
    """Interface of processors: any object with these members can be passed as a processor.

    columns: dataset columns that the processor needs. schema: the shard schema that it reads ("messages", "tokens").
    """

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def schema(self) -> str: ...

    @property
    def description(self) -> Mapping[str, Any]:
        """All settings that can change a length, as JSON values: class, config, hashes of tokenizer and template."""
        ...

    def measure(self, sample: Sample) -> int:
        """Number of tokens: equals len(process(sample)["input_ids"]), without decoding media."""
        ...

    def process(self, sample: Sample) -> Processed:
        """{"input_ids": int64[T], "labels": int64[T], IGNORED_LABEL for tokens not trained on, …media tensors}.

        Raises DataError for a sample that does not fit.
        """
        ...


def process_sample(processor: Processor, sample: Sample, memory: Memory | None, drawn: Sequence[int]) -> Processed:
    """Process a sample for a batch. memory: for its media. drawn: see ProcessDrawn."""
    if works_together(type(processor), "process", "process_drawn"):
        process_drawn: ProcessDrawn = processor.process_drawn  # type: ignore[attr-defined]
        return process_drawn(sample, drawn)
    if memory is None or not works_together(type(processor), "process", "process_into"):
        return processor.process(sample)
    process_into: ProcessInto = processor.process_into  # type: ignore[attr-defined]
    return process_into(sample, memory)


def tokenizes_all(processor: Processor) -> bool:
    """Return whether a processor tokenizes many samples at once; see TokenizeAll."""
    return works_together(type(processor), "process", "tokenize_all")


def process_all(processor: Processor, samples: Sequence[Sample]) -> list[Processed | DataError] | None:
    """Return the result of `process` for each sample, or its DataError; see tokenizes_all.

    Return None if another error is raised: `process` raises it again for its sample, one sample after another.
    """
    tokenize_all: TokenizeAll = processor.tokenize_all  # type: ignore[attr-defined]
    try:
        found = tokenize_all(samples)
    except Exception:  # noqa: BLE001 - the failing sample raises the error again, one by one
        return None
    return [each if isinstance(each, DataError) else processed_of(*each) for each in found]


def processed_of(ids: NDArray[np.int32], spans: Iterable[Sequence[int]]) -> Processed:
    """Return a sample of only tokens. spans: of tokens that are trained on."""
    input_ids = ids.astype(np.int64)
    return {"input_ids": input_ids, "labels": labels_of(input_ids, spans)}


@runtime_checkable
class PackFiller(Protocol):
    """Optional interface of a processor: make packs from memory-mapped shards, without single samples."""

    def fill_packs(
        self,
        columns: Columns,
        addresses: NDArray[np.int64],
        segments: PackSegments,
        rows: TokenRows,
    ) -> NDArray[np.int64]:
        """Write segments one after another into rows; the rows have room for exactly their tokens.

        The rows equal the results of `process` and `collate`. Returns the loss tokens of each segment:
        int64[num_segments].

        columns: of all shards. addresses: int64[num_segments], memory address of each segment's shard (see Shard).
        Raises SegmentError, also for a sample whose number of tokens differs from the expected number.
        """
        ...


class SegmentError(DataError):
    """A segment of a pack does not fit. num_tokens: the sample's number of tokens, if this number is wrong."""

    def __init__(self, message: str, *, segment: int, num_tokens: int | None = None):
        super().__init__(message)
        self.segment = segment
        self.num_tokens = num_tokens


def processor_fingerprint(processor: Processor) -> str:
    """Name of the lengths index that this processor measures: a hash of its description."""
    text = json.dumps(processor.description, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


# Tokens that are trained on: spans [first, stop), a mask, or labels.

IGNORED_LABEL = -100  # transformers' and torch's ignore_index


def spans_of(learnt: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Runs of tokens that are trained on: int32[k, 2].

    >>> spans_of(np.array([True, True, False, True])).tolist()
    [[0, 2], [3, 4]]
    """
    padded = np.concatenate([[False], learnt, [False]])
    return np.flatnonzero(padded[1:] != padded[:-1]).reshape(-1, 2).astype(np.int32)


def learnt_of(spans: Iterable[Sequence[int]], num_tokens: int) -> NDArray[np.bool_]:
    """Mask of tokens, true within the spans: bool[num_tokens]."""
    learnt = np.zeros(num_tokens, np.bool_)
    for start, stop in spans:
        learnt[start:stop] = True
    return learnt


def labels_of(input_ids: NDArray[np.int64], spans: Iterable[Sequence[int]]) -> NDArray[np.int64]:
    """Labels: the ids within the spans, IGNORED_LABEL elsewhere; int64[T]."""
    labels = np.full_like(input_ids, IGNORED_LABEL)
    for start, stop in spans:
        labels[start:stop] = input_ids[start:stop]
    return labels


# Results of long tests, kept in this user's cache folder: JSON files, found by a description of all that matters.


def read_kept(kind: str, described: Mapping[str, Any]) -> Any:
    """Return the kept result with this description, as JSON values; None without a readable file of the description.

    kind: name of the folder. described: JSON values; the result must depend on nothing else.
    """
    with suppress(OSError, ValueError, RuntimeError):  # RuntimeError: a user without a home
        found = json.loads(_kept_at(kind, described).read_text(encoding="utf-8"))
        if isinstance(found, dict) and found.get("described") == json.loads(json.dumps(described)):
            return found.get("result")
    return None


def keep(kind: str, described: Mapping[str, Any], result: Any) -> None:
    """Write a result, if the cache folder is writable. The write is atomic: other processes see all or nothing."""
    with suppress(OSError, RuntimeError):
        file = _kept_at(kind, described)
        file.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as written:
            json.dump({"described": described, "result": result}, written)
        Path(written.name).replace(file)


def code_and_packages(folder: Path, classes: Iterable[type], packages: Iterable[str]) -> dict[str, Any]:
    """Return a description of code: of a folder, of classes with their base classes, and of packages by version."""
    modules = {sys.modules.get(each.__module__) for kind in classes for each in kind.__mro__}
    own = frozenset(Path(file) for each in modules if (file := getattr(each, "__file__", None)))
    return {
        "lmms_stream": [VERSION, _digest_of_code(folder, own)],
        "packages": {name: _version(name) for name in packages},
    }


@cache
def _digest_of_code(folder: Path, others: frozenset[Path]) -> str:
    files = sorted({*folder.rglob("*.py"), *(file for file in others if file.suffix == ".py")})
    return hashlib.blake2b(b"".join(file.read_bytes() for file in files), digest_size=16).hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _kept_at(kind: str, described: Mapping[str, Any]) -> Path:
    key = hashlib.blake2b(json.dumps(described, sort_keys=True).encode(), digest_size=16).hexdigest()
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return base / "lmms_stream" / kind / f"{key}.json"
