"""Rows of token ids, and their tokens to train on. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ...processors.base import IGNORED_LABEL, Processor, TokenizeAll, or_error, spans_of, through, tokenizes_all
from ...types import Sample
from . import schemas
from .fields import Fields, named_alike, unpacked
from .references import SampleMedia
from .row_kind import ReadOptions, RowKind

NOTHING_LEARNT = "no token would be learnt: does the chat template mark what the assistant says?"
NO_SPANS = np.array([[0, 1]], np.int32)  # MDS has no empty arrays, and nothing predicts the first token of a sample
_LAST_ID = (1 << 31) - 1
_LARGE_VOCABULARY = 1 << 19
_TYPES_OF_BYTES = ("float64", ">i8", "float32", "int32", ">i4", "uint16", ">u2")  # NumPy's names


def _read_tokens(fields: Fields, options: ReadOptions, media: SampleMedia) -> dict[str, Any]:
    """Return input_ids int32[T] and loss_spans int32[k, 2] of a row.

    The tokens to train on come from `loss_spans` (half-open, ascending), `labels` (the ids, or IGNORED_LABEL outside of
    the loss) or `loss_mask` (0 or 1 per token); by default all tokens. DataError otherwise.
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
    if padding is not None:
        mask = _same_length(fields, "attention_mask", padding, ids)
        if not mask.all():
            raise DataError(
                "column 'attention_mask' holds 0, so the row is padded: remove the padding, which packs do not need"
            )
        if (mask != mask[0]).any():
            raise DataError(
                f"column 'attention_mask' numbers the samples of a pack ({mask.min()} to {mask.max()}), which would be "
                "read as a single sample: make a row of each sample, or pass --columns attention_mask= to leave the "
                "column out"
            )
    return {"input_ids": ids.astype(np.int32), "loss_spans": _loss_spans(fields, ids)}


def _loss_spans(fields: Fields, ids: NDArray[np.int64]) -> NDArray[np.int32]:
    said = [role for role in ("loss_spans", "labels", "loss_mask") if fields.get(role) is not None]
    if len(said) > 1:
        raise DataError(
            f"columns {' and '.join(str(fields.column(role)) for role in said)} all mark the tokens to train on: keep "
            f"one, and pass --columns {said[-1]}= for the others"
        )
    if not said:
        return np.array([[0, len(ids)]], np.int32)
    value = fields.get(said[0])
    if said[0] == "loss_spans":
        return checked_spans(_integers(fields, "loss_spans", value), len(ids))
    values = _same_length(fields, said[0], value, ids)
    if said[0] == "loss_mask":
        if not np.isin(values, (0, 1)).all():
            raise DataError(f"column {fields.column('loss_mask')!r} must hold 0 and 1 alone: correct the row")
        return learnt_spans(values == 1)
    learnt = values != IGNORED_LABEL
    if (values[learnt] != ids[learnt]).any():
        index = int(np.flatnonzero(learnt & (values != ids))[0])
        raise DataError(
            f"column 'labels' holds {values[index]} at {index}, where 'input_ids' holds {ids[index]}: a label is the "
            f"id at its own index (not shifted), or {IGNORED_LABEL}: correct the row"
        )
    return learnt_spans(learnt)


def learnt_spans(learnt: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return the spans of the tokens to train on, int32[k, 2]; DataError for none."""
    if not learnt.any():
        raise DataError(NOTHING_LEARNT)
    return spans_of(learnt)


def checked_spans(spans: NDArray[np.int64], num_tokens: int) -> NDArray[np.int32]:
    """Return the spans of a row, int32[k, 2]; DataError for spans outside of num_tokens or not ascending."""
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
    """Return integers or booleans in an array; DataError for other values."""
    column = fields.column(role) or role
    if value is None:
        raise DataError(f"expected token ids in column {column!r}, found null: complete or remove the row")
    value = _from_bytes(column, value) if isinstance(value, bytes) else unpacked(value)
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


def _from_bytes(column: str, data: bytes) -> NDArray[np.int64]:
    """Return the numbers of bytes in llm-foundry's default format: int64, little-endian.

    DataError for bytes of another type, recognised by numbers that are neither token ids nor labels.
    """
    numbers = np.frombuffer(data, "<i8") if len(data) % 8 == 0 else np.array([-1])
    if _may_be_ids(numbers, _LAST_ID):
        return numbers
    raise DataError(
        f"column {column!r} holds bytes, which are read as int64 (llm-foundry's token_encoding_type), and are "
        f"{_first_numbers(numbers) if len(data) % 8 == 0 else f'{len(data)} bytes, not 8 for each'}: no token ids. "
        f"{_readings(data)} decode them by the type that they were written with, with --map, by row | "
        f"{{{column!r}: numpy.frombuffer(row[{column!r}], TYPE).astype(int)}}"
    )


def _may_be_ids(numbers: NDArray[Any], last_id: int) -> bool:
    """Return whether numbers are whole, and each is a token id of at most `last_id` or IGNORED_LABEL."""
    with np.errstate(invalid="ignore"):  # bytes read as floats may be NaN
        is_id = (numbers >= 0) & (numbers <= last_id) & (numbers == np.floor(numbers))
    return bool(np.all(is_id | (numbers == IGNORED_LABEL)))


def _readings(data: bytes) -> str:
    """Return a sentence with the ids of bytes in each type that fits: bytes do not hold their type."""
    fitting = []
    for name in _TYPES_OF_BYTES:
        numbers = np.frombuffer(data, name) if len(data) % np.dtype(name).itemsize == 0 else np.array([-1])
        if _may_be_ids(numbers, _LARGE_VOCABULARY):
            fitting.append(f"as {name!r} {_first_numbers(numbers)}")
    return f"They may be ids {', '.join(fitting)}:" if fitting else "They are no ids in any usual type either:"


def _first_numbers(numbers: NDArray[Any]) -> str:
    shown = ", ".join(f"{number:.6g}" if numbers.dtype.kind == "f" else str(number) for number in numbers[:3].tolist())
    return f"[{shown}{', …' if len(numbers) > 3 else ''}]"


TOKENS = RowKind(
    name="tokens",
    needs=named_alike("input_ids"),
    may={
        **named_alike("labels", "loss_spans", "attention_mask"),
        "loss_mask": ("loss_mask", "completion_mask", "assistant_masks"),  # the other names are TRL's
    },
    schema=schemas.TOKENS,
    read=_read_tokens,
)


# Samples -> samples of the tokens schema, by a processor, while they are converted. Pure.


def to_tokens(
    samples: Sequence[Sample], processor: Processor, *, keep_masked: bool = False
) -> list[dict[str, Any] | DataError]:
    """Return samples for `processor` in the tokens schema.

    A DataError replaces a sample with model input that the schema lacks, and, without keep_masked, a sample without
    tokens to train on.
    """
    if not tokenizes_all(processor):
        return [or_error(_as_tokens, sample, processor, keep_masked=keep_masked) for sample in samples]
    tokenize_all: TokenizeAll = processor.tokenize_all  # type: ignore[attr-defined]
    return through(tokenize_all(samples), lambda made: [_stored(*tokens, keep_masked=keep_masked) for tokens in made])


def _stored(
    ids: NDArray[np.int32], spans: Sequence[tuple[int, int]], *, keep_masked: bool
) -> dict[str, Any] | DataError:
    if not len(spans) and not keep_masked:
        return DataError(f"{NOTHING_LEARNT} (--on-dropped warn stores such samples)")
    return {"input_ids": ids, "loss_spans": np.array(spans, np.int32) if len(spans) else NO_SPANS}


def _as_tokens(sample: Sample, processor: Processor, *, keep_masked: bool) -> dict[str, Any]:
    processed = processor.process(sample)
    others = sorted(set(processed) - {"input_ids", "labels"})
    if others:
        raise DataError(
            f"a sample of tokens cannot hold {', '.join(others)}: convert without --tokenize: the processor "
            "makes them while training"
        )
    spans = spans_of(np.asarray(processed["labels"]) != IGNORED_LABEL)
    stored = _stored(np.asarray(processed["input_ids"]).astype(np.int32), spans.tolist(), keep_masked=keep_masked)
    if isinstance(stored, DataError):
        raise stored
    return stored
