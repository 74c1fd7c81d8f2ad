"""What a processor is: it measures a sample cheaply, and makes model input of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Protocol

from ..types import Processed, Sample

IGNORED_LABEL = -100  # transformers' and torch's ignore_index


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


def processor_fingerprint(processor: Processor) -> str:
    """The name of the lengths index that this processor measures: a hash of its description."""
    text = json.dumps(processor.description, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
