"""Datasets that are made anew from a dataset: whether the identity stays, and how the names of samples map.

Each is made by the command that users have, and the ledger of a run of the old dataset is asked for the names.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lmms_stream.converters.append import append
from lmms_stream.converters.convert import convert
from lmms_stream.converters.exporting.export import export_dataset
from lmms_stream.errors import ConfigError, CursorError
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.storage.local import LocalStorage
from lmms_stream.tools.ledger.opening import RunHistory, open_history
from lmms_stream.tools.ledger.run import Ledger

from tests.conftest import run_cli

from ..rounds import LONG
from .test_names import MEASURED, write_config, write_rows

NUM_ROWS = 120


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A dataset of the rows of two files, shuffled."""
    files = [write_rows(tmp_path / f"rows{number}.jsonl", 60 * number, 60 * number + 60) for number in (0, 1)]
    convert(list(files), str(tmp_path / "data"), shuffle_seed=1, **MEASURED)
    return tmp_path / "data"


def history_of(data: Path, folder: Path) -> RunHistory:
    return open_history(str(write_config(folder, {"chats": data}, max_steps=9)))


def tokens_at(url: Path, sample_ids: list[int]) -> list[list[int]]:
    dataset = PackedStreamingDataset(str(url))
    return [dataset[number]["input_ids"].tolist() for number in sample_ids]


def command(*arguments: str) -> None:
    done = run_cli(*arguments)
    assert done.returncode == 0, done.stderr


def resharded(data: Path, to: Path) -> None:
    command("convert", str(data), str(to), "--shard-size", "2kb", "--workers", "1")


def recompressed(data: Path, to: Path) -> None:
    command("convert", str(data), str(to), "--shard-size", "4kb", "--compression", "zstd", "--workers", "1")


def reshuffled(data: Path, to: Path) -> None:
    command("convert", str(data), str(to), "--shuffle-seed", "8", "--workers", "1")


def merged(data: Path, to: Path) -> None:
    """Beside another dataset, behind it."""
    convert([write_rows(to.parent / "x.jsonl", 500, 530)], str(to / "first"), **MEASURED)
    shutil.copytree(data, to / "second")
    command("merge", str(to), str(to / "first"), str(to / "second"))


def in_splits(data: Path, to: Path) -> None:
    command("convert", str(data), str(to.parent / "splits"), "--split", "x=0.9", "y=0.1", "--workers", "1")
    shutil.copytree(to.parent / "splits" / "x", to)


@pytest.mark.parametrize(
    "make", [resharded, recompressed, reshuffled, merged, in_splits] if LONG else [resharded, merged]
)
def test_samples_of_a_dataset_that_is_stored_anew_are_found_by_their_rows(
    data: Path, tmp_path: Path, make: Callable[[Path, Path], None]
) -> None:
    history, new = history_of(data, tmp_path), tmp_path / "new"
    make(data, new)
    ledger = Ledger(history)
    ids = [0, 7, 59, 60, NUM_ROWS - 1]
    names = ledger.origins.renamed("chats", ids, url=str(new))
    offset = 30 if make is merged else 0
    if make in (resharded, recompressed, merged):
        assert names == [[number + offset] for number in ids]
    else:
        assert names != [[number] for number in ids]
    there = [(old, new_id) for old, found in zip(ids, names, strict=True) for new_id in found]
    assert len(there) == len(ids) or make is in_splits
    assert tokens_at(data, [old for old, _ in there]) == tokens_at(new, [new_id for _, new_id in there])
    with pytest.raises(CursorError, match="The run's ids belong to the dataset of that time"):
        Ledger(history, urls={"chats": str(new)})


def test_a_copy_and_another_lengths_index_are_the_same_dataset(data: Path, tmp_path: Path) -> None:
    history = history_of(data, tmp_path)
    shutil.copytree(data, tmp_path / "copy")
    command("index", str(tmp_path / "copy"))
    copied = Ledger(history, urls={"chats": str(tmp_path / "copy")})
    assert copied.identities == Ledger(history).identities
    assert copied.origins.renamed("chats", [3, 99], url=str(tmp_path / "copy")) == [[3], [99]]


def test_a_dataset_that_went_through_files_has_no_names_of_the_old_one(data: Path, tmp_path: Path) -> None:
    """MosaicML's own writer, or an export, keeps no rows: names do not map, and that is said."""
    history = history_of(data, tmp_path)
    export_dataset(str(data), str(tmp_path / "rows"), format="jsonl")
    convert([tmp_path / "rows"], str(tmp_path / "back"), **MEASURED)
    assert Ledger(history).origins.renamed("chats", [7], url=str(tmp_path / "back")) == [[]]  # of other files
    for name in ("provenance.npy", "provenance.json"):
        (tmp_path / "back" / "_lmms" / name).unlink()
    with pytest.raises(ConfigError, match="has no record of the sources of its samples, so ids of chats do not"):
        Ledger(history).origins.renamed("chats", [7], url=str(tmp_path / "back"))


def test_a_grown_dataset_is_read_as_the_run_had_it_and_opened_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three parts; runs of one, of two as num_parts, and of all with the last part as a source of its own."""
    files = [tmp_path / f"rows{number}.jsonl" for number in (0, 1)]
    for number in (1, 2, 3):
        files.append(write_rows(tmp_path / f"more{number}.jsonl", 1000 * number, 1000 * number + 20 * number))
        append(list(map(str, files)), str(data), **MEASURED)
    parts = ["datasets.chats.num_parts=1"]
    old = open_history(str(write_config(tmp_path, {"chats": data}, max_steps=9)), overrides=parts)
    assert old.stretches[0]["sources"]["chats"]["num_parts"] == 1
    two = {"chats": data, "new": data / "parts" / "00002"}
    new = open_history(str(write_config(tmp_path, two, max_steps=9)), overrides=parts)
    history = RunHistory(where="both", stretches=[*old.stretches, *new.stretches], stop=4, num_trained=4)
    reads: list[str] = []
    read = LocalStorage.read

    def counted(storage: LocalStorage, key: str) -> bytes:
        reads.append(f"{storage.url}/{key}")
        return read(storage, key)

    monkeypatch.setattr(LocalStorage, "read", counted)
    ledger = Ledger(history)
    packs = ledger.step(2).packs
    assert reads.count(f"{data}/index.json") == 1
    assert ledger.num_added == {"chats": 100}
    assert ledger.amounts()["chats"].num_unseen + ledger.amounts()["chats"].num_seen == NUM_ROWS + 20
    assert {pack.source for pack in packs} <= {"chats", "new"}
    (first,) = ledger.origins.samples_of_row("more2.jsonl", 1)  # which the grown dataset has as well
    assert first == ("new", 0)
    drop = tmp_path / "drop.txt"
    drop.write_text("more2.jsonl:1\nmore1.jsonl:20\n")
    assert ledger.listed(drop) == [("chats", NUM_ROWS + 19), ("new", 0)]
    with pytest.raises(
        ConfigError, match=r"more3\.jsonl:1 is not a sample of the run \(chats has grown since, by a part"
    ):
        ledger.origins.samples_of_row("more3.jsonl", 1)
    unsaid: list[dict[str, Any]] = json.loads(json.dumps(history.stretches))
    for stretch in unsaid:
        for source in stretch["sources"].values():
            del source["num_parts"]  # as earlier releases did not say it
    reads.clear()
    earlier = Ledger(RunHistory(where="earlier", stretches=unsaid, stop=4, num_trained=4))
    assert [pack.sample_ids.tolist() for pack in earlier.step(2).packs] == [p.sample_ids.tolist() for p in packs]
    assert reads.count(f"{data}/index.json") == 1
