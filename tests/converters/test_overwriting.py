"""A dataset that is converted anew: until the new one is whole the old one is read.

test_killed_commands.py ends the command on the way.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lmms_stream.converters.convert import Progress, convert
from lmms_stream.converters.stored.verify import verify_dataset
from lmms_stream.errors import DataError
from lmms_stream.processors.chat import ChatProcessor

from .held import chat
from .test_convert_runs import messages, target, written

__all__ = ["target"]  # a fixture
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
    rows = write_chats(tmp_path / "rows.jsonl", range(200))
    convert([rows], target, processor=chat_processor, **OPTIONS)
    before = written(target)
    write_chats(rows, range(150, 400))
    seen = []

    def look(num_rows: int) -> None:
        seen.append({name: data for name, data in written(target).items() if name in before} == before)

    report = convert([rows], target, processor=chat_processor, overwrite=True, progress=Progress(rows=look), **OPTIONS)
    assert len(seen) > 3
    assert all(seen)
    assert messages(target) == expected(range(150, 400))
    assert verify_dataset(target, deep=True, processor=chat_processor, num_workers=1).problems == ()
    assert len(shards_of(target)) == report.num_shards
    assert not shards_of(target) & set(before)
    convert([rows], target, overwrite=True, **OPTIONS)  # its names are those of the first again
    assert "shard.00000.mds" in shards_of(target)
    assert not any("lengths" in name for name in written(target))


def test_an_error_leaves_the_old_dataset_as_it_was(tmp_path: Path, chat_processor: ChatProcessor) -> None:
    rows, target = write_chats(tmp_path / "rows.jsonl", range(200)), str(tmp_path / "out")
    convert([rows], target, processor=chat_processor, **OPTIONS)
    before = written(target)
    rows.write_text('{"note": "of no kind"}\n')
    with pytest.raises(DataError, match="columns note fit no kind of rows"):
        convert([rows], target, overwrite=True, **OPTIONS)
    assert written(target) == before
    write_chats(rows, range(150, 400))
    with rows.open("a") as file:
        file.write("{broken\n")
    with pytest.raises(DataError, match=r"rows\.jsonl:251: not valid JSON"):
        convert([rows], target, overwrite=True, **OPTIONS)
    assert before.items() <= written(target).items()
    assert convert([rows], target, on_error="skip", **OPTIONS).num_rejected == 1
    assert messages(target) == expected(range(150, 400))
    assert verify_dataset(target, deep=True, num_workers=1).problems == ()
