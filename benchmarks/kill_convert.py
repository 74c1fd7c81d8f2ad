"""Claim: a conversion that is killed at any moment ends, run again, in the same bytes as one that is not.

Each round starts `lmms-stream convert --workers 2` to a fresh target, kills all its processes at once (SIGKILL to the
process group) after a random share of the time that an uninterrupted run takes, runs the same command to its end, and
compares names and bytes of all files at the target with those of the uninterrupted run; nothing may be left in the work
folder. A run that ends before its moment is not counted: the round draws another. Once to a folder, once to S3.

The server is the one at S3_ENDPOINT_URL (with AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY); without it moto is started.
What is uploaded is removed again. The exit status is 1 when any round differs.

    python benchmarks/kill_convert.py
    python benchmarks/kill_convert.py --rounds 3 --rows 50000 --seed 7
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
import xxhash
from lmms_stream.storage.storage import open_storage
from measure import print_table, verdict
from s3 import server

SHARD_BYTES = 8_000_000
WORKERS = 2
LIMIT_S = 600.0
UNFINISHED, DATASET = "_lmms/unfinished.json", "_lmms/dataset.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """after_s: when it was killed. num_shards, stage: how far it was then. difference: what is wrong at the end."""

    after_s: float
    num_shards: int
    stage: str
    difference: str


def write_rows(path: Path, count: int) -> None:
    """Chats that all differ, of some 1 KB."""
    with path.open("wb") as file:
        for number in range(count):
            words = " ".join(f"word{(number * 31 + n) % 9973}" for n in range(60 + number % 100))
            messages = [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": words}]
            file.write(orjson.dumps({"messages": messages}) + b"\n")


def command(rows: Path, target: str, work: Path) -> list[str]:
    options = {"--workers": WORKERS, "--shard-size": SHARD_BYTES, "--work": work}
    given = [text for option, value in options.items() for text in (option, str(value))]
    return [sys.executable, "-m", "lmms_stream", "convert", str(rows), target, *given]


def run_to_end(rows: Path, target: str, work: Path) -> tuple[float, str]:
    """Seconds, and what it said if it failed."""
    start = time.monotonic()
    result = subprocess.run(
        command(rows, target, work),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        start_new_session=True,
        check=False,
    )
    return time.monotonic() - start, result.stderr[-1000:] if result.returncode else ""


def kill_after(rows: Path, target: str, work: Path, after_s: float) -> bool:
    """Whether the command was still at work when all of its processes were killed."""
    with subprocess.Popen(
        command(rows, target, work), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        with suppress(subprocess.TimeoutExpired):
            process.wait(after_s)
            return False
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait(LIMIT_S) == -signal.SIGKILL


def digests(target: str) -> dict[str, str]:
    """Name of every file at the target -> hash of its bytes."""
    storage = open_storage(target)
    names = [file.key for file in storage.list_objects("")]
    return {name: xxhash.xxh3_128(storage.read(name)).hexdigest() for name in names}


def stage(names: set[str]) -> str:
    if DATASET in names:
        return "whole, not released" if UNFINISHED in names else "finished"
    if "index.json" in names:
        return "committing"
    return "writing shards" if any(name.startswith("shard") for name in names) else "before the first shard"


def compare(found: dict[str, str], expected: dict[str, str], work: Path) -> str:
    differing = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    left = [path.name for path in work.rglob("*") if path.is_file()]
    parts = [f"differs in {', '.join(differing)}"] if differing else []
    return "; ".join(parts + ([f"leaves {', '.join(left)} in the work folder"] if left else []))


def remove(target: str) -> None:
    storage = open_storage(target)
    for file in storage.list_objects(""):
        storage.delete(file.key)


def one_round(
    rows: Path, target: str, work: Path, expected: dict[str, str], *, seconds: float, random: np.random.Generator
) -> Round:
    while not kill_after(rows, target, work, after_s := seconds * random.random()):
        remove(target)
    names = {file.key for file in open_storage(target).list_objects("")}
    _, failure = run_to_end(rows, target, work)
    if failure and stage(names) == "finished":  # it was killed between its last write and its end
        failure = ""
    difference = failure or compare(digests(target), expected, work)
    remove(target)
    num_shards = sum(name.startswith("shard") for name in names)
    return Round(after_s=after_s, num_shards=num_shards, stage=stage(names), difference=difference)


def measure(target: str, base: str, rows: Path, folder: Path, args: argparse.Namespace) -> tuple[list[str], bool]:
    """A line of the table, and whether every round ended in the same bytes."""
    number = ("folder", "S3").index(target)
    seconds, failure = run_to_end(rows, f"{base}/once", folder / "work")
    if failure:
        raise SystemExit(f"the uninterrupted run failed: {failure}")
    expected = digests(f"{base}/once")
    remove(f"{base}/once")
    total = sum(name.startswith("shard") for name in expected)
    rounds = []
    for each in range(args.rounds):
        random = np.random.default_rng([args.seed, number, each])
        target = f"{base}/round-{each}"
        rounds.append(one_round(rows, target, folder / "work", expected, seconds=seconds, random=random))
        done = rounds[-1]
        print(
            f"{target}, round {each + 1}, seed [{args.seed}, {number}, {each}]: killed after {done.after_s:.2f} s, "
            f"{done.stage}, {done.num_shards} of {total} shards there: {done.difference or 'the same bytes'}",
            flush=True,
        )
    same = sum(not each.difference for each in rounds)
    stages = [sum(each.stage == name for each in rounds) for name in ("before the first shard", "writing shards")]
    times = [each.after_s for each in rounds]
    line = [target, f"{seconds:.1f}", f"{total}", f"{min(times):.1f} to {max(times):.1f}"]
    return [*line, *map(str, stages), f"{len(rounds) - sum(stages)}", f"{same} of {len(rounds)}"], same == len(rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--bucket", help="made if it is not there")
    parser.add_argument("--folder", type=Path, help="where files are written; default: the temporary folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name, server(args.bucket) as (_, bucket):
        os.environ["TMPDIR"] = name
        folder, rows = Path(name), Path(name, "rows.jsonl")
        write_rows(rows, args.rows)
        prefix = f"s3://{bucket}/lmms-stream-benchmark-{uuid.uuid4().hex[:12]}"
        targets = {"folder": str(folder / "out"), "S3": prefix}
        results = [measure(target, base, rows, folder, args) for target, base in targets.items()]
        columns = ["to", "seconds", "shards", "killed after, s", "no shard yet", "some shards", "later", "same bytes"]
        title = f"{args.rows:,} chats, {rows.stat().st_size / 1e6:,.0f} MB, {args.rounds} rounds, seed {args.seed}"
        print_table(title, columns, [line for line, _ in results])
    met = all(is_same for _, is_same in results)
    print(f"the same bytes after every kill: {verdict(met)}", flush=True)
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
