"""A dataset that grows: new sources become a part beside, and one index is over both.

test_killed_commands.py ends the command on the way.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lmms_stream.converters import append as appending
from lmms_stream.converters.append import append
from lmms_stream.converters.convert import Progress, convert
from lmms_stream.converters.dry_run import dry_run
from lmms_stream.converters.rows.options import SchemaOptions
from lmms_stream.converters.stored import appending as index_growth
from lmms_stream.converters.stored.merge import merge_datasets
from lmms_stream.converters.stored.verify import verify_dataset
from lmms_stream.errors import ConfigError, CursorError, DataError, StorageError
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.mds.dataset_config import DatasetConfig
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.mds.streams import StoredDataset, StreamConfig
from lmms_stream.processors import ProcessorConfig
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.storage.fetch_config import FetchConfig
from lmms_stream.storage.local import LocalStorage
from lmms_stream.storage.storage import Storage, open_storage
from streaming import StreamingDataset

from .test_convert_runs import messages, written
from .test_overwriting import expected, write_chats
from .test_provenance import said_rows, told_rows, write_rows

OPTIONS: dict[str, Any] = {"unit_bytes": 20_000, "shard_bytes": 1 << 15, "num_workers": 1}
FILES = ("a.jsonl", "b.jsonl", "c.jsonl", "d.jsonl")


def lengths_of(folder: str, processor: ChatProcessor) -> np.ndarray[Any, Any]:
    return np.array(PackedStreamingDataset(folder, processor=processor).length_index().lengths)


def test_three_appends_are_one_conversion(
    store_folder: str, tmp_path: Path, chat_processor: ChatProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in FILES:
        write_rows(Path(name), 120)
    options: dict[str, Any] = {"processor": chat_processor, "on_error": "skip", **OPTIONS}
    convert([*FILES], str(tmp_path / "once"), **options)
    convert([FILES[0]], store_folder, **options)
    said: list[str] = []
    reports = [
        append(FILES[:2], store_folder, progress=Progress(say=said.append), **options),
        append([str(tmp_path / FILES[1]), FILES[2]], store_folder, **options | {"compression": "zstd"}),
        append(["*.jsonl"], store_folder, **options),
    ]
    assert said[0] == f"a.jsonl: in {store_folder} already, passed over"
    assert [(each.num_new_sources, each.num_known_sources, each.part) for each in reports] == [
        (1, 1, "parts/00001"), (1, 1, "parts/00002"), (1, 3, "parts/00003"),
    ]  # fmt: skip
    assert messages(store_folder) == messages(tmp_path / "once")
    assert np.array_equal(lengths_of(store_folder, chat_processor), lengths_of(str(tmp_path / "once"), chat_processor))
    assert told_rows(store_folder, tmp_path / "cache") == said_rows(store_folder)
    report = verify_dataset(store_folder, deep=True, processor=chat_processor, num_workers=1)
    assert (report.problems, report.num_lengths_indexes) == ((), 1)
    grown, once = (
        json.loads(open_storage(url).read("_lmms/dataset.json")) for url in (store_folder, tmp_path / "once")
    )
    assert [each["name"] for each in grown["source"]][:2] == ["a.jsonl", "b.jsonl"]
    assert grown["num_rejected"] == once["num_rejected"] > 0
    assert open_storage(store_folder).read("_lmms/rejects.jsonl").count(b"\n") == grown["num_rejected"]
    assert not any("grown" in name or "growing" in name or "unfinished" in name for name in written(store_folder))

    again = append(["*.jsonl"], store_folder, **options)
    assert (again.num_new_sources, again.num_known_sources, again.converted) == (0, 4, None)
    assert again.num_samples == reports[-1].num_samples == len(messages(store_folder))


@pytest.mark.filterwarnings("ignore:unclosed file")  # MosaicML Streaming's
def test_mosaicml_streaming_reads_a_grown_dataset(tmp_path: Path) -> None:
    for number in range(2):
        write_chats(tmp_path / f"{number}.jsonl", range(100 * number, 100 * number + 100))
    convert([tmp_path / "0.jsonl"], str(tmp_path / "out"), **OPTIONS)
    append([tmp_path / "1.jsonl"], str(tmp_path / "out"), **OPTIONS)
    theirs = StreamingDataset(remote=str(tmp_path / "out"), local=str(tmp_path / "cache"), batch_size=1)
    assert [json.loads(theirs[number]["messages"]) for number in range(len(theirs))] == expected(range(200))


def test_splits_grow_by_their_own_parts_also_after_a_command_that_ended_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = write_rows(tmp_path / "a.jsonl", 200), write_rows(tmp_path / "b.jsonl", 200)
    options: dict[str, Any] = {"splits": {"train": 0.7, "test": 0.3}, "on_error": "skip", **OPTIONS}
    out = tmp_path / "out"
    convert([first], str(out), **options)
    grow = index_growth.grow

    def ends_at_the_second(storage: Storage, part: str) -> tuple[str, ...]:
        if storage.url.endswith("test"):
            raise StorageError("ended")
        return grow(storage, part)

    monkeypatch.setattr(appending, "grow", ends_at_the_second)
    with pytest.raises(StorageError, match="ended"):
        append([first, second], str(out), **options)
    monkeypatch.undo()
    assert append([first, second], str(out), **options).num_new_sources == 0
    both = [row for split in ("train", "test") for row in said_rows(out / split)]
    assert sorted(both) == sorted(set(both))
    assert {row.partition(":")[0] for row in both} == {"a.jsonl", "b.jsonl"}
    for split in ("train", "test"):
        assert told_rows(out / split) == said_rows(out / split)
        assert verify_dataset(str(out / split), deep=True, num_workers=1).problems == ()


# Readers and runs that began before


def test_a_reader_that_comes_between_the_old_index_and_the_new_description_reads_the_new_dataset(
    tmp_path: Path,
) -> None:
    first, second = (write_chats(tmp_path / f"{n}.jsonl", range(20 * n, 20 * n + 20)) for n in range(2))
    convert([first], str(tmp_path / "out"), **OPTIONS)

    class Grows(LocalStorage):
        def read(self, key: str) -> bytes:
            if key == "_lmms/dataset.json":
                append([first, second], str(self.folder), **OPTIONS)
            return super().read(key)

    stream = StreamConfig(local=tmp_path / "out", source=Grows(tmp_path / "out"))
    assert StoredDataset(stream, config=FetchConfig()).num_samples == 40


def test_a_run_goes_on_over_the_old_samples_and_reads_the_new_ones_beside(
    tmp_path: Path, chat_processor: ChatProcessor, tokenizer: Path
) -> None:
    out, options = str(tmp_path / "out"), {"processor": chat_processor, **OPTIONS}
    rows = [write_chats(tmp_path / f"{n}.jsonl", range(200 * n, 200 * n + 200)) for n in range(3)]
    convert(rows[:1], out, **options)

    def opened(remote: str, num_parts: int | None = None) -> Any:
        processor = ProcessorConfig(type="chat", tokenizer=str(tokenizer))
        return DatasetConfig(remote=remote, num_parts=num_parts, processor=processor, packing_length=1024).open()

    def read(loader: PackedLoader, num_steps: int = -1) -> list[tuple[str, int]]:
        found = []
        for step, batch in enumerate(loader):
            found += [(batch.source, int(number)) for number in batch.sample_ids]
            if step + 1 == num_steps:
                break
        return found

    loader = PackedLoader(opened(out), global_batch=2)
    before = read(loader, 6)
    state = loader.state_dict()
    assert 10 < len(before) < 150
    append(rows[:2], out, **options)
    append(rows, out, **options)
    with pytest.raises(CursorError, match=r"a dataset that has grown since, by .* is read as it was with num_parts"):
        PackedLoader(opened(out), global_batch=2).load_state_dict(state)
    both = {"data": opened(out, num_parts=1), "new": opened(f"{out}/parts/00002")}
    assert [each.num_samples for each in both.values()] == [400, 200]
    both["data"] = opened(out, num_parts=0)
    both["first"] = opened(f"{out}/parts/00001")
    loader = PackedLoader(both, global_batch=2)
    loader.load_state_dict(state)
    everything = [*before, *read(loader)]
    assert sorted(everything) == sorted((source, number) for source in both for number in range(200))
    with pytest.raises(ConfigError, match=r"num_parts is 3, and .*out has 2 .*: choose from 0 to 2, or leave it out"):
        opened(out, num_parts=3)
    with pytest.raises(ConfigError, match="num_parts has an effect only in open"):
        DatasetConfig(remote=out, num_parts=0).build()


# What is refused


def test_what_is_not_of_the_dataset_is_refused_and_leaves_it_as_it_was(tmp_path: Path) -> None:
    rows, out = write_chats(tmp_path / "a.jsonl", range(100)), str(tmp_path / "out")
    with pytest.raises(StorageError, match=r"out holds no dataset"):
        append([rows], out, **OPTIONS)
    convert([f"{rows}@[:50]"], out, **OPTIONS)
    before = written(out)
    other = tmp_path / "b.jsonl"
    other.write_text('{"text": "of another kind"}\n')
    refused: list[tuple[list[str], dict[str, Any], type[Exception], str]] = [
        ([str(rows)], {}, ConfigError, r"a\.jsonl is in .*out in part \(@\[:50\]\): name the remaining rows as a"),
        (
            [str(other)],
            {},
            DataError,
            r"b\.jsonl gives samples with text \(str\), and samples of the dataset have media",
        ),
        (
            [str(other)],
            {"schema": SchemaOptions(system="x")},
            ConfigError,
            r"was converted with other options \(system was None, now 'x'\)",
        ),
        ([str(tmp_path / "none.jsonl")], {}, StorageError, r"none\.jsonl: no such file"),
    ]
    for sources, options, error, message in refused:
        with pytest.raises(error, match=message):
            append(sources, out, **options, **OPTIONS)
    assert written(out) == before
    assert append([f"{rows}@[:50]", f"{rows}@[50:]"], out, **OPTIONS).num_new_sources == 1
    assert messages(out) == expected(range(100))
    write_chats(rows, range(90))
    with pytest.raises(
        ConfigError, match=r"a\.jsonl was changed since it was converted to .*: put its new rows into a"
    ):
        append([f"{rows}@[:50]"], out, **OPTIONS)
    with pytest.raises(ConfigError, match=r"a\.jsonl was changed since"):
        dry_run([rows], append_to=out)
    assert dry_run([write_chats(tmp_path / "d.jsonl", range(9))], append_to=out).num_samples == 9


def test_another_slice_of_a_file_is_another_source(tmp_path: Path) -> None:
    rows, out = write_chats(tmp_path / "a.jsonl", range(100)), str(tmp_path / "out")
    convert([f"{rows}@[:50]"], out, **OPTIONS)
    with pytest.raises(StorageError, match=r"out holds a dataset already: choose another target, or pass --overwrite"):
        convert([f"{rows}@[50:]"], out, **OPTIONS)


def test_a_merge_and_an_unfinished_conversion_are_not_appended_to(tmp_path: Path) -> None:
    rows, new = write_chats(tmp_path / "a.jsonl", range(9)), write_chats(tmp_path / "b.jsonl", range(9))
    out = str(tmp_path / "all" / "a")
    convert([rows], out, **OPTIONS)
    merge_datasets(str(tmp_path / "all"), [out])
    with pytest.raises(
        ConfigError, match=r"has no record of its conversion options \(because of .* merge both in the folder"
    ):
        append([new], str(tmp_path / "all"), **OPTIONS)
    LocalStorage(Path(out)).write(
        "_lmms/unfinished.json", b'{"id": "x", "files": [], "num_shards": 0, "extension": ""}'
    )
    with pytest.raises(StorageError, match=r"holds an unfinished conversion: run the command that began it to its end"):
        append([new], out, **OPTIONS)
    LocalStorage(Path(out)).delete("_lmms/unfinished.json")
    for note, message in ((b"{", "is damaged"), (b'{"part": "../a", "old": [], "new": []}', "names files outside")):
        LocalStorage(Path(out)).write(index_growth.GROWING_NAME, note)
        with pytest.raises(StorageError, match=rf"growing\.json {message}.*: remove it, and append again"):
            append([new], out, **OPTIONS)


def test_a_grown_dataset_that_is_replaced_leaves_none_of_its_parts(tmp_path: Path) -> None:
    rows, new = write_chats(tmp_path / "a.jsonl", range(100)), write_chats(tmp_path / "b.jsonl", range(100, 200))
    out = str(tmp_path / "out")
    convert([rows], out, **OPTIONS)
    append([rows, new], out, **OPTIONS)
    with pytest.raises(StorageError, match=r"out holds a dataset already: choose another target, or pass --overwrite"):
        convert([rows], out, **OPTIONS)
    convert([new], out, overwrite=True, **OPTIONS)
    assert messages(out) == expected(range(100, 200))
    assert not any(name.startswith("parts/") for name in written(out))


def test_a_part_that_the_dataset_never_took_in_gives_way_to_other_sources(tmp_path: Path) -> None:
    first, other, new = (write_chats(tmp_path / f"{n}.jsonl", range(20 * n, 20 * n + 20)) for n in range(3))
    out = str(tmp_path / "out")
    convert([first], out, **OPTIONS)
    convert([other], f"{out}/parts/00001", **OPTIONS)  # the dataset's index does not name the part
    append([first, new], out, **OPTIONS)
    assert messages(out) == expected(range(20)) + expected(range(40, 60))
