"""Claim: our StreamingDataset is as fast as MosaicML's with the same keywords, and our MDSWriter as its, within 5 %.

In turn on one core, each in a process that has done its imports: writing samples, opening a dataset, its first sample
by each of two shuffles, an epoch, samples at random places, the first sample after a resume in the middle of an epoch,
an epoch from an S3 server (the one at S3_ENDPOINT_URL, else moto) into an empty folder, and the memory of an epoch.

    python benchmarks/drop_in.py
    python benchmarks/drop_in.py --samples 20000 --rounds 1
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from lmms_stream.storage.storage import open_storage
from lmms_stream.tools.demo.endpoint import BUCKET, s3_endpoint
from measure import MIB, in_fresh_process, keep_to_one_core, print_table, verdict

WITHIN = 1.05
PACKAGES = ("lmms_stream", "streaming")
IMPORTED = ("torch", "streaming", "lmms_stream.mds.mosaic", "lmms_stream.converters.writing.mosaic_writers")
COLUMNS = {"id": "int", "text": "str", "ids": "ndarray:int32"}
BATCH = 16


def of(package: str) -> Any:
    """The package; ours, for which `streaming` is not imported, from its own modules."""
    if package == "streaming":
        import streaming

        return streaming
    from lmms_stream.converters.writing import mosaic_writers
    from lmms_stream.mds import mosaic

    mosaic.MDSWriter = mosaic_writers.MDSWriter  # type: ignore[attr-defined]
    return mosaic


def write(package: str, folder: Path, num_samples: int) -> float:
    ids = np.arange(400, dtype=np.int32)
    start = time.perf_counter()
    with of(package).MDSWriter(out=str(folder), columns=COLUMNS, hashes=["xxh3_64"], size_limit=1 << 22) as writer:
        for number in range(num_samples):
            writer.write({"id": number, "text": "some words " * (number % 20), "ids": ids[: 20 + number % 380]})
    return time.perf_counter() - start


def opened(package: str, **keywords: Any) -> Any:
    warnings.simplefilter("ignore")
    return of(package).StreamingDataset(batch_size=BATCH, shuffle=True, **keywords)


def opening(package: str, folder: str) -> float:
    start = time.perf_counter()
    opened(package, local=folder)
    return time.perf_counter() - start


def first_sample(package: str, folder: str, shuffle: str, position: int) -> float:
    dataset = opened(package, local=folder, shuffle_algo=shuffle, num_canonical_nodes=1)
    start = time.perf_counter()
    if position:
        dataset.load_state_dict(dataset.state_dict(position, True))
    next(iter(dataset))
    return time.perf_counter() - start


def epoch(package: str, local: str, remote: str | None) -> float:
    dataset = opened(package, local=local, remote=remote)
    start = time.perf_counter()
    count = sum(1 for _ in dataset)
    assert count >= dataset.num_samples
    return time.perf_counter() - start


def random_samples(package: str, folder: str, count: int) -> float:
    dataset = opened(package, local=folder)
    places = np.random.default_rng(0).integers(0, dataset.num_samples, count).tolist()
    start = time.perf_counter()
    for place in places:
        dataset[place]
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    keep_to_one_core()
    with tempfile.TemporaryDirectory() as root, s3_endpoint():
        rows = compared(Path(root), args.samples, args.rounds)
    print_table(
        f"{args.samples} samples, best of {args.rounds} rounds in turn",
        ["", "ours", "MosaicML's", "ours / MosaicML's", ""],
        rows,
    )


def compared(root: Path, num_samples: int, rounds: int) -> list[list[str]]:
    whole = root / "whole"
    write("lmms_stream", whole, num_samples)
    url = f"s3://{BUCKET}/drop-in-{uuid.uuid4().hex}"
    store = open_storage(url)
    for path in sorted(whole.iterdir()):
        store.upload(path, path.name)
    fresh = lambda name: str(root / f"{name}-{uuid.uuid4().hex}")  # noqa: E731
    few = max(1, num_samples // 10)
    tasks: dict[str, Callable[[str], tuple[Callable[..., float], tuple[Any, ...]]]] = {
        "writing": lambda package: (write, (package, Path(fresh("written")), num_samples)),
        "opening": lambda package: (opening, (package, str(whole))),
        "first sample, py1e": lambda package: (first_sample, (package, str(whole), "py1e", 0)),
        "first sample, py2s": lambda package: (first_sample, (package, str(whole), "py2s", 0)),
        "first sample after a resume": lambda package: (first_sample, (package, str(whole), "py1e", num_samples // 2)),
        "an epoch": lambda package: (epoch, (package, str(whole), None)),
        "samples at random": lambda package: (random_samples, (package, str(whole), few)),
        "an epoch from S3": lambda package: (epoch, (package, fresh("copies"), url)),
    }
    try:
        rows = []
        for name, task in tasks.items():
            seconds: dict[str, list[float]] = {package: [] for package in PACKAGES}
            memory: dict[str, int] = {}
            for _ in range(rounds):
                for package in PACKAGES:
                    call, arguments = task(package)
                    found, peak = in_fresh_process(partial(call), *arguments, imported=IMPORTED)
                    seconds[package].append(found)
                    memory[package] = peak.anonymous
            rows.append(_row(name, *(min(seconds[package]) for package in PACKAGES), unit="s"))
            if name == "an epoch":
                rows.append(
                    _row(
                        "its private memory, imports included",
                        *(memory[package] / MIB for package in PACKAGES),
                        unit="MiB",
                    )
                )
        return rows
    finally:
        for each in store.list_objects(""):
            store.delete(each.key)
        shutil.rmtree(root, ignore_errors=True)


def _row(name: str, ours: float, theirs: float, *, unit: str) -> list[str]:
    return [
        name,
        f"{ours:.3g} {unit}",
        f"{theirs:.3g} {unit}",
        f"{ours / theirs:.2f}",
        verdict(ours <= WITHIN * theirs),
    ]


if __name__ == "__main__":
    main()
