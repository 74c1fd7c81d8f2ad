"""A dataset that is converted anew: until the new one is whole the old one is read, whatever ends the command."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from lmms_stream.converters import convert as conversion
from lmms_stream.converters.convert import Progress, convert
from lmms_stream.converters.stored.verify import verify_dataset
from lmms_stream.errors import DataError, StorageError
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.storage.storage import Storage

from ..conftest import run_cli
from ..rounds import rounds
from .ends_after import EndsAfter
from .test_convert_runs import LIMIT_S, chat, convert_command, many_chats, messages, target, written

__all__ = ["many_chats", "target"]  # fixtures
OPTIONS: dict[str, Any] = {"unit_bytes": 20_000, "shard_bytes": 1 << 15, "num_workers": 1}


def write_chats(path: Path, numbers: range) -> Path:
    path.write_text("".join(json.dumps(chat(number)) + "\n" for number in numbers))
    return path


def expected(numbers: range) -> list[Any]:
    return [chat(number)["messages"] for number in numbers]


def shards_of(folder: str) -> set[str]:
    return {name for name in written(folder) if name.startswith("shard.")}


def test_the_old_dataset_is_read_until_the_new_one_is_whole(
    target: str, tmp_path: Path, chat_processor: ChatProcessor
) -> None:
    rows = write_chats(tmp_path / "rows.jsonl", range(500))
    convert([rows], target, processor=chat_processor, **OPTIONS)
    before = written(target)
    write_chats(rows, range(400, 1000))
    seen = []

    def look(num_rows: int) -> None:
        seen.append({name: data for name, data in written(target).items() if name in before} == before)

    report = convert([rows], target, processor=chat_processor, overwrite=True, progress=Progress(rows=look), **OPTIONS)
    assert len(seen) > 3
    assert all(seen)
    assert messages(target) == expected(range(400, 1000))
    assert verify_dataset(target, deep=True, processor=chat_processor).problems == ()
    assert len(shards_of(target)) == report.num_shards
    assert not shards_of(target) & set(before)
    convert([rows], target, overwrite=True, **OPTIONS)  # its names are those of the first again
    assert "shard.00000.mds" in shards_of(target)
    assert not any("lengths" in name for name in written(target))


def test_an_error_leaves_the_old_dataset_as_it_was(tmp_path: Path, chat_processor: ChatProcessor) -> None:
    rows, target = write_chats(tmp_path / "rows.jsonl", range(500)), str(tmp_path / "out")
    convert([rows], target, processor=chat_processor, **OPTIONS)
    before = written(target)
    rows.write_text('{"note": "of no kind"}\n')
    with pytest.raises(DataError, match="columns note fit no kind of rows"):
        convert([rows], target, overwrite=True, **OPTIONS)
    assert written(target) == before
    write_chats(rows, range(400, 1000))
    with rows.open("a") as file:
        file.write("{broken\n")
    with pytest.raises(DataError, match=r"rows\.jsonl:601: not valid JSON"):
        convert([rows], target, overwrite=True, **OPTIONS)
    assert before.items() <= written(target).items()
    assert convert([rows], target, on_error="skip", **OPTIONS).num_rejected == 1
    assert messages(target) == expected(range(400, 1000))
    assert verify_dataset(target, deep=True).problems == ()


def test_a_command_that_ends_at_any_change_leaves_the_old_dataset_or_the_new_one(
    tmp_path: Path, chat_processor: ChatProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = range(300), range(200, 600)
    first, second = (write_chats(tmp_path / f"{n}.jsonl", each) for n, each in enumerate((old, new)))
    options: dict[str, Any] = {"processor": chat_processor, "shard_bytes": 1 << 16, "num_workers": 1}
    found = []
    for num_changes in range(0, 100, rounds(3, 1)):
        folder = tmp_path / f"out-{num_changes}"
        convert([first], str(folder), **options)
        stores: list[Storage] = [EndsAfter(folder, [num_changes])]
        monkeypatch.setattr(conversion, "open_storage", lambda url, stores=stores: stores[0])
        try:
            convert([second], str(folder), overwrite=True, **options)
            is_ended = False
        except StorageError:
            is_ended = True
        monkeypatch.undo()
        found.append(messages(folder))
        assert found[-1] in (expected(old), expected(new))
        packed = PackedStreamingDataset(folder, processor=chat_processor)
        assert packed.size == len(found[-1])
        if is_ended and num_changes % 2 and (folder / "_lmms" / "unfinished.json").exists():
            convert([second], str(folder), **options)  # what --overwrite began is gone on with without it
        elif is_ended:
            convert([second], str(folder), overwrite=True, **options)
        assert messages(folder) == expected(new)
        assert verify_dataset(str(folder), deep=True, processor=chat_processor).problems == ()
        listed = {shard["name"] for shard in json.loads((folder / "_lmms" / "dataset.json").read_text())["shards"]}
        assert shards_of(str(folder)) == listed
        assert not (folder / "_lmms" / "unfinished.json").exists()
        if not is_ended:
            break
    assert num_changes > 8
    assert found[0] == expected(old)
    assert found == sorted(found, key=lambda each: each == expected(new))


def test_a_command_that_overwrites_and_is_killed_leaves_the_old_dataset_or_the_new_one(
    many_chats: Path, target: str, tmp_path: Path
) -> None:
    rows, work = write_chats(tmp_path / "rows.jsonl", range(100)), str(tmp_path / "work")
    convert([rows], target, num_workers=1, work=Path(work))
    arguments = (str(many_chats), target, "--workers", "2", "--shard-size", "2mb", "--work", work)
    moments = random.Random(5)
    for number in range(rounds(3, 20)):
        with convert_command(*arguments, *(["--overwrite"] if number == 0 else [])) as process:
            deadline = time.monotonic() + LIMIT_S
            while number == 0 and "_lmms/unfinished.json" not in written(target):  # the next commands go on from this
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            time.sleep(moments.uniform(1, 4))
            process.kill()
            process.wait(LIMIT_S)
        assert len(PackedStreamingDataset(target)) in (100, 150_000)
    is_old = len(PackedStreamingDataset(target)) == 100
    if is_old:
        assert messages(target) == expected(range(100))
    if is_old or "_lmms/unfinished.json" in written(target):  # killed before or after the new dataset was there
        result = run_cli("convert", *arguments, timeout_s=LIMIT_S)
        assert result.returncode == 0, result.stderr
    assert len(PackedStreamingDataset(target)) == 150_000
    assert verify_dataset(target).problems == ()
