"""Interface of processors: measure a sample cheaply, and make model input of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, ParamSpec, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..types import Columns, PackSegments, Processed, Sample, TokenRows
from .media.types import Memory as Memory

P = ParamSpec("P")
T = TypeVar("T")
U = TypeVar("U")

Tokens = tuple[NDArray[np.int32], list[tuple[int, int]]]

# What a processor may have besides, as `tokenize_all`, where `process` makes nothing but tokens: here they are without
# labels, of several samples at once: input_ids int32[T] and the spans [first, stop) of them that are learnt, ascending
# and apart from each other, or the error that `process` raises. A class that has another `process` needs another
# `tokenize_all` too, or `process` is used.
TokenizeAll = Callable[[Sequence[Sample]], list[Tokens | DataError]]

# What a processor may have besides, as `measure_all`: what `measure` gives of each of several samples, in less time
# than one by one, or the DataError that it raises. A class that has another `measure` or `process` needs another
# `measure_all` too, or `measure` is used.
MeasureAll = Callable[[Sequence[Sample]], list[int | DataError]]


class Measured(NamedTuple):
    """Length of a sample.

    tokens: all, as `measure` gives them; image_tokens, video_tokens, audio_tokens: those of them that stand for media.
    patches: rows of the tower's input, which are its work. num_cut: its media of which not all is read. not_shown: the
    kinds of content that its chat template does not show, as bits of not_shown.KINDS.
    """

    tokens: int
    patches: int = 0
    image_tokens: int = 0
    video_tokens: int = 0
    audio_tokens: int = 0
    num_cut: int = 0
    not_shown: int = 0


AMOUNTS = 6  # fields of Measured that are numbers of something: all but not_shown


def cut_media(num_cut: int) -> str:
    """Message for users about media that are not read whole."""
    return f"{num_cut:,} sounds are longer than the processor reads: it leaves out what comes later"


# What a processor of media has besides, as `measure_media`: the same as `measure` of each of several samples, with what
# their media take, or the DataError that `measure` raises. It is then used instead of `measure` and `measure_all`. A
# class that has another `measure` or `process` needs another `measure_media` too, or `measure` is used, and samples
# count as samples without media.
#
# `measured_columns`, also of a processor of media, are the columns that measuring needs where these are fewer than
# `columns`. FactsMissingError for a sample says that for this one they do not suffice: it is measured again with all.
MeasureMedia = Callable[[Sequence[Sample]], list[Measured | DataError]]


def measured_tokens(measure: MeasureAll | MeasureMedia, sample: Sample) -> int:
    """The tokens of one sample; its DataError is raised."""
    (measured,) = measure([sample])
    if isinstance(measured, DataError):
        raise measured
    return measured if isinstance(measured, int) else measured.tokens


# A processor of chats may also have `not_shown`: for each of several samples, the kinds of content that its chat
# template does not show, as bits of not_shown.KINDS, or the DataError that reading it raises. A class that has another
# `measure` or `process` needs another `not_shown` too, or nothing is counted.
NotShownOf = Callable[[Sequence[Sample]], list[int | DataError]]


class FactsMissingError(DataError):
    """A stored part of a sample lacks the facts that it is measured by, and its bytes are needed instead."""


class SeenMedium(NamedTuple):
    """A medium as a model sees it. spans: of its tokens among input_ids, [first, stop) each.

    pixels: uint8[N, H, W, 3], an image, N frames, or a drawing of a sound; frames: the numbers of these in the video,
    of other media none. heard: what is read of its sound, in words; "" where nothing is.
    """

    kind: str
    spans: Sequence[tuple[int, int]]
    pixels: NDArray[np.uint8]
    frames: Sequence[int]
    heard: str = ""


# What a processor may have besides, as `process_drawn`: what `process` makes, with what is drawn at random for this
# sample in this epoch (flips, crops), by [epoch, sample id] alone. Batches are made with it, so that a run that resumes
# draws the same. A class that has another `process` needs another `process_drawn` too, or `process` is used.
ProcessDrawn = Callable[[Sample, Sequence[int]], Processed]


# What a processor may have besides, as `objective`: the name of the task that its samples are for (train/tasks/
# registry.py), where that is not causal language modelling. A trainer that is given no task takes it.
Compared = Literal["dpo", "kto"]  # of answers: which of two is better, or whether one is good


# What a processor of media may have besides, as `see_media`: the media of a sample in the order of their tokens, for
# people to look at.
SeeMedia = Callable[[Sample], Sequence[SeenMedium]]


# What a processor of media may have besides, as `process_into`: what `process` makes, its large arrays of media in
# memory that it is given, so that a loader worker needs not copy them. A class that has another `process` needs another
# `process_into` too, or `process` is used.
ProcessInto = Callable[[Sample, Memory], Processed]


def or_error(make: Callable[P, T], *args: P.args, **options: P.kwargs) -> T | DataError:
    """Return the result of `make`, or its DataError: with several samples, each has its own."""
    try:
        return make(*args, **options)
    except DataError as error:
        return error


def through(made: Sequence[T | DataError], make: Callable[[list[T]], Iterable[U | DataError]]) -> list[U | DataError]:
    """Call `make` once with all values that are not errors; errors stay at their indices."""
    following = iter(make([each for each in made if not isinstance(each, DataError)]))
    return [each if isinstance(each, DataError) else next(following) for each in made]


@cache
def works_together(kind: type, one: str, several: str) -> bool:
    """Whether a class has the method `several` for the method `one` that it has: a subclass may have replaced `one`,
    or `process`, which both stand for, and not `several`.
    """
    own = {"process", one, several}
    owner = next((each for each in kind.__mro__ if vars(each).keys() & own), object)
    return vars(owner).keys() >= {one, several}


class Processor(Protocol):
    """Anything with these members processes samples; pass it wherever a processor is asked for.

    columns: the dataset columns it needs. schema: the shard schema it reads ("messages", "tokens").
    """

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def schema(self) -> str: ...

    @property
    def description(self) -> Mapping[str, Any]:
        """All that can change a length, as JSON values: class, config, hashes of tokenizer and template."""
        ...

    def measure(self, sample: Sample) -> int:
        """Number of tokens: equals len(process(sample)["input_ids"]), without decoding media."""
        ...

    def process(self, sample: Sample) -> Processed:
        """{"input_ids": int64[T], "labels": int64[T], IGNORED_LABEL where nothing is learnt, …media tensors}.

        Raises DataError for a sample that does not fit.
        """
        ...


def process_sample(processor: Processor, sample: Sample, memory: Memory | None, drawn: Sequence[int]) -> Processed:
    """Process a sample for a batch. memory: for its media. drawn: its epoch and its id."""
    if works_together(type(processor), "process", "process_drawn"):
        process_drawn: ProcessDrawn = processor.process_drawn  # type: ignore[attr-defined]
        return process_drawn(sample, drawn)
    if memory is None or not works_together(type(processor), "process", "process_into"):
        return processor.process(sample)
    process_into: ProcessInto = processor.process_into  # type: ignore[attr-defined]
    return process_into(sample, memory)


def tokenizes_all(processor: Processor) -> bool:
    """Tell whether a processor tokenizes many samples at once; see TokenizeAll."""
    return works_together(type(processor), "process", "tokenize_all")


def process_all(processor: Processor, samples: Sequence[Sample]) -> list[Processed | DataError] | None:
    """Return what `process` gives for each sample, or the DataError that it raises; see tokenizes_all.

    None where another error is raised: `process` of one sample after another raises it for its sample.
    """
    tokenize_all: TokenizeAll = processor.tokenize_all  # type: ignore[attr-defined]
    try:
        found = tokenize_all(samples)
    except Exception:  # noqa: BLE001 - one by one, the sample that causes it raises it again
        return None
    return [each if isinstance(each, DataError) else _processed(*each) for each in found]


def _processed(ids: NDArray[np.int32], spans: Iterable[Sequence[int]]) -> Processed:
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
        """Write segments one after another into rows, which have their tokens in all.

        They are what `process` and `collate` would make. Returns the loss tokens of each segment: int64[num_segments].

        columns: of all shards. addresses: int64[num_segments], where the shard of each segment lies in memory (see
        Shard). Raises SegmentError, also where a sample has other than its expected tokens.
        """
        ...


class SegmentError(DataError):
    """A segment of a pack does not fit; num_tokens: how many its sample has where that is what is wrong."""

    def __init__(self, message: str, *, segment: int, num_tokens: int | None = None):
        super().__init__(message)
        self.segment = segment
        self.num_tokens = num_tokens


def processor_fingerprint(processor: Processor) -> str:
    """The name of the lengths index that this processor measures: a hash of its description."""
    text = json.dumps(processor.description, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


# Tokens that are trained on: as spans [first, stop), as a mask, and as labels.

IGNORED_LABEL = -100  # transformers' and torch's ignore_index


def spans_of(learnt: NDArray[np.bool_]) -> NDArray[np.int32]:
    """The runs of tokens that are learnt: int32[k, 2].

    >>> spans_of(np.array([True, True, False, True])).tolist()
    [[0, 2], [3, 4]]
    """
    padded = np.concatenate([[False], learnt, [False]])
    return np.flatnonzero(padded[1:] != padded[:-1]).reshape(-1, 2).astype(np.int32)


def learnt_of(spans: Iterable[Sequence[int]], num_tokens: int) -> NDArray[np.bool_]:
    """bool[num_tokens], true within the spans."""
    learnt = np.zeros(num_tokens, np.bool_)
    for start, stop in spans:
        learnt[start:stop] = True
    return learnt


def labels_of(input_ids: NDArray[np.int64], spans: Iterable[Sequence[int]]) -> NDArray[np.int64]:
    """int64[T]: the ids within the spans, IGNORED_LABEL elsewhere."""
    labels = np.full_like(input_ids, IGNORED_LABEL)
    for start, stop in spans:
        labels[start:stop] = input_ids[start:stop]
    return labels
