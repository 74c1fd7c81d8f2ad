"""Claim: two workers convert chats 1.6 times as fast as a plain MDSWriter loop, and ahead of litdata's `optimize`.

The rows are chats of Python's documented functions (`build_corpus` of the demo), over and over, as JSON lines. Beside
`lmms-stream convert --workers 2`: a loop over the lines that writes each chat with MDSWriter in one process, and
litdata's `optimize` with 2 workers over byte ranges of the file. All write shards of 64 MB, with checksums where they
have them. The same command with a function of the user's that gives each row back (`--map`) is to have 0.7 of its
speed, and `--dedup exact` stands beside. Then with a lengths index, and tokenized: beside these, the tokenizer's batch
encode of the rendered chats alone, on the same cores. Seconds are those of whole commands, imports and the start of
workers among them; memory is the largest of any process of a command. It is at most 600 MiB for a file of 4 GB, too.

    python benchmarks/convert.py
    python benchmarks/convert.py --rows 50000 --rounds 1 --tokenized-rows 5000 --large-bytes 0
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
from measure import MIB, print_table, status_bytes, verdict

MIN_TIMES_LOOP = 1.6
MIN_SHARE_OF_TOKENIZER = 0.9
MIN_SHARE_WITH_MAP = 0.7
OWN = "def same(row):\n    return row\n"
MAX_MEMORY = 600 * MIB
SHARD_BYTES = 1 << 26
WORKERS = 2
_POLL_S = 0.02


# The tasks, each in a process of its own


def loop(source: str, target: str) -> None:
    """What one writes without us."""
    from streaming import MDSWriter

    columns = {"messages": "str", "media": "bytes"}
    with (
        Path(source).open("rb") as lines,
        MDSWriter(columns=columns, out=target, hashes=["xxh3_64"], size_limit=SHARD_BYTES) as writer,
    ):
        for line in lines:
            writer.write({"messages": orjson.dumps(orjson.loads(line)["messages"]).decode(), "media": b""})


def litdata(source: str, target: str) -> None:
    from litdata import optimize

    size = Path(source).stat().st_size
    ranges = [(source, size * part // 16, size * (part + 1) // 16) for part in range(16)]
    optimize(chats_between, ranges, output_dir=target, chunk_bytes=SHARD_BYTES, num_workers=WORKERS)


def chats_between(bounds: tuple[str, int, int]) -> Iterator[dict[str, Any]]:
    """The chats of the lines that begin in a range of a file."""
    path, first, stop = bounds
    with Path(path).open("rb") as file:
        if first:
            file.seek(first - 1)
            file.readline()
        while file.tell() < stop and (line := file.readline()):
            yield {"messages": orjson.dumps(orjson.loads(line)["messages"]).decode(), "media": b""}


def encode(source: str, tokenizer: str) -> None:
    """The tokenizer alone: rendered chats, a thousand at a time, on all cores; prints its own seconds."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    with Path(source).open("rb") as lines:
        texts = [loaded.apply_chat_template(orjson.loads(line)["messages"], tokenize=False) for line in lines]
    start = time.perf_counter()
    for first in range(0, len(texts), 1000):
        loaded.backend_tokenizer.encode_batch(texts[first : first + 1000], add_special_tokens=False)
    print(time.perf_counter() - start)


TASKS: dict[str, Callable[[str, str], None]] = {"loop": loop, "litdata": litdata, "encode": encode}


# How they are measured


def run(*command: str) -> tuple[float, int, str]:
    """Seconds of a command, the largest resident memory of any of its processes, and what it printed."""
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        peak, done = [0], threading.Event()
        watcher = threading.Thread(target=_watch, args=(process.pid, peak, done))
        watcher.start()
        output, errors = process.communicate()
        seconds = time.perf_counter() - start
        done.set()
        watcher.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{errors[-2000:]}")
    return seconds, peak[0], output


def _watch(pid: int, peak: list[int], done: threading.Event) -> None:
    import psutil

    while not done.wait(_POLL_S):
        try:
            processes = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
        except psutil.Error:
            continue
        peak[0] = max([peak[0], *(status_bytes(each).get("VmHWM", 0) for each in processes)])


def ours(source: Path, target: Path, *options: str) -> tuple[str, ...]:
    command = (sys.executable, "-m", "lmms_stream", "convert", str(source), str(target), "--overwrite")
    return (*command, "--workers", str(WORKERS), "--work", str(target.with_name("work")), *options)


def peer(task: str, source: Path, target: str) -> tuple[str, ...]:
    return sys.executable, __file__, "--task", task, str(source), target


def compare(
    title: str, source: Path, commands: dict[str, tuple[str, ...]], folder: Path, rounds: int
) -> dict[str, float]:
    """The table; the best seconds of each."""
    best: dict[str, float] = {}
    peaks: dict[str, int] = {}
    for _ in range(rounds):
        for name, command in commands.items():
            shutil.rmtree(folder / "out", ignore_errors=True)
            seconds, peak, _ = run(*command)
            best[name] = min(seconds, best.get(name, seconds))
            peaks[name] = max(peak, peaks.get(name, 0))
    size = source.stat().st_size
    with source.open("rb") as file:
        rows = sum(1 for _ in file)
    print_table(
        f"{title}: {rows:,} chats, {size / 1e6:,.0f} MB of JSON lines, {len(os.sched_getaffinity(0))} cores",
        ["", "seconds", "rows/s", "MB/s", "largest process, MiB"],
        [
            [name, f"{each:.1f}", f"{rows / each:,.0f}", f"{size / each / 1e6:,.0f}", f"{peaks[name] / MIB:,.0f}"]
            for name, each in best.items()
        ],
    )
    mine = next(iter(peaks))
    print(f"at most {MAX_MEMORY // MIB} MiB a process: {verdict(peaks[mine] <= MAX_MEMORY)}", flush=True)
    return best


def write_rows(folder: Path, counts: dict[Path, int]) -> Path:
    """Files of so many chats each; the tokenizer's folder."""
    from lmms_stream.tools.demo.corpus import build_corpus, train_tokenizer

    corpus = build_corpus(folder / "corpus")
    lines = corpus.functions.read_bytes().splitlines(keepends=True)
    for path, count in counts.items():
        with path.open("wb") as file:
            file.writelines(itertools.islice(itertools.cycle(lines), count))
    return train_tokenizer(corpus.texts, folder / "tokenizer")


def convert_large(lines: Path, num_bytes: int, folder: Path) -> None:
    """The table of a conversion of these lines over and over, until they have so many bytes."""
    large, data = folder / "large.jsonl", lines.read_bytes()
    with large.open("wb") as file:
        while file.tell() < num_bytes:
            file.write(data)
    compare("a large file", large, {"lmms-stream convert, raw": ours(large, folder / "out")}, folder, 1)
    large.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--tokenized-rows", type=int, default=600_000)
    parser.add_argument("--large-bytes", type=float, default=4e9, help="of the large file; 0: none")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--peers", choices=("all", "streaming"), default="all", help="litdata is in the extra bench")
    parser.add_argument("--folder", type=Path, help="where files are written; default: the temporary folder")
    parser.add_argument("--task", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.task:
        name, source, target = args.task
        TASKS[name](source, target)
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        rows, few = folder / "rows.jsonl", folder / "few.jsonl"
        tokenizer = str(write_rows(folder, {rows: args.rows, few: args.tokenized_rows}))
        out, own = folder / "out", folder / "own.py"
        own.write_text(OWN)
        commands = {
            f"lmms-stream convert, {WORKERS} workers": ours(rows, out),
            "with --map": ours(rows, out, "--map", f"{own}:same"),
            "with --dedup exact": ours(rows, out, "--dedup", "exact"),
            "a loop with MDSWriter": peer("loop", rows, str(out)),
        }
        if args.peers == "all":
            commands[f"litdata optimize, {WORKERS} workers"] = peer("litdata", rows, str(out))
        mine, mapped, _, plain, *others = compare("raw", rows, commands, folder, args.rounds).values()
        ahead = "".join(f", of litdata: {verdict(other > mine)} ({other / mine:.2f})" for other in others)
        print(f"{MIN_TIMES_LOOP} times the loop: {verdict(plain >= MIN_TIMES_LOOP * mine)} ({plain / mine:.2f}){ahead}")
        share = mine / mapped
        print(f"{MIN_SHARE_WITH_MAP} of the speed with --map: {verdict(share >= MIN_SHARE_WITH_MAP)} ({share:.2f})")
        if args.large_bytes:
            convert_large(few, int(args.large_bytes), folder)
        commands = {
            "with a lengths index": ours(few, out, "--tokenizer", tokenizer),
            "tokenized": ours(few, out, "--tokenizer", tokenizer, "--tokenize"),
        }
        best = compare("with a tokenizer", few, commands, folder, args.rounds)
        alone = min(float(run(*peer("encode", few, tokenizer))[2]) for _ in range(args.rounds))
        share = alone / best["tokenized"]
        print(
            f"the tokenizer alone: {alone:.1f} s; at least {MIN_SHARE_OF_TOKENIZER:.0%} of its speed: "
            f"{verdict(share >= MIN_SHARE_OF_TOKENIZER)} ({share:.0%})"
        )


if __name__ == "__main__":
    main()
