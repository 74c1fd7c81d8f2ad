"""What tests of MultiModalIterableDataset share: which rows its packs hold, and readers beside each other."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from lmms_stream.datasets import MultiModalIterableDataset
from lmms_stream.doors.lmms_engine.datasets.source_loader import StreamedBatch
from lmms_stream.doors.lmms_engine.datasets.source_state import SourcesState
from lmms_stream.types import Batch, World
from transformers import AutoTokenizer

QUESTION = re.compile(r"What is (\d+)\?")


def row(number: int) -> dict[str, Any]:
    """A chat with its number in it; the lengths differ."""
    answer = "It is a number. " * (1 + number * 7 % 5)
    return {"messages": [{"role": "user", "content": f"What is {number}?"}, {"role": "assistant", "content": answer}]}


def write_rows(path: Path, numbers: Sequence[int]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row(number)) + "\n" for number in numbers))
    return path


@lru_cache
def _tokenizer(folder: str) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def numbers_of(batch: Batch, tokenizer: Path) -> list[int]:
    """The numbers of the rows that a batch holds, each as often as it does."""
    text = _tokenizer(str(tokenizer)).decode(batch.input_ids[0].tolist())
    return [int(number) for number in QUESTION.findall(text)]


def counts_of(batches: Sequence[Batch], tokenizer: Path) -> Counter[int]:
    return Counter(number for batch in batches for number in numbers_of(batch, tokenizer))


class Readers:
    """All workers of all ranks, each at its own pace, as a run has them; what they deliver is kept in one state."""

    def __init__(
        self,
        config: Mapping[str, Any],
        num_ranks: int,
        num_workers: int,
        *,
        state: Mapping[str, Any] | None = None,
        endless: bool = False,
    ):
        self.dataset = MultiModalIterableDataset(config)
        if state is None:
            self.state = self.dataset.begun(num_ranks * num_workers)
        else:
            self.state = self.dataset.checked(json.loads(json.dumps(state)))
        self._readers: dict[int, Iterator[StreamedBatch]] = {}
        for number in range(num_ranks * num_workers):
            worker, rank = divmod(number, num_ranks)
            world = World(rank=rank, world_size=num_ranks)
            self._readers[number] = self.dataset.batches(
                SourcesState.from_dict(self.state.to_dict()),
                world=world,
                worker=worker,
                num_workers=num_workers,
                endless=endless,
            )

    def take(self, num_batches: int) -> list[Batch]:
        """So many batches of the readers, the first of them more often than the others."""
        taken: list[Batch] = []
        for turn in range(1 << 20):
            for number in sorted(self._readers):
                if number and turn % (number + 1):
                    continue
                batch = next(self._readers[number], None)
                if batch is None:
                    del self._readers[number]
                    break
                for after in batch.afters:
                    self.state.deliver(after)
                taken.append(batch)
                if len(taken) == num_batches:
                    return taken
            if not self._readers:
                return taken
        raise AssertionError

    def rest(self) -> list[Batch]:
        return self.take(1 << 30)
