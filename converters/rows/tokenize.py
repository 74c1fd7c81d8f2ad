"""Samples -> samples of the tokens schema, by a processor, while they are converted. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ...processors.base import IGNORED_LABEL, Processor, TokenizeAll, or_error, through, tokenizes_all
from ...types import Sample
from .tokens import NOTHING_LEARNT, learnt_spans


def to_tokens(samples: Sequence[Sample], processor: Processor) -> list[dict[str, Any] | DataError]:
    """Samples that `processor` reads as tokens samples.

    DataError instead of one in which no token would be learnt, and of one with model input that a sample of tokens
    cannot hold.
    """
    if not tokenizes_all(processor):
        return [or_error(_as_tokens, sample, processor) for sample in samples]
    tokenize_all: TokenizeAll = processor.tokenize_all  # type: ignore[attr-defined]
    return through(tokenize_all(samples), lambda made: [_stored(*tokens) for tokens in made])


def _stored(ids: NDArray[np.int32], spans: Sequence[tuple[int, int]]) -> dict[str, Any] | DataError:
    if not len(spans):
        return DataError(NOTHING_LEARNT)
    return {"input_ids": ids, "loss_spans": np.array(spans, np.int32)}


def _as_tokens(sample: Sample, processor: Processor) -> dict[str, Any]:
    processed = processor.process(sample)
    others = sorted(set(processed) - {"input_ids", "labels"})
    if others:
        raise DataError(
            f"a sample of tokens cannot hold {', '.join(others)}: convert without --tokenize: the processor "
            "makes them while training"
        )
    ids = np.asarray(processed["input_ids"])
    return {
        "input_ids": ids.astype(np.int32),
        "loss_spans": learnt_spans(np.asarray(processed["labels"]) != IGNORED_LABEL),
    }
