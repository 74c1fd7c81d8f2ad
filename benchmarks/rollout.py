"""Claims: of 10^6 prompts a StreamingDataset is open in at most a fifth of the time that an eager list takes, its
private memory is at most 32 MiB more than of a tenth of the prompts, and it takes at most the CPU time of `datasets`
for batches of a shuffled epoch; a Dataset takes less for batches in any order.

Prompts are word problems of one or two sentences with an answer and a number, as JSON lines, Parquet (row groups of
65536) and MDS shards. Beside it: a plain list of samples, made by json.loads and shuffled by random.shuffle; and
`datasets`, whose conversion to Arrow is part of opening it the first time and whose shuffle is one of indices. All of
them give batches of 512 samples, each with prompt, label and metadata: `datasets` by turning the columns of a slice
into Samples.

Batches of the rows' order and of a shuffled epoch are taken, after some that are not measured, in turns of 20, and the
best turn counts: batches a second of CPU time and of wall time. Each case runs in a process of its own, on one core;
the memory is RssAnon after all, less what it was when all was imported.

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
from typing import Any, NamedTuple

from measure import MIB, in_fresh_process, keep_to_one_core, print_table, status_bytes, verdict

BATCH, TURN, NUM_TURNS, NUM_WARM = 512, 20, 6, 40
GROUP_ROWS = 1 << 16
MAX_OPEN_SHARE, MAX_MORE_MIB = 0.2, 32.0
NextBatch = Callable[[], Any]


class Result(NamedTuple):
    """Seconds; batches a second; bytes of private memory."""

    open_s: float
    first_s: float  # to the first batch, opening included
    stored_cpu: float  # batches in the rows' order
    stored_wall: float
    shuffled_cpu: float
    shuffled_wall: float
    memory: float


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
    columns = {"text": "str", "label": "str", "metadata": "json"}
    with MDSWriter(columns=columns, out=str(folder / "shards"), hashes=["xxh3_64"]) as writer:
        for row in rows(count):
            writer.write({name: row[name] for name in columns})


def measured(open_it: Callable[[], tuple[NextBatch, Callable[[], NextBatch]]]) -> Result:
    """open_it: opens a dataset and gives what takes its next batch, and what shuffles it and gives the same of it."""
    before = status_bytes()["RssAnon"]
    start = time.perf_counter()
    next_batch, shuffle = open_it()
    opened = time.perf_counter()
    assert len(next_batch()) == BATCH
    first = time.perf_counter()
    stored = speed(next_batch)
    shuffled = speed(shuffle())
    return Result(opened - start, first - start, *stored, *shuffled, float(status_bytes()["RssAnon"] - before))


def speed(next_batch: NextBatch) -> tuple[float, float]:
    """Batches a second of CPU time and of wall time, in the best turn."""
    for _ in range(NUM_WARM):
        assert len(next_batch()) == BATCH
    cpu, wall = [], []
    for _ in range(NUM_TURNS):
        begin = time.process_time(), time.perf_counter()
        for _ in range(TURN):
            batch = next_batch()
        cpu.append(time.process_time() - begin[0])
        wall.append(time.perf_counter() - begin[1])
        assert len(batch) == BATCH
        assert batch[0].label
        assert "number" in batch[0].metadata
    return TURN / min(cpu), TURN / min(wall)


def ours(folder: Path, name: str, lazy: bool) -> Result:
    from lmms_stream.rl import Dataset, StreamingDataset

    def open_it() -> tuple[NextBatch, Callable[[], NextBatch]]:
        dataset = (StreamingDataset if lazy else Dataset)(folder / name, label_key="label")

        def next_batch() -> Any:
            return dataset.get_batch(BATCH)[0]

        def shuffle() -> NextBatch:
            dataset.shuffle(0)
            return next_batch

        return next_batch, shuffle

    return measured(open_it)


def whole_batches(num_rows: int) -> Iterator[int]:
    """Where batches begin, epoch after epoch."""
    return itertools.cycle(range(0, num_rows // BATCH * BATCH, BATCH))


def plain_list(folder: Path) -> Result:
    from lmms_stream.rl import Sample

    def open_it() -> tuple[NextBatch, Callable[[], NextBatch]]:
        with (folder / "rows.jsonl").open() as file:
            values = (json.loads(line) for line in file)
            samples = [Sample(prompt=each["text"], label=each["label"], metadata=each["metadata"]) for each in values]
        starts = whole_batches(len(samples))

        def next_batch() -> list[Sample]:
            start = next(starts)
            return samples[start : start + BATCH]

        def shuffle() -> NextBatch:
            random.Random(42).shuffle(samples)
            return next_batch

        return next_batch, shuffle

    return measured(open_it)


def hub_datasets(folder: Path) -> Result:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import datasets
    from lmms_stream.rl import Sample

    datasets.disable_progress_bars()

    def batches(dataset: Any) -> NextBatch:
        starts = whole_batches(len(dataset))

        def next_batch() -> list[Sample]:
            start = next(starts)
            columns = dataset[start : start + BATCH]
            values = zip(columns["text"], columns["label"], columns["metadata"], strict=True)
            return [Sample(prompt=text, label=label, metadata=metadata) for text, label, metadata in values]

        return next_batch

    def open_it() -> tuple[NextBatch, Callable[[], NextBatch]]:
        files, cache = str(folder / "rows.jsonl"), str(folder / "cache")
        dataset = datasets.load_dataset("json", data_files=files, split="train", cache_dir=cache)
        return batches(dataset), lambda: batches(dataset.shuffle(seed=42))

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
        [
            name, f"{each.open_s:.2f}", f"{each.first_s:.2f}", f"{each.stored_cpu:,.0f}", f"{each.stored_wall:,.0f}",
            f"{each.shuffled_cpu:,.0f}", f"{each.shuffled_wall:,.0f}", f"{each.memory / MIB:,.0f}",
        ]
        for name, each in found.items()
    ]  # fmt: skip
    speeds = ["in order, a CPU second", "wall", "shuffled, a CPU second", "wall"]
    columns = ["", "s to open", "to the first batch", *speeds, "private MiB"]
    print_table(f"{count:,} prompts, batches of {BATCH}, one core", columns, table)
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
    peer = many["datasets, later"]
    for case in [name for name in many if name.startswith("StreamingDataset")]:
        share = many[case].open_s / many["plain list"].open_s
        more = (many[case].memory - few[case].memory) / MIB
        shuffled, stored = many[case].shuffled_cpu / peer.shuffled_cpu, many[case].stored_cpu / peer.stored_cpu
        print(f"{case}: open in {share:.3f} of the list's time: {verdict(share <= MAX_OPEN_SHARE)}")
        print(f"{case}: {more:.1f} MiB more than of a tenth of the prompts: {verdict(more <= MAX_MORE_MIB)}")
        print(f"{case}: {shuffled:.2f} times the shuffled batches of `datasets` a CPU second: {verdict(shuffled >= 1)}")
        print(f"{case}: {stored:.2f} times its batches in order (no claim)")
    eager = many["Dataset, JSON lines"]
    for what, ratio in (
        ("in order", eager.stored_cpu / peer.stored_cpu),
        ("shuffled", eager.shuffled_cpu / peer.shuffled_cpu),
    ):
        print(f"Dataset: {ratio:.1f} times the batches of `datasets` a CPU second, {what}: {verdict(ratio >= 1)}")


if __name__ == "__main__":
    main()
