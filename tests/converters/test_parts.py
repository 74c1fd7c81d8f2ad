"""Conversions in parts, each for itself: together the bytes of one machine's conversion."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.cli.convert import check_part
from lmms_stream.converters.convert import convert
from lmms_stream.converters.options import DEFAULT_SHARD_BYTES
from lmms_stream.converters.part import PartReport, convert_part
from lmms_stream.converters.stored.verify import verify_dataset
from lmms_stream.converters.writing.reading import Part, Share
from lmms_stream.errors import ConfigError, DataError, StorageError
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.storage.storage import open_storage

from ..conftest import prefix_of, run_cli
from ..rounds import LONG, in_long_rounds
from .held import LIMIT_S, chat
from .test_convert_runs import convert_command, written

NUM_CHATS = 1200
SIZES: dict[str, Any] = {"unit_bytes": 60_000, "shard_bytes": 1 << 16, "num_workers": 1}


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of several units."""
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    path.write_text("".join(json.dumps(chat(number % 1000)) + "\n" for number in range(NUM_CHATS)))
    return path


def convert_parts(sources: Sequence[str | Path], target: str, count: int, **options: Any) -> list[PartReport]:
    """Each part, the last first, as whole scripts of an array may end in any order."""
    return [convert_part(sources, target, Part(number, count), **options) for number in reversed(range(count))]


WAYS: dict[str, dict[str, Any]] = {
    "as they come": {},
    "without duplicates, in a random order": {"dedup": "exact", "shuffle_seed": 1, "compression": "zstd"},
    "in splits, some too long": {"splits": {"train": 0.8, "test": 0.2}, "longest": 120},
    "end to end": {"concat": 512, "limit": 1000},
    "in shards of equally many": {"num_shards": 5, "tokenize": True, "shard_bytes": DEFAULT_SHARD_BYTES},
}


@pytest.mark.parametrize("way", WAYS if LONG else [*WAYS][1:2])
def test_parts_make_the_bytes_of_one_machine(
    chats: Path, chat_processor: ChatProcessor, tmp_path: Path, way: str
) -> None:
    options = SIZES | {"processor": chat_processor} | WAYS[way]
    one, many = str(tmp_path / "one"), str(tmp_path / "many")
    convert([chats], one, **options)
    reports = convert_parts([chats], many, 3, **options)
    assert min(report.num_units or 0 for report in reports) >= 1
    with pytest.raises(StorageError, match=r"index\.json|no dataset|does not exist"):  # nobody takes it for one
        verify_dataset(f"{many}/train" if "splits" in options else many)
    report = convert([chats], many, **options)
    assert not report.was_there
    assert written(many) == written(one)
    assert not any("encoded" in path.name for path in Path(many).rglob("*"))


def test_sources_of_a_store_are_each_fetched_by_one_part(
    chats: Path, tmp_path: Path, s3: str, request: pytest.FixtureRequest
) -> None:
    base = f"{s3}/{prefix_of(request)}"
    store = open_storage(f"{base}/sources")
    lines = chats.read_bytes().splitlines(keepends=True)
    for number in range(4):
        data = b"".join(lines[number::4])
        store.write(
            f"{number}.jsonl.gz" if number % 2 else f"{number}.jsonl", gzip.compress(data) if number % 2 else data
        )
    convert([f"{base}/sources"], f"{base}/one", **SIZES)
    options = SIZES | {"work": tmp_path}
    convert_parts([f"{base}/sources"], f"{base}/many", 3, **options)
    convert([f"{base}/sources"], f"{base}/many", **options)
    assert written(f"{base}/many") == written(f"{base}/one")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    with pytest.raises(ConfigError, match=r"1\.jsonl\.gz is fetched whole, to a folder that all nodes must see: leave"):
        convert_part([f"{base}/sources"], f"{base}/ray", Part(0, 1), engine="ray", **options)


def test_stored_samples_are_moved_in_parts(chats: Path, chat_processor: ChatProcessor, tmp_path: Path) -> None:
    stored = str(tmp_path / "stored")
    convert([chats], stored, processor=chat_processor, **SIZES)
    one, many = str(tmp_path / "one"), str(tmp_path / "many")
    options: dict[str, Any] = {"shard_bytes": 1 << 17, "shuffle_seed": 3, "num_workers": 1}
    convert([stored], one, **options)
    convert_parts([stored], many, 2, **options)
    convert([stored], many, **options)
    assert written(many) == written(one)


@in_long_rounds
def test_a_part_that_is_killed_goes_on_to_the_same_bytes(
    tmp_path: Path, s3: str, request: pytest.FixtureRequest
) -> None:
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps(chat(number)) + "\n" for number in range(500)) * 300)
    target = f"{s3}/{prefix_of(request)}"
    store = open_storage(target)
    with convert_command(str(path), target, "--part", "0/2", "--workers", "2") as process:
        deadline = time.monotonic() + LIMIT_S
        while not any(each.key.endswith(".npz") for each in store.list_objects("_lmms/encoded/")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
    with pytest.raises(StorageError, match=r"holds a conversion in 2 parts, of which 2 are not whole: 0/2, 1/2; run"):
        convert([path], target)
    report = convert_part([path], target, Part(0, 2), num_workers=2)
    assert report.num_there >= 1
    assert convert_part([path], target, Part(0, 2)).num_units is None  # run twice
    convert_part([path], target, Part(1, 2), num_workers=2)
    convert([path], target, num_workers=2)
    convert([path], str(tmp_path / "one"), num_workers=2)
    assert written(target) == written(str(tmp_path / "one"))


def test_a_finished_dataset_is_there_for_every_part(chats: Path, tmp_path: Path) -> None:
    convert([chats], str(tmp_path / "out"), **SIZES)
    before = written(str(tmp_path / "out"))
    assert convert_part([chats], str(tmp_path / "out"), Part(0, 2), **SIZES).num_units is None
    with pytest.raises(
        StorageError, match="already holds a dataset: choose another target, or pass --overwrite to all"
    ):
        convert_part([chats], str(tmp_path / "out"), Part(0, 2), limit=10, **SIZES)
    assert written(str(tmp_path / "out")) == before


def test_parts_replace_a_dataset_once_all_of_it_is_there(chats: Path, tmp_path: Path) -> None:
    target, changed = str(tmp_path / "out"), SIZES | {"compression": "zstd"}
    convert([chats], target, **SIZES)
    before = {name: data for name, data in written(target).items() if "/" not in name}
    convert_parts([chats], target, 2, overwrite=True, **changed)
    assert before.items() <= written(target).items()
    convert([chats], target, overwrite=True, **changed)
    assert verify_dataset(target).problems == ()
    assert all(".zstd" in name or "index" in name for name in written(target) if "/" not in name)


def test_a_finished_dataset_leaves_parts_of_another_conversion_to_that(chats: Path, tmp_path: Path) -> None:
    target = str(tmp_path / "out")
    convert([chats], target, **SIZES)
    convert_parts([chats], target, 2, overwrite=True, **SIZES, compression="zstd")
    before = written(target)
    assert any("encoded" in name for name in before)
    assert convert([chats], target, **SIZES).was_there
    assert written(target) == before


def test_parts_that_do_not_belong_together_are_refused(chats: Path, tmp_path: Path) -> None:
    target = str(tmp_path / "out")
    convert_part([chats], target, Part(0, 2), **SIZES)
    for number, count in ((2, 3), (1, 4)):
        with pytest.raises(StorageError, match=f"holds part 0/2 of this conversion, and this is part {number}/{count}"):
            convert_part([chats], target, Part(number, count), **SIZES)
    others = SIZES | {"compression": "zstd", "dedup": "exact"}
    for call in (
        lambda: convert_part([chats], target, Part(1, 2), **others),
        lambda: convert([chats], target, **others),
    ):
        with pytest.raises(StorageError, match="holds parts of a conversion with other compression, dedup: run the"):
            call()
    with pytest.raises(
        StorageError, match=r"2 parts, of which 1 is not whole: 1/2; run the same command with --part 1"
    ):
        convert([chats], target, **SIZES)
    convert_part([chats], target, Part(1, 2), **SIZES)
    (folder,) = (tmp_path / "out" / "_lmms" / "encoded").iterdir()
    (folder / "000001.samples").unlink()
    with pytest.raises(StorageError, match=r"000001\.samples, which a part has written, is gone: remove"):
        convert([chats], target, **SIZES)
    (folder / "part-00000-of-00002.json").write_text("{}")
    with pytest.raises(StorageError, match=r"part-00000-of-00002\.json is damaged \(KeyError.*remove it, and run its"):
        convert([chats], target, **SIZES)
    convert([chats], target, overwrite=True, **others)  # one machine does all of it after all
    assert not (tmp_path / "out" / "_lmms" / "encoded").exists()


def test_what_no_part_can_do_is_refused(chats: Path, tmp_path: Path) -> None:
    listed = tmp_path / "list.yaml"
    listed.write_text(f"datasets:\n  - {{path: {chats}, weight: 1}}\n")
    with pytest.raises(ConfigError, match=r"entries have weights.*convert each entry in parts, or leave out"):
        convert_part([listed], str(tmp_path / "out"), Part(0, 2))
    for text, message in {
        "16/16": "parts are counted from 0, so 16 of them are 0/16 to 15/16 (sbatch --array=0-15)",
        "0/0": "the number of parts must be at least 1, as in 0/1",
        "3": "part '3': expected I/N such as 3/16, the fourth of 16 parts",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(message)):
            Part.parse(text)


def test_a_row_that_does_not_fit_ends_its_part_alone(tmp_path: Path) -> None:
    lines = [json.dumps(chat(number)) for number in range(600)]
    lines[5], lines[400] = '{"messages": 3}', '{"messages": 4}'
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    sources, target = [tmp_path / "chats.jsonl"], str(tmp_path / "out")
    failed = []
    for number in range(9):
        try:
            convert_part(sources, target, Part(number, 9), **SIZES)
        except DataError as error:
            failed.append(str(error))
    assert re.search(r"chats\.jsonl:6: .*\(or pass --on-error skip to leave such rows out; the command that", failed[0])
    assert re.search(r"chats\.jsonl:row \d+ of unit [1-9]: ", failed[1])
    convert_parts(sources, target, 9, on_error="skip", **SIZES)
    convert(sources, target, on_error="skip", **SIZES)
    convert(sources, str(tmp_path / "one"), on_error="skip", **SIZES)
    assert written(target) == written(str(tmp_path / "one"))
    rejects = (tmp_path / "out" / "_lmms" / "rejects.jsonl").read_text().splitlines()
    assert [json.loads(each)["row"] for each in rejects] == [6, 401]


def test_a_part_that_was_ended_is_gone_on_with(chats: Path, tmp_path: Path) -> None:
    target = str(tmp_path / "out")
    whole = convert_part([chats], target, Part(0, 2), **SIZES)
    (folder,) = (tmp_path / "out" / "_lmms" / "encoded").iterdir()
    (folder / "part-00000-of-00002.json").unlink()
    (folder / "000002.npz").unlink()  # as if it had been killed before it was whole
    again = convert_part([chats], target, Part(0, 2), **SIZES)
    assert again.num_there == (whole.num_units or 0) - 1
    assert convert_part([chats], target, Part(0, 2), **SIZES).num_units is None
    assert convert_part([chats], target, Part(0, 2), overwrite=True, **SIZES).num_there == 0


def test_the_command_does_a_part(chats: Path, tmp_path: Path) -> None:
    target = str(tmp_path / "out")
    result = run_cli("convert", str(chats), target, "--part", "0/1")
    assert result.returncode == 0, result.stderr
    assert "0/1" in result.stdout
    assert convert([chats], target, num_workers=1).num_rows == NUM_CHATS
    options = argparse.Namespace(part="0/1", append=True, dry_run=False)
    with pytest.raises(ConfigError, match="--part cannot be combined with --append: leave one of them out"):
        check_part(options)


# Which part has what


@given(
    sources=st.lists(st.tuples(st.integers(0, 10**6), st.booleans(), st.integers(1, 20)), min_size=1, max_size=20),
    count=st.integers(1, 9),
)
def test_every_unit_is_of_one_part_and_a_fetched_source_too(sources: list[tuple[int, bool, int]], count: int) -> None:
    sizes, is_fetched, units = (list(each) for each in zip(*sources, strict=True))
    shares = [Share.of(Part(number, count), sizes, is_fetched=is_fetched) for number in range(count)]
    for source, num_units in enumerate(units):
        for index in range(num_units):
            owners = [share for share in shares if share.has(source, index)]
            assert len(owners) == 1
            assert owners[0].reads(source)
        assert not is_fetched[source] or sum(share.reads(source) for share in shares) == 1
