"""Claim: a loader worker that makes packs with images has no more memory after 10^4 of them than after 10^3.

Counted, and what counts as no growth, is as in memory.py; the shared pages are the blocks in which media go to the
loader, and are listed. The packs hold three or four chats with an image of a size of its own each, in one of some
thousand samples that are read epoch after epoch.

    python benchmarks/vision_memory.py
    python benchmarks/vision_memory.py --packs 1000 --first 200
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from measure import THREAD_SETTINGS, in_fresh_process
from memory import Memory, memory_of, show
from photographs import save_tiny_processor, varied_chats, write_mds
from vision_training import loader_of, processor_of

GLOBAL_BATCH = 4
SIDES, WORDS = (56, 337), (4, 60)  # pixels of an image's sides; words of an answer
SHARD_BYTES = 4_000_000


def write_dataset(folder: Path, samples: int) -> None:
    from lmms_stream.mds.measuring import index_dataset

    save_tiny_processor(folder / "processor")
    answers = np.random.default_rng(0).integers(*WORDS, 1000).tolist()
    write_mds(folder / "chats", varied_chats(samples, sides=SIDES, answers=answers), shard_bytes=SHARD_BYTES)
    index_dataset(str(folder / "chats"), processor_of(folder), num_workers=1)


def read(folder: Path, packing_length: int, counts: Sequence[int]) -> dict[str, list[Memory]]:
    """Memory of the worker and of its consumer after each of `counts` packs."""
    loader = loader_of(folder, "chats", packing_length=packing_length, global_batch=GLOBAL_BATCH, num_workers=1)
    measured: dict[str, list[Memory]] = {"consumer": [], "worker": []}
    for number, _ in enumerate(loader, 1):
        if number in counts:
            (worker,) = multiprocessing.active_children()
            measured["consumer"].append(memory_of("self", number))
            measured["worker"].append(memory_of(worker.pid or 0, number))
        if number == counts[-1]:
            break
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packs", type=int, default=10**4)
    parser.add_argument("--first", type=int, default=10**3, help="packs after which memory is to grow no more")
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--packing-length", type=int, default=512)
    parser.add_argument("--folder", type=Path, help="where the shards are written; default: the temporary folder")
    args = parser.parse_args()
    os.environ.update(dict.fromkeys(THREAD_SETTINGS, "1") | {"TOKENIZERS_PARALLELISM": "false"})
    counts = np.unique(np.geomspace(args.first, args.packs, 4).round().astype(int)).tolist()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        os.environ["TMPDIR"] = name
        in_fresh_process(write_dataset, Path(name), args.samples)
        measured, _ = in_fresh_process(read, Path(name), args.packing_length, counts)
    show(measured, f"{args.samples:,} chats with an image each in packs of {args.packing_length}, over and over")


if __name__ == "__main__":
    main()
