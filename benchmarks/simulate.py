"""Claim: nodes download the bytes that `simulate` foretells, and wait and take as long to within 15 %.

Nodes are network namespaces of this machine with links of a rate, and a real S3 server behind them; each has a cache of
its own, and two ranks with two loader workers, which read real shards. A step is a sleep that all ranks begin
together. Measured are the requests that the server lists, and the clock from the beginning of the first epoch, when
workers are still to be started, to the end of the last step. Under a limit what gives way depends on when each worker
looks, so the downloads may differ a little. The first step is told by itself: it waits for the shuffle blocks at hand,
and what starting workers takes is in what was measured of it.

Needs root, and a machine with half of its CPU time to spare: how much there was is in the last column.

    sudo python benchmarks/simulate.py             (on a machine that is busy: sudo chrt -r 1 python …)
    sudo python benchmarks/simulate.py --cases 2
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from measure import print_table, verdict

ROOT = str(Path(__file__).resolve().parent.parent)
MAX_DIFFERENCE = 0.15
MB = 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, help="do the first so many; default: all")
    args = parser.parse_args()
    sys.path.insert(0, ROOT)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
    from tests.cluster.case import CASES
    from tests.cluster.namespaces import what_is_missing
    from tests.cluster.truth import store_of

    if reason := what_is_missing():
        raise SystemExit(reason)
    rows, are_exact, differences = [], True, [0.0]
    with tempfile.TemporaryDirectory() as folder, store_of(4, Path(folder)) as do:
        for case in CASES[: args.cases]:
            told, found = do(case)
            num_found = sum(sum(each.values()) for each in found.downloads)
            are_exact &= case.cache is not None or [each.download_bytes for each in told.nodes] == found.num_bytes
            waits, times = (told.first_wait_s + told.wait_s, found.wait_s), (told.total_s, found.total_s)
            differences += [abs(real / expected - 1) for expected, real in (waits, times)]
            rows.append(
                [
                    f"{case.name}, {case.rate}",
                    f"{told.num_downloads} / {num_found}",
                    f"{told.download_bytes / MB:.1f} / {sum(found.num_bytes) / MB:.1f}",
                    f"{told.first_wait_s:.1f} / {found.waits_s[0]:.1f}",
                    *(f"{expected:.1f} / {real:.1f} ({real / expected - 1:+.1%})" for expected, real in (waits, times)),
                    f"{found.idle:.0%}",
                ]
            )
    columns = ["foretold / measured", "downloads", "MB", "first step s", "waiting s", "time s", "CPU idle"]
    print_table("Nodes x 2 ranks x 2 workers behind links of a rate", columns, rows)
    print(f"without a cache limit each node downloads the bytes that were foretold: {verdict(are_exact)}")
    print(f"waiting and time within 15 %: {verdict(max(differences) <= MAX_DIFFERENCE)} ({max(differences):.1%})")


if __name__ == "__main__":
    main()
