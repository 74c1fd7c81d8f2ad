"""Processors that tests send to processes, in a module that imports little: each of those processes imports it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lmms_stream.errors import DataError


@dataclass(frozen=True)
class Words:
    """Measures a text by its words; fails at the sample of number `at` in the way that `failure` says."""

    columns: ClassVar[tuple[str, ...]] = ("text",)
    schema: ClassVar[str] = "text"
    name: str = "words"
    at: int = -1
    failure: str = ""

    @property
    def description(self) -> Mapping[str, Any]:
        return {"class": self.name}

    def measure(self, sample: Mapping[str, Any]) -> int:
        words = sample["text"].split()
        if int(words[0]) == self.at:
            if self.failure == "data":
                raise DataError("too many words")
            if self.failure == "code":
                raise KeyError("a\nb")
            return int(self.failure)
        return len(words)

    def process(self, sample: Mapping[str, Any]) -> Mapping[str, Any]:
        raise NotImplementedError


class Columns(Words):
    def measure(self, sample: Mapping[str, Any]) -> int:
        return len(sample)


class Threads(Words):
    """Measures how far tokenizers may spread."""

    def measure(self, sample: Mapping[str, Any]) -> int:
        return len(os.environ["TOKENIZERS_PARALLELISM"])


@dataclass(frozen=True)
class Dying:
    """Kills its process at the first sample."""

    columns: ClassVar[tuple[str, ...]] = ("input_ids", "loss_spans")
    schema: ClassVar[str] = "tokens"

    @property
    def description(self) -> Mapping[str, Any]:
        return {"class": "Dying"}

    def measure(self, sample: Mapping[str, Any]) -> int:
        os._exit(3)

    def process(self, sample: Mapping[str, Any]) -> Mapping[str, Any]:
        raise NotImplementedError
