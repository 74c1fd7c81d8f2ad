"""Texts -> tokens; and processors of tokenized samples: `input_ids` with `loss_spans`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, DataError
from ..types import Columns, PackSegments, Processed, Role, Sample, TokenRows
from .base import IGNORED_LABEL, SegmentError, Tokens
from .tokenizers import FastTokenizer, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class TextProcessor:
    """A `text` with its tokenizer's special tokens around it, then the end-of-text token; all tokens are trained on.

    prefix, suffix: texts whose tokens replace the special tokens before and after the text; "" for none. ConfigError
    for a tokenizer without an end-of-text token and without a suffix, and for a slow tokenizer.
    """

    columns = ("text",)
    schema = "text"

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast | FastTokenizer,
        *,
        source: str = "",
        prefix: str | None = None,
        suffix: str | None = None,
    ):
        self.tokenizer = FastTokenizer.of(tokenizer, name=source)
        if self.tokenizer.eos_token_id is None and suffix is None:
            raise ConfigError(
                f"tokenizer {self.tokenizer.name} has no end-of-text token: set tokenizer.eos_token and save it"
            )
        self._said = {name: text for name, text in (("prefix", prefix), ("suffix", suffix)) if text is not None}
        self._around = self._found_around() if self._said else None

    @staticmethod
    def from_pretrained(
        path: str, *, prefix: str | None = None, suffix: str | None = None, trust_remote_code: bool = False
    ) -> TextProcessor:
        """Return a processor with the tokenizer at a local path or hub id. trust_remote_code: see load_tokenizer."""
        tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
        return TextProcessor(tokenizer, source=path, prefix=prefix, suffix=suffix)

    def _found_around(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Tokens before and after a text: the given tokens, or the tokenizer's."""
        before, after = self.tokenizer.around
        end = self.tokenizer.eos_token_id
        if end is not None and after[-1:].tolist() != [end]:
            after = np.append(after, np.int32(end))
        if "prefix" in self._said:
            before = self.tokenizer.ids([self._said["prefix"]], add_special_tokens=False)[0]
        if "suffix" in self._said:
            after = self.tokenizer.ids([self._said["suffix"]], add_special_tokens=False)[0]
        return before, after

    @property
    def description(self) -> Mapping[str, Any]:
        return {
            "class": "TextProcessor",
            "version": 2,
            "tokenizer": self.tokenizer.digest,
            "eos_token_id": self.tokenizer.eos_token_id,
            **self._said,
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
        texts = [sample["text"] for sample in samples]
        if self._around is not None:
            before, after = self._around
            return [np.concatenate([before, ids, after]) for ids in self.tokenizer.ids(texts, add_special_tokens=False)]
        end = self.tokenizer.eos_token_id
        assert end is not None
        found = self.tokenizer.ids(texts, add_special_tokens=True)
        return [ids if len(ids) and ids[-1] == end else np.append(ids, np.int32(end)) for ids in found]


@dataclass(frozen=True, slots=True)
class TokensProcessor:
    """Processor of input_ids int32[T] and loss_spans int32[k, 2] (half-open token ranges that are trained on)."""

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
                raise DataError(f"loss span [{start}, {stop}) comes after a span that begins later: sort the spans")
            labels[start:stop] = input_ids[start:stop]
            before = start
        return {"input_ids": input_ids, "labels": labels}

    def fill_packs(
        self,
        columns: Columns,
        addresses: NDArray[np.int64],
        segments: PackSegments,
        rows: TokenRows,
    ) -> NDArray[np.int64]:
        """See PackFiller."""
        from . import token_kernels as kernels

        num_loss_tokens = np.empty(len(segments.indices), np.int64)
        outcome, segment, value = kernels.fill(
            addresses,
            segments.indices,
            segments.starts,
            segments.lengths,
            segments.expected,
            *_layout(columns),
            IGNORED_LABEL,
            rows.input_ids[0],
            rows.labels[0],
            rows.position_ids[0],
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


@lru_cache
def _layout(columns: Columns) -> tuple[NDArray[np.int64], int, int]:
    """Bytes of a sample's columns, -1 if they vary; the numbers of the columns of tokens and of spans."""
    encoding_of = dict(zip(columns.names, columns.encodings, strict=True))
    for name in TokensProcessor.columns:
        if encoding_of.get(name) != "ndarray:int32":
            raise DataError(
                f"the dataset has no column {name!r} of int32 arrays: convert it with --tokenize, "
                "or use another processor"
            )
    column_bytes = np.array([-1 if size is None else size for size in columns.sizes], np.int64)
    return column_bytes, columns.names.index("input_ids"), columns.names.index("loss_spans")


# Samples of several documents, concatenated at conversion -> documents that do not see each other.


@dataclass(frozen=True, slots=True)
class DocumentsProcessor:
    """Like TokensProcessor, with each document, or piece of a document, as a separate sequence.

    `document_starts`, int32[k], are the first tokens of documents, 0 first. `sequences` are the number of tokens and
    the role of each sequence, int64[k, 2]; see Role. DataError for starts that do not ascend from 0 within the sample.
    """

    columns: ClassVar[tuple[str, ...]] = (*TokensProcessor.columns, "document_starts")
    gives_sequences: ClassVar[bool] = True
    schema: ClassVar[str] = TokensProcessor.schema

    @property
    def description(self) -> Mapping[str, Any]:
        """TokensProcessor's description: equal lengths share a lengths index."""
        return TokensProcessor().description

    def measure(self, sample: Sample) -> int:
        return TokensProcessor().measure(sample)

    def process(self, sample: Sample) -> Processed:
        processed = TokensProcessor().process(sample)
        starts = np.asarray(sample["document_starts"], np.int64)
        lengths = np.diff(starts, append=len(processed["input_ids"]))
        if starts.ndim != 1 or starts[:1].tolist() != [0] or (lengths < 1).any():
            raise DataError(
                f"its documents begin at the tokens {str(starts.tolist())[:80]}, expected some of its "
                f"{len(processed['input_ids'])} tokens, ascending from 0: convert it again"
            )
        return {**processed, "sequences": np.stack([lengths, np.full(len(starts), Role.DOCUMENT)], axis=1)}
