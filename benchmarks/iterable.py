"""Claim: of 10^6 rows of JSON lines the first pack comes within 2 s of opening, and memory is flat in their number.

MultiModalIterableDataset reads the rows as they lie. Beside it: `datasets` streaming (load_dataset(…, streaming=True))
with a buffer that is flushed when it is full, which is LMMS Engine's way, with the same processor, on the same rows.
Each runs in a fresh process on a core of its own, both at once where there are two; imports are not timed, which
loading a tokenizer once does, loading it again is. Rows and tokens are counted by CPU seconds of the process. Memory is
the private memory after a tenth of the rows and at the end. Resumed: from a state in the middle to the next pack; of
theirs with the skip of `datasets`, to the same row, without the buffer.

Second claim: a loader that tokenizes the samples of a pack at once takes at most 0.8 of the CPU time of one that
tokenizes them one by one, over packs of chats of the demo from shards; both take turns, the best of three counts.

    python benchmarks/iterable.py
    python benchmarks/iterable.py --rows 50000
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from measure import MIB, THREAD_SETTINGS, in_fresh_process, print_table, status_bytes, verdict

MAX_FIRST_S = 2.0
TITLES = ("ours", "datasets streaming, flush when full")
MAX_GROWTH = 48 * MIB
PACKING_LENGTH = 4096
ANSWER_CHARS = 160
MAX_SHARE, STORED_CHATS, ROUNDS = 0.8, 4000, 3
IMPORTED = (
    "lmms_stream.datasets.iterable",
    "lmms_stream.processors.chat",
    "datasets",
    "torch",
    "transformers",
)


def prepare(folder: Path, num_rows: int) -> tuple[Path, Path]:
    """A file of chats about Python's functions, over and over, and a tokenizer of them."""
    from lmms_stream.tools.demo.corpus import build_corpus, train_tokenizer

    corpus = build_corpus(folder / "corpus", library=Path(sysconfig.get_paths()["stdlib"]) / "asyncio")
    tokenizer = train_tokenizer(corpus.texts, folder / "tokenizer")
    path = folder / "rows.jsonl"
    with path.open("w") as file:
        for number in range(num_rows):
            question, answer = f"What is function {number}?", corpus.texts[number % len(corpus.texts)][:ANSWER_CHARS]
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path, tokenizer


def followed(packs: Iterator[tuple[int, int]], begun: float, num_rows: int) -> dict[str, float]:
    """Figures of packs, of each of which the numbers of samples and of tokens are told."""
    first_s, num_samples, num_packs, num_tokens, early = 0.0, 0, 0, 0, 0
    cpu_s = time.process_time()
    for samples, tokens in packs:
        first_s = first_s or time.perf_counter() - begun
        num_samples, num_packs, num_tokens = num_samples + samples, num_packs + 1, num_tokens + tokens
        if not early and num_samples >= num_rows // 10:
            early = status_bytes()["RssAnon"]
    cpu_s = time.process_time() - cpu_s
    return {
        "first_s": first_s,
        "rows_per_s": num_samples / cpu_s,
        "tokens_per_s": num_tokens / cpu_s,
        "wall_s": time.perf_counter() - begun,
        "packs": num_packs,
        "rows": num_samples,
        "early": early,
        "late": status_bytes()["RssAnon"],
    }


def ours(path: str, tokenizer: str, num_rows: int, core: int) -> dict[str, float]:
    os.sched_setaffinity(0, {core})
    from lmms_stream.datasets import MultiModalIterableDataset
    from lmms_stream.processors.chat import ChatProcessor

    ChatProcessor.from_pretrained(tokenizer)
    begun = time.perf_counter()
    dataset = MultiModalIterableDataset(
        {
            "dataset_type": "vision_iterable",
            "dataset_format": "jsonl",
            "dataset_path": path,
            "processor_config": {"processor_name": tokenizer, "processor_type": "qwen2"},
            "packing": True,
            "packing_length": PACKING_LENGTH,
        }
    )

    middle: dict[str, Any] = {}
    every = 64 if num_rows > 100_000 else 1

    def packs() -> Iterator[tuple[int, int]]:
        for number, batch in enumerate(dataset):
            yield len(batch.sample_ids), batch.num_tokens
            if not middle and number % every == 0 and dataset.counts.samples > num_rows // 2:
                middle.update(dataset.state_dict())

    found = followed(packs(), begun, num_rows)
    begun = time.perf_counter()
    resumed = MultiModalIterableDataset(dataset.config)
    text = json.dumps(middle)
    resumed.load_state_dict(json.loads(text))
    next(iter(resumed))
    return found | {"resume_s": time.perf_counter() - begun, "state_bytes": len(text)}


def theirs(path: str, tokenizer: str, num_rows: int, core: int) -> dict[str, float]:
    """LMMS Engine's way: rows as `datasets` streams them, and a buffer that is flushed when a sample does not fit."""
    os.sched_setaffinity(0, {core})
    import datasets
    from lmms_stream.loader.collate import collate
    from lmms_stream.processors.chat import ChatProcessor

    ChatProcessor.from_pretrained(tokenizer)
    begun = time.perf_counter()
    processor = ChatProcessor.from_pretrained(tokenizer)
    rows = datasets.load_dataset("json", data_files=path, split="train", streaming=True)

    def packs(rows: Any) -> Iterator[tuple[int, int]]:
        buffer: list[Any] = []
        num_tokens = 0
        for row in rows:
            made = processor.process({"messages": json.dumps(row["messages"]), "media": b""})
            length = len(made["input_ids"])
            if num_tokens + length > PACKING_LENGTH:
                yield len(collate(buffer, range(len(buffer))).sample_ids), num_tokens
                buffer, num_tokens = [], 0
            buffer.append(made)
            num_tokens += length
        if buffer:
            yield len(collate(buffer, range(len(buffer))).sample_ids), num_tokens

    found = followed(packs(rows), begun, num_rows)
    begun = time.perf_counter()
    next(packs(rows.skip(num_rows // 2)))
    return found | {"resume_s": time.perf_counter() - begun}


class OneByOne:
    """A chat processor without the method that tokenizes several samples."""

    def __init__(self, chats: Any):
        self.process, self.measure = chats.process, chats.measure
        self.columns, self.schema, self.description = chats.columns, chats.schema, chats.description


def tokenized(folder: Path, tokenizer: Path, source: Path) -> tuple[float, float]:
    """CPU seconds of an epoch of packs, tokenized at once and one by one."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as in a loader worker
    from lmms_stream.converters.convert import convert
    from lmms_stream.loader.loader import PackedLoader
    from lmms_stream.mds.packed import PackedStreamingDataset
    from lmms_stream.plan.packing import PackingConfig
    from lmms_stream.processors.chat import ChatProcessor

    chats = ChatProcessor.from_pretrained(str(tokenizer))
    lines = source.read_text().splitlines(keepends=True)
    rows = folder / "stored.jsonl"
    rows.write_text("".join(islice(cycle(lines), STORED_CHATS)))
    convert([rows], str(folder / "stored"), processor=chats)
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for seconds, processor in zip(found, (chats, OneByOne(chats)), strict=True):
            packing = PackingConfig(packing_length=PACKING_LENGTH)
            dataset = PackedStreamingDataset(folder / "stored", processor=processor, packing=packing)
            batches = iter(PackedLoader(dataset, global_batch=8))
            next(batches)  # compiles
            begun = time.process_time()
            for _ in batches:
                pass
            seconds.append(time.process_time() - begun)
    return min(found[0]), min(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10**6, help="rows of the file")
    parser.add_argument("--folder", help="folder for the files (default: a temporary one)")
    options = parser.parse_args()
    os.environ.update(dict.fromkeys(THREAD_SETTINGS, "1"))  # before any process imports these libraries
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        path, tokenizer = prepare(Path(name), options.rows)
        said = (str(path), str(tokenizer), options.rows)
        with ThreadPoolExecutor(min(2, len(cores))) as pool:
            begun = [
                pool.submit(partial(in_fresh_process, task, *said, cores[-1 - number % len(cores)], imported=IMPORTED))
                for number, task in enumerate((ours, theirs))
            ]
            found = {title: each.result()[0] for title, each in zip(TITLES, begun, strict=True)}
        size = path.stat().st_size
        functions = Path(name) / "corpus" / "functions.jsonl"
        (at_once, one_by_one), _ = in_fresh_process(tokenized, Path(name), tokenizer, functions, imported=IMPORTED)
    report(found, options.rows, size)
    share = at_once / one_by_one
    print(
        f"at most {MAX_SHARE:g} of the CPU time of tokenizing one by one ({share:.2f}): {verdict(share <= MAX_SHARE)}"
    )


def report(found: dict[str, dict[str, float]], num_rows: int, size: int) -> None:
    lines = [
        [
            title,
            f"{each['first_s']:.2f} s",
            f"{each['tokens_per_s'] / found['ours']['tokens_per_s']:.2f}",
            f"{each['early'] / MIB:.0f} MiB",
            f"{each['late'] / MIB:.0f} MiB",
            f"{each['packs']:.0f}",
            f"{each['resume_s']:.2f} s",
        ]
        for title, each in found.items()
    ]
    columns = [
        "",
        "first pack",
        "tokens a CPU second",
        "memory at a tenth",
        "at the end",
        "packs",
        "resumed in the middle",
    ]
    print_table(f"{num_rows} rows of JSON lines, {size / MIB:.0f} MiB, packs of {PACKING_LENGTH}", columns, lines)
    mine = found["ours"]
    growth = mine["late"] - mine["early"]
    print(
        f"rows of a CPU second of ours: {mine['rows_per_s']:.0f}, in {mine['wall_s']:.0f} s; "
        f"state in the middle: {mine['state_bytes'] / 1024:.0f} KiB; each row once: {verdict(mine['rows'] == num_rows)}"
    )
    theirs_too = found[TITLES[1]]
    print(f"more tokens of a CPU second than theirs: {verdict(mine['tokens_per_s'] > theirs_too['tokens_per_s'])}")
    print(f"first pack within {MAX_FIRST_S:g} s: {verdict(mine['first_s'] <= MAX_FIRST_S)}")
    print(f"memory grows by {MAX_GROWTH // MIB} MiB at most ({growth / MIB:.0f}): {verdict(growth <= MAX_GROWTH)}")


if __name__ == "__main__":
    main()
