"""Claims: of 10^6 prompts a StreamingDataset is open in at most a fifth of the time that an eager list takes, and its
private memory is at most 32 MiB more than of a tenth of the prompts.

Prompts are word problems of one or two sentences with an answer, as JSON lines, Parquet (row groups of 65536) and MDS
shards. Beside it: a plain list of samples, made by json.loads and shuffled by random.shuffle; and `datasets`, whose
conversion to Arrow is part of opening it the first time and whose shuffle is one of indices. Batches of 512 prompts are
taken from a shuffled epoch. Each case runs in a process of its own, on one core; the memory is RssAnon after the
batches, less what it was when all was imported.

    python benchmarks/rollout.py
    python benchmarks/rollout.py --rows 100000
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from measure import MIB, in_fresh_process, keep_to_one_core, print_table, status_bytes, verdict

BATCH, NUM_BATCHES = 512, 100
GROUP_ROWS = 1 << 16
MAX_OPEN_SHARE, MAX_MORE_MIB = 0.2, 32.0
Result = tuple[float, float, float, float]  # seconds to open, to the first batch; batches/s; bytes of memory


def rows(count: int) -> Iterator[dict[str, Any]]:
    dice = random.Random(7)
    for number in range(count):
        a, b, c = (dice.randrange(2, 2000) for _ in range(3))
        text = f"Ada has {a} bags of {b} apples each, and she gives {c} of them away to Ben. How many apples are left?"
        yield {"text": text, "label": str(a * b - c), "metadata": {"number": number}}


def write_all(folder: Path, count: int) -> None:
    import pyarrow
    import pyarrow.parquet
    from streaming import MDSWriter

    with (folder / "rows.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows(count))
    table = pyarrow.Table.from_pylist(list(rows(count)))
    pyarrow.parquet.write_table(table, folder / "rows.parquet", row_group_size=GROUP_ROWS)
    columns = {"text": "str", "label": "str"}  # "json" would import MosaicML's package, and with it torch
    with MDSWriter(columns=columns, out=str(folder / "shards"), hashes=["xxh3_64"]) as writer:
        for row in rows(count):
            writer.write({name: row[name] for name in columns})


def measured(open_it: Callable[[], Callable[[], Any]]) -> Result:
    """open_it: opens a dataset and gives what takes the next batch of it."""
    before = status_bytes()["RssAnon"]
    start = time.perf_counter()
    next_batch = open_it()
    opened = time.perf_counter()
    assert len(next_batch()) == BATCH
    first = time.perf_counter()
    for _ in range(NUM_BATCHES):
        assert len(next_batch()) == BATCH
    return (
        opened - start,
        first - start,
        NUM_BATCHES / (time.perf_counter() - first),
        float(status_bytes()["RssAnon"] - before),
    )


def ours(folder: Path, name: str, lazy: bool) -> Result:
    from lmms_stream.rl import Dataset, StreamingDataset

    def open_it() -> Callable[[], Any]:
        dataset = (StreamingDataset if lazy else Dataset)(folder / name, label_key="label")
        dataset.shuffle(0)
        return lambda: dataset.get_batch(BATCH)[0]

    return measured(open_it)


def whole_batches(num_rows: int) -> Iterator[int]:
    """Where batches begin, epoch after epoch."""
    return itertools.cycle(range(0, num_rows // BATCH * BATCH, BATCH))


def plain_list(folder: Path) -> Result:
    from lmms_stream.rl import Sample

    def open_it() -> Callable[[], Any]:
        with (folder / "rows.jsonl").open() as file:
            values = (json.loads(line) for line in file)
            samples = [Sample(prompt=each["text"], label=each["label"], metadata=each["metadata"]) for each in values]
        random.Random(42).shuffle(samples)
        starts = whole_batches(len(samples))

        def batch() -> list[Sample]:
            start = next(starts)
            return samples[start : start + BATCH]

        return batch

    return measured(open_it)


def hub_datasets(folder: Path) -> Result:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import datasets

    datasets.disable_progress_bars()

    def open_it() -> Callable[[], Any]:
        files, cache = str(folder / "rows.jsonl"), str(folder / "cache")
        dataset = datasets.load_dataset("json", data_files=files, split="train", cache_dir=cache).shuffle(seed=42)
        starts = whole_batches(len(dataset))

        def batch() -> list[str]:
            start = next(starts)
            texts: list[str] = dataset[start : start + BATCH]["text"]
            return list(texts)

        return batch

    return measured(open_it)


def cases(folder: Path) -> list[tuple[str, Callable[[], tuple[Result, Any]]]]:
    return [
        ("plain list", lambda: in_fresh_process(plain_list, folder)),
        ("datasets, first time", lambda: in_fresh_process(hub_datasets, folder)),
        ("datasets, later", lambda: in_fresh_process(hub_datasets, folder)),
        ("Dataset, JSON lines", lambda: in_fresh_process(ours, folder, "rows.jsonl", False)),
        ("StreamingDataset, JSON lines", lambda: in_fresh_process(ours, folder, "rows.jsonl", True)),
        ("StreamingDataset, Parquet", lambda: in_fresh_process(ours, folder, "rows.parquet", True)),
        ("StreamingDataset, MDS", lambda: in_fresh_process(ours, folder, "shards", True)),
    ]


def run(folder: Path, count: int) -> dict[str, Result]:
    folder.mkdir()
    in_fresh_process(write_all, folder, count)
    found = {name: case()[0] for name, case in cases(folder)}
    table = [
        [name, f"{opened:.2f}", f"{first:.2f}", f"{speed:,.1f}", f"{memory / MIB:,.0f}"]
        for name, (opened, first, speed, memory) in found.items()
    ]
    columns = ["", "s to open", "s to the first batch", f"batches of {BATCH}/s", "private MiB"]
    print_table(f"{count:,} prompts, shuffled, one core", columns, table)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="where prompts are written; default: the temporary folder")
    args = parser.parse_args()
    keep_to_one_core()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        os.environ["TMPDIR"] = name
        few, many = run(Path(name) / "few", args.rows // 10), run(Path(name) / "many", args.rows)
    for case in [name for name in many if name.startswith("StreamingDataset")]:
        share = many[case][0] / many["plain list"][0]
        more = (many[case][3] - few[case][3]) / MIB
        print(f"{case}: open in {share:.3f} of the list's time: {verdict(share <= MAX_OPEN_SHARE)}")
        print(f"{case}: {more:.1f} MiB more than of a tenth of the prompts: {verdict(more <= MAX_MORE_MIB)}")


if __name__ == "__main__":
    main()
