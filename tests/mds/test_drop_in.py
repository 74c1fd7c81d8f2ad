"""Our StreamingDataset beside MosaicML's: the same samples, in the same order, on each rank and worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from streaming import MDSWriter

from ..conftest import last_words
from ..jobs.launcher import run_job
from ..rounds import LONG, rounds
from .drop_in_cases import CASES, SIZES

EPOCHS = json.loads(Path(__file__).with_name("drop_in_epochs.json").read_text())
NUM_PARTS = rounds(1, 4)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("drop-in")
    first = 0
    for name, size in (*SIZES.items(), ("zipped", SIZES["a"])):
        compression = "zstd" if name == "zipped" else None
        with MDSWriter(
            columns={"number": "int"}, out=str(root / name), hashes=["sha1"], size_limit=200, compression=compression
        ) as writer:
            for number in range(first, first + size):
                writer.write({"number": number})
        first += size
    return root


def runs(world_size: int) -> list[str]:
    """Cases, each with a number of workers: in short rounds on one rank alone, in long ones on 1, 2 and 4.

    Each case runs with two numbers of workers on one rank, with another on two ranks and with the fourth on four.

    MosaicML's class keeps things under names that all programs of a machine share, so it runs in long rounds alone. In
    short ones ours is compared with what it gave (drop_in_epochs.json, of release 0.13.0), without its package, with
    which streams are registered.
    """
    if not LONG:
        others = ("replication", "stream name")
        return [f"{name}:{0 if number % 6 else 2}" for number, name in enumerate(CASES) if name not in others]
    names = [name for name in CASES if name != "replication" or world_size > 1]
    shifts = {1: (0, 1), 2: (2,), 4: (3,)}[world_size]
    return [f"{name}:{(number + shift) % 4}" for number, name in enumerate(names) for shift in shifts]


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("part", range(NUM_PARTS))
@pytest.mark.parametrize("world_size", [1, 2, 4][: rounds(1, 3)])
def test_every_keyword_gives_the_samples_of_the_parent_and_states_load_in_both_directions(
    data: Path, tmp_path: Path, world_size: int, part: int
) -> None:
    asked = runs(world_size)[part::NUM_PARTS]
    done = run_job(world_size, "tests.mds.drop_in_job", str(data), str(tmp_path), *asked, timeout_s=rounds(300, 900))
    assert done.returncode == 0, last_words(done.stderr)
    for rank in range(world_size):
        read: dict[str, Any] = json.loads((tmp_path / f"{rank}.json").read_text())
        assert list(read) == asked
        for said, found in read.items():
            parent, ours = found["parent"] if LONG else EPOCHS[said], found["ours"]
            assert ours["epochs"] == parent["epochs"], (rank, said)
            assert ours["length"] == parent["length"], (rank, said)
            assert parent["end"].items() <= ours["end"].items(), (rank, said)
            assert sum(map(len, ours["epochs"][0])) > 0, said
            assert ("resumed" in ours) == LONG
            if "resumed" in ours:
                assert ours["resumed"] == parent["resumed"], (rank, said)
                assert ours["after end"] == parent["after end"], (rank, said)
                if world_size == 1:  # several ranks pad what is left with other repeats than they pad the epoch
                    for count, rest, _ in ours["resumed"]:
                        assert parent["epochs"][1][count:] == rest, (rank, said)
