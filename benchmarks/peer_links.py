"""Claim: where the store's link is the limit, nodes that share a shuffle read an epoch sooner with peers, from N times
fewer bytes of the store.

4 nodes of this machine, network namespaces with links of 1 Gbit/s and a real S3 server behind one link of 24 Mbit/s,
read one epoch of 50 shards of 1 MiB in one shuffle (num_canonical_nodes 1): first each for itself, then taking shards
from each other. Each node has a cache of its own, and a rank with a loader worker; a step is a sleep of 0.1 s that all
ranks begin together. Needs root.

    sudo python benchmarks/peer_links.py
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
from pathlib import Path

from measure import print_table, verdict

ROOT = str(Path(__file__).resolve().parent.parent)
LEAST = 2.0  # times sooner, and fewer bytes
MB = 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store-rate", default="24mbit", help="of the store's link, which all nodes share")
    args = parser.parse_args()
    sys.path.insert(0, ROOT)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
    from tests.cluster.case import PEERS
    from tests.cluster.namespaces import what_is_missing
    from tests.cluster.truth import store_of

    if reason := what_is_missing():
        raise SystemExit(reason)
    rows, times, num_bytes = [], [], []
    with tempfile.TemporaryDirectory() as folder, store_of(PEERS.num_nodes, Path(folder)) as do:
        for peers in (False, True):
            told, found = do(dataclasses.replace(PEERS, peers=peers, store_rate=args.store_rate))
            times.append(found.total_s)
            num_bytes.append(sum(found.num_bytes))
            downloads = sum(sum(each.values()) for each in found.downloads)
            rows.append(
                [
                    "with peers" if peers else "without",
                    f"{told.num_downloads} / {downloads}",
                    f"{told.download_bytes / MB:.1f} / {num_bytes[-1] / MB:.1f}",
                    f"{found.wait_s:.1f}",
                    f"{found.total_s:.1f}",
                    f"{found.idle:.0%}",
                ]
            )
            print(*rows[-1], flush=True)
    columns = ["", "from the store (told / found)", "MB (told / found)", "waiting s", "time s", "CPU idle"]
    print_table(f"{PEERS.num_nodes} nodes, one shuffle, the store behind {args.store_rate}", columns, rows)
    fewer, sooner = num_bytes[0] / num_bytes[1], times[0] / times[1]
    kept = verdict(min(fewer, sooner) >= LEAST)
    print(f"{fewer:.2f} times fewer bytes from the store, {sooner:.2f} times sooner: {kept}")


if __name__ == "__main__":
    main()
