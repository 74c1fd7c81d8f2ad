"""Claim: three nodes convert chats at least 2.2 times as fast as one, with what makes one dataset of their parts.

A node is a control group whose processes get a share of a core (`--share`), so that two cores hold three nodes and
what else the machine does. One node runs `lmms-stream convert` with a lengths index; two and three run
`--part I/N`, each one part at the same time, and then one of them the same command without it. Seconds are those of
whole commands, imports among them; the parts' are those of the slowest. What all wrote is compared, byte for byte.
Beside each stands the share of a core that its nodes really got until the slowest part ended: where it is far
less than was asked for, the machine was busy, and the figures say little.

It needs root, for control groups (either version).

    python benchmarks/cluster.py
    python benchmarks/cluster.py --rows 40000 --share 0.2
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from measure import print_table, verdict

from convert import write_rows

MIN_TIMES = {2: 1.6, 3: 2.2}  # as fast as one node
PERIOD_US = 20_000
NUM_FILES = 12  # which one, two and three nodes divide evenly
LIMIT_S = 3600.0
V1, ACCOUNTS, V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/cpuacct"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Node:
    """A control group. accounts: the one that counts its seconds, another folder in version 1."""

    folder: Path
    accounts: Path

    def start(self, command: Sequence[str], *, log: Path) -> subprocess.Popen[bytes]:
        joined = " && ".join(f"echo $$ > {folder}/cgroup.procs" for folder in {self.folder, self.accounts})
        script = f'{joined} && exec "$@"'
        with log.open("ab") as file:
            return subprocess.Popen(
                ["sh", "-c", script, "sh", *command], stdout=file, stderr=file, stdin=subprocess.DEVNULL,
                start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    @property
    def cpu_s(self) -> float:
        """Seconds of a core that its processes have had."""
        if self.accounts == self.folder:
            return int((self.folder / "cpu.stat").read_text().split()[1]) / 1e6
        return int((self.accounts / "cpuacct.usage").read_text()) / 1e9


@contextmanager
def nodes(count: int, *, share: float) -> Iterator[list[Node]]:
    is_v2 = (V2 / "cgroup.controllers").exists()
    made: list[Path] = []
    found: list[Node] = []
    try:
        for number in range(count):
            name = f"lmms-benchmark-{os.getpid()}-{number}"
            folder = (V2 if is_v2 else V1) / name
            accounts = folder if is_v2 or not ACCOUNTS.exists() else ACCOUNTS / name
            for each in (folder, accounts):
                if not each.exists():
                    each.mkdir()
                    made.append(each)
            quota = round(PERIOD_US * share)
            if is_v2:
                (folder / "cpu.max").write_text(f"{quota} {PERIOD_US}")
            else:
                (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (folder / "cpu.cfs_quota_us").write_text(str(quota))
            found.append(Node(folder, accounts))
        yield found
    except OSError as error:
        raise SystemExit(f"control groups cannot be made here ({error}): run this as root") from error
    finally:
        for folder in made:
            folder.rmdir()


def done(jobs: Sequence[subprocess.Popen[bytes]], log: Path) -> None:
    for job in jobs:
        if job.wait(LIMIT_S):
            raise SystemExit(log.read_text()[-2000:])


def by_parts(count: int, command: list[str], *, share: float, log: Path) -> tuple[float, float, float]:
    """Seconds of the parts and of the last command, 0 for one node; and the share of a core that each node had."""
    with nodes(count, share=share) as found:
        start = time.perf_counter()
        jobs = [
            node.start([*command, *(["--part", f"{number}/{count}"] if count > 1 else [])], log=log)
            for number, node in enumerate(found)
        ]
        done(jobs, log)
        parts = time.perf_counter() - start
        had = sum(node.cpu_s for node in found) / parts / count
        if count == 1:
            return parts, 0.0, had
        start = time.perf_counter()
        done([found[0].start(command, log=log)], log)
        return parts, time.perf_counter() - start, had


def same(one: Path, other: Path) -> bool:
    return contents(one) == contents(other)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=240_000)
    parser.add_argument("--share", type=float, default=0.4, help="of a core, for each node")
    parser.add_argument("--folder", type=Path, help="where files are written; default: the temporary folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        (folder / "rows").mkdir()
        files = {folder / "rows" / f"{number:02}.jsonl": args.rows // NUM_FILES for number in range(NUM_FILES)}
        tokenizer = str(write_rows(folder, files))
        convert = [sys.executable, "-m", "lmms_stream", "convert", str(folder / "rows")]
        rows, totals, are_same = [], {}, True
        for count in (1, 2, 3):
            target = folder / f"of-{count}"
            command = [*convert, str(target), "--tokenizer", tokenizer, "--workers", "1"]
            command += ["--work", str(folder / f"work-{count}")]
            parts, last, had = by_parts(count, command, share=args.share, log=folder / "log")
            totals[count] = parts + last
            are_same = are_same and same(folder / "of-1", target)
            times = totals[1] / totals[count]
            cells = [
                f"{parts:.1f}",
                f"{last:.1f}" if last else "",
                f"{totals[count]:.1f}",
                f"{times:.2f}",
                f"{had:.2f}",
            ]
            rows.append([f"{count} node{'s' * (count > 1)}", *cells])
        print_table(
            f"{args.rows:,} chats with a lengths index, {args.share:g} of a core a node",
            ["", "parts, s", "last command, s", "all, s", "times as fast", "of a core, had"],
            rows,
        )
        for count, least in MIN_TIMES.items():
            times = totals[1] / totals[count]
            print(f"{count} nodes at least {least} times as fast as one: {verdict(times >= least)} ({times:.2f})")
        print(f"the same bytes: {verdict(are_same)}")


if __name__ == "__main__":
    main()
