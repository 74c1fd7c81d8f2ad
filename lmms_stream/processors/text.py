"""Texts -> tokens, and samples that are tokenized already: `input_ids` with `loss_spans`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, DataError
from ..types import Columns, Processed, Rows, Sample, Segments
from .base import IGNORED_LABEL, SegmentError, Tokens
from .tokenizers import FastTokenizer, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class TextProcessor:
    """A `text` with the special tokens that its tokenizer puts around one, then its end-of-text token, all learnt.

    ConfigError for a tokenizer without such a token, and for one that is not a fast one.
    """

    columns = ("text",)
    schema = "text"

    def __init__(self, tokenizer: PreTrainedTokenizerFast | FastTokenizer, *, source: str = ""):
        self.tokenizer = FastTokenizer.of(tokenizer, name=source)
        if self.tokenizer.eos_token_id is None:
            raise ConfigError(
                f"tokenizer {self.tokenizer.name} has no end-of-text token: set tokenizer.eos_token and save it"
            )

    @staticmethod
    def from_pretrained(path: str) -> TextProcessor:
        """A processor with the tokenizer at a local path or hub id."""
        return TextProcessor(load_tokenizer(path), source=path)

    @property
    def description(self) -> Mapping[str, Any]:
        return {
            "class": "TextProcessor",
            "version": 2,
            "tokenizer": self.tokenizer.digest,
            "eos_token_id": self.tokenizer.eos_token_id,
        }

    def measure(self, sample: Sample) -> int:
        return len(self._encode([sample])[0])

    def measure_all(self, samples: Sequence[Sample]) -> list[int | DataError]:
        """See MeasureAll."""
        return [len(ids) for ids in self._encode(samples)]

    def process(self, sample: Sample) -> Processed:
        input_ids = self._encode([sample])[0].astype(np.int64)
        return {"input_ids": input_ids, "labels": input_ids.copy()}

    def tokenize_all(self, samples: Sequence[Sample]) -> list[Tokens | DataError]:
        """See TokenizeAll."""
        return [(ids, [(0, len(ids))]) for ids in self._encode(samples)]

    def _encode(self, samples: Sequence[Sample]) -> list[NDArray[np.int32]]:
        end = self.tokenizer.eos_token_id
        assert end is not None
        found = self.tokenizer.ids([sample["text"] for sample in samples], add_special_tokens=True)
        return [ids if len(ids) and ids[-1] == end else np.append(ids, np.int32(end)) for ids in found]


@dataclass(frozen=True, slots=True)
class TokensProcessor:
    """input_ids int32[T] and loss_spans int32[k, 2] (half-open token ranges that are trained on) -> tensors."""

    columns: ClassVar[tuple[str, ...]] = ("input_ids", "loss_spans")
    schema: ClassVar[str] = "tokens"

    @property
    def description(self) -> Mapping[str, Any]:
        return {"class": "TokensProcessor", "version": 1}

    def measure(self, sample: Sample) -> int:
        return len(sample["input_ids"])

    def process(self, sample: Sample) -> Processed:
        input_ids = np.asarray(sample["input_ids"], dtype=np.int64)
        labels = np.full_like(input_ids, IGNORED_LABEL)
        before = 0
        for start, stop in sample["loss_spans"]:
            if not 0 <= start < stop <= len(input_ids):
                raise DataError(f"loss span [{start}, {stop}) lies outside the sample's {len(input_ids)} tokens")
            if start < before:
                raise DataError(f"loss span [{start}, {stop}) comes after one that begins later: sort them")
            labels[start:stop] = input_ids[start:stop]
            before = start
        return {"input_ids": input_ids, "labels": labels}

    def fill_packs(
        self,
        columns: Columns,
        addresses: NDArray[np.int64],
        segments: Segments,
        rows: Rows,
    ) -> NDArray[np.int64]:
        """See PackFiller."""
        kernels = _kernels()
        num_loss_tokens = np.empty(len(segments.indices), np.int64)
        outcome, segment, value = kernels.fill(
            addresses,
            segments.indices,
            segments.starts,
            segments.lengths,
            segments.expected,
            *_layout(columns),
            IGNORED_LABEL,
            *[row[0] for row in rows],
            num_loss_tokens,
        )
        if outcome == kernels.FITS:
            return num_loss_tokens
        what = {
            kernels.TORN: "its columns do not fill it: the shard is corrupt",
            kernels.OTHER_LENGTH: "it has another length",
            kernels.BAD_SPAN: "its loss spans lie outside the sample, or do not ascend",
        }
        num_tokens = value if outcome == kernels.OTHER_LENGTH else None
        raise SegmentError(what[outcome], segment=segment, num_tokens=num_tokens)


@cache
def _kernels() -> Any:
    """The compiled loops, imported when they are first needed: numba takes a while."""
    from . import token_kernels

    return token_kernels


@lru_cache
def _layout(columns: Columns) -> tuple[NDArray[np.int64], int, int]:
    """Bytes of a sample's columns, -1 where they vary; the numbers of the columns of tokens and of spans."""
    encoding_of = dict(zip(columns.names, columns.encodings, strict=True))
    for name in TokensProcessor.columns:
        if encoding_of.get(name) != "ndarray:int32":
            raise DataError(
                f"the dataset has no column {name!r} of int32 arrays: convert it with --tokenize, "
                "or use another processor"
            )
    column_bytes = np.array([-1 if size is None else size for size in columns.sizes], np.int64)
    return column_bytes, columns.names.index("input_ids"), columns.names.index("loss_spans")
