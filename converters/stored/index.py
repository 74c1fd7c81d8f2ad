"""The lengths index of a dataset that is there already: shards -> measure -> index, beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ...mds.lengths import LengthIndex
from ...mds.measuring import add_lengths, measured_dataset
from ...processors.base import Processor
from ...processors.not_shown import OnDropped
from ...storage.storage import open_storage


def index_dataset(
    remote: str,
    processor: Processor,
    *,
    num_workers: int | None = None,
    work: Path | None = None,
    on_start: Callable[[Sequence[int], Sequence[int]], None] = lambda shards, missing: None,
    on_samples: Callable[[int], None] = lambda count: None,
    on_dropped: OnDropped = "error",
) -> LengthIndex:
    """Measure every sample of `remote`, write its lengths index there, and return it, memory-mapped.

    See measured_dataset for the options and for what is raised. Several workers are spawned, so a script calls this
    below `if __name__ == "__main__":`.
    """
    storage = open_storage(remote)
    with measured_dataset(
        storage,
        processor,
        num_workers=num_workers,
        work=work,
        on_start=on_start,
        on_samples=on_samples,
        on_dropped=on_dropped,
    ) as (index, folder):
        add_lengths(storage, index, folder=folder)
    return index
