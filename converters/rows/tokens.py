"""Samples of the tokens schema: rows that are tokenized already, and what a processor makes of other samples. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ...processors.base import IGNORED_LABEL, Processor, TokenizeAll, or_error, through
from ...processors.spans import spans_of
from ...types import Sample
from .fields import Fields, unpacked

_LAST_ID = (1 << 31) - 1
_NOTHING_LEARNT = "no token would be learnt: does the chat template mark what the assistant says?"


def read_tokens(fields: Fields) -> dict[str, Any]:
    """input_ids int32[T] and loss_spans int32[k, 2] of a row.

    What is learnt is said by `loss_spans` (half-open, ascending), by `labels` (the ids themselves, IGNORED_LABEL where
    nothing is learnt) or by `loss_mask` (0 or 1 for each token); without them all of it. DataError otherwise.
    """
    ids = _integers(fields, "input_ids", fields.get("input_ids"))
    if not len(ids) or ids.ndim != 1:
        raise DataError(
            f"column 'input_ids' has the shape {ids.shape}, expected a list of ids: correct or remove the row"
        )
    if ids.min() < 0 or ids.max() > _LAST_ID:
        wrong = int(ids.min() if ids.min() < 0 else ids.max())
        raise DataError(f"column 'input_ids' holds {wrong}, a token id is 0 to {_LAST_ID}: tokenize the row again")
    padding = fields.get("attention_mask")
    if padding is not None and not _same_length(fields, "attention_mask", padding, ids).all():
        raise DataError("column 'attention_mask' holds 0, so the row is padded: remove the padding, packs need none")
    return {"input_ids": ids.astype(np.int32), "loss_spans": _loss_spans(fields, ids)}


def to_tokens(samples: Sequence[Sample], processor: Processor) -> list[dict[str, Any] | DataError]:
    """Samples that `processor` reads as tokens samples.

    DataError in the place of one in which no token would be learnt, and of one with model input that a tokens sample
    has no place for.
    """
    if not _tokenizes(type(processor)):
        return [or_error(_as_tokens, sample, processor) for sample in samples]
    tokenize_all: TokenizeAll = processor.tokenize_all  # type: ignore[attr-defined]
    return through(tokenize_all(samples), lambda made: [_stored(*tokens) for tokens in made])


def _stored(ids: NDArray[np.int32], spans: Sequence[tuple[int, int]]) -> dict[str, Any] | DataError:
    if not len(spans):
        return DataError(_NOTHING_LEARNT)
    return {"input_ids": ids, "loss_spans": np.array(spans, np.int32)}


def _as_tokens(sample: Sample, processor: Processor) -> dict[str, Any]:
    processed = processor.process(sample)
    others = sorted(set(processed) - {"input_ids", "labels"})
    if others:
        raise DataError(
            f"a sample of tokens has no place for {', '.join(others)}: convert without --tokenize: the processor "
            "makes them while training"
        )
    ids = np.asarray(processed["input_ids"])
    return {"input_ids": ids.astype(np.int32), "loss_spans": _spans(np.asarray(processed["labels"]) != IGNORED_LABEL)}


@cache
def _tokenizes(kind: type) -> bool:
    """Whether a processor has `tokenize_all` for the `process` that it has: a subclass may have another of these."""
    own = {"process", "tokenize_all"}
    owner = next((each for each in kind.__mro__ if vars(each).keys() & own), object)
    return vars(owner).keys() >= own


def _loss_spans(fields: Fields, ids: NDArray[np.int64]) -> NDArray[np.int32]:
    said = [role for role in ("loss_spans", "labels", "loss_mask") if fields.get(role) is not None]
    if len(said) > 1:
        raise DataError(
            f"columns {' and '.join(said)} all say what is learnt: leave one, and pass --columns {said[-1]}= for others"
        )
    if not said:
        return np.array([[0, len(ids)]], np.int32)
    value = fields.get(said[0])
    if said[0] == "loss_spans":
        return _checked_spans(_integers(fields, "loss_spans", value), len(ids))
    values = _same_length(fields, said[0], value, ids)
    if said[0] == "loss_mask":
        if not np.isin(values, (0, 1)).all():
            raise DataError("column 'loss_mask' must hold 0 and 1 alone: correct the row")
        return _spans(values == 1)
    learnt = values != IGNORED_LABEL
    if (values[learnt] != ids[learnt]).any():
        place = int(np.flatnonzero(learnt & (values != ids))[0])
        raise DataError(
            f"column 'labels' holds {values[place]} at {place}, where 'input_ids' holds {ids[place]}: a label is the "
            f"id in its own place (not shifted), or {IGNORED_LABEL}: correct the row"
        )
    return _spans(learnt)


def _spans(learnt: NDArray[np.bool_]) -> NDArray[np.int32]:
    if not learnt.any():
        raise DataError(_NOTHING_LEARNT)
    return spans_of(learnt)


def _checked_spans(spans: NDArray[np.int64], num_tokens: int) -> NDArray[np.int32]:
    if not spans.size:
        raise DataError("column 'loss_spans' is empty, so nothing would be learnt: complete or remove the row")
    if spans.ndim != 2 or spans.shape[1] != 2:
        raise DataError(
            f"column 'loss_spans' has the shape {spans.shape}, expected pairs [first, stop): correct the row"
        )
    for number, (start, stop) in enumerate(spans.tolist()):
        if not 0 <= start < stop <= num_tokens or (number and start < spans[number - 1, 0]):
            raise DataError(
                f"loss span [{start}, {stop}) lies outside the row's {num_tokens} tokens, or does not ascend: fix it"
            )
    return spans.astype(np.int32)


def _same_length(fields: Fields, role: str, value: Any, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    values = _integers(fields, role, value)
    if values.shape != ids.shape:
        raise DataError(
            f"column {fields.column(role)!r} has {values.size} values for {len(ids)} tokens: correct the row"
        )
    return values


def _integers(fields: Fields, role: str, value: Any) -> NDArray[np.int64]:
    """Integers, or true and false, as an array; DataError for what is neither."""
    column = fields.column(role) or role
    if value is None:
        raise DataError(f"expected token ids in column {column!r}, found null: complete or remove the row")
    value = unpacked(value)
    try:
        array = np.asarray(value) if isinstance(value, (Sequence, np.ndarray)) else None
    except (ValueError, OverflowError):  # lists of several lengths
        array = None
    if array is not None and array.size == 0:
        return array.astype(np.int64)
    if array is None or array.dtype.kind not in "iub" or (array.dtype.kind == "u" and array.max() >= 1 << 63):
        raise DataError(
            f"column {column!r} must hold integers of up to 64 bits, found {str(value)[:80]}: correct the row"
        )
    return array.astype(np.int64)
