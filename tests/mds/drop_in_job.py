"""A job: MosaicML's StreamingDataset and ours, with the same keywords. Arguments: folders of data and of output, cases.

Each rank writes what it read of each to `<rank>.json`: the batches of two epochs, the length, a state in the middle of
an epoch and at its end, and what the *other* class reads from that state on. In short rounds MosaicML's package is not
imported, and ours alone reads two epochs.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import lmms_stream
import torch

from ..rounds import LONG
from .drop_in_cases import CASES, Case

CLASSES: dict[str, Any] = {"ours": lmms_stream}
if LONG:
    import streaming
    from streaming.base.stream import streams_registry

    streams_registry.register("for_tests", func=streaming.Stream)
    CLASSES["parent"] = streaming
Numbers = list[list[int]]
TRIES = 20


class Reading:
    """A dataset of one of the classes with the keywords of a case, and its loader."""

    def __init__(self, which: str, case: Case, *, num_workers: int, data: Path, caches: Path):
        home = CLASSES[which]
        caches.mkdir(parents=True, exist_ok=True)
        keywords: dict[str, Any] = dict(case.keywords)
        if case.streams:
            keywords["streams"] = [
                home.Stream(remote=str(data / name), local=str(caches / name), **weights)
                for name, weights in case.streams.items()
            ]
        else:
            keywords |= {"remote": str(data / case.name_of_data), "local": str(caches / "one")}
        for _ in range(TRIES):
            with suppress(FileExistsError):  # another program took the name that the parent was about to take
                self.dataset = home.StreamingDataset(**keywords)
                break
        self.loader = home.StreamingDataLoader(
            self.dataset,
            batch_size=self.dataset.batch_size,
            num_workers=num_workers,
            collate_fn=_numbers,
            timeout=60 if num_workers else 0,
        )

    def batches(self, count: int | None = None) -> Numbers:
        return [batch["number"] for batch in islice(self.loader, count)]


def _numbers(samples: list[dict[str, Any]]) -> dict[str, list[int]]:
    return {"number": [int(sample["number"]) for sample in samples]}


def main() -> None:
    data, out = Path(sys.argv[1]), Path(sys.argv[2])
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # the parent would make and end a group for each dataset
        torch.distributed.init_process_group("gloo")
    read: dict[str, Any] = {}
    for said in sys.argv[3:]:
        name, num_workers = said.split(":")
        caches = out / f"caches-{said}"
        read[said] = compare(CASES[name], num_workers=int(num_workers), data=data, caches=caches)
        shutil.rmtree(caches, ignore_errors=True)
    Path(out, f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(read))


def compare(case: Case, *, num_workers: int, data: Path, caches: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"parent": {}, "ours": {}}
    for which, other in (("parent", "ours"), ("ours", "parent"))[0 if LONG else 1 :]:
        one = _open(which, case, num_workers, data, caches / f"{which}-whole")
        found[which]["length"] = len(one.dataset)
        found[which]["epochs"] = epochs = [one.batches(), one.batches()]
        found[which]["end"] = one.loader.state_dict()
        _close(one)
        if not LONG:
            continue
        found[which]["resumed"] = []
        length = _least(len(epochs[1]))
        for count in sorted({1, length // 2, length - 1} - {0}):
            begun = _open(which, case, num_workers, data, caches / f"{which}-begun-{count}")
            begun.batches()
            begun.batches(count)
            state = begun.loader.state_dict()
            _close(begun)
            resumed = _open(other, case, num_workers, data, caches / f"{which}-resumed-{count}")
            resumed.loader.load_state_dict(state)
            found[which]["resumed"].append([count, resumed.batches(), resumed.batches()])
            _close(resumed)
        after = _open(other, case, num_workers, data, caches / f"{which}-after")
        after.loader.load_state_dict(found[which]["end"])
        found[which]["after end"] = [after.batches(), after.batches()]
        _close(after)
    return found


def _least(number: int) -> int:
    """The least number of all ranks: with device_per_stream they have unequally many batches."""
    if not torch.distributed.is_initialized():
        return number
    numbers = [0] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(numbers, number)
    return min(numbers)


def _open(which: str, case: Case, num_workers: int, data: Path, caches: Path) -> Reading:
    return Reading(which, case, num_workers=num_workers, data=data, caches=caches)


def _close(reading: Reading) -> None:
    """Let go of a dataset; the parent's would leave the state that it loaded in shared memory, for the next to find."""
    iterator = getattr(reading.dataset, "_iterator", None)
    if iterator is not None:
        iterator.non_blocking_exit()
    del reading.loader, reading.dataset
    gc.collect()
    if LONG:
        streaming.base.util.clean_stale_shared_memory()


if __name__ == "__main__":
    main()
