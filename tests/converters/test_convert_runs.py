"""Conversions in several processes, ended and begun again: always the same bytes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lmms_stream.converters.convert import Progress, convert
from lmms_stream.converters.stored.verify import verify_dataset
from lmms_stream.errors import ConfigError, DataError, StorageError
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.storage.storage import open_storage
from streaming import MDSWriter

from ..conftest import prefix_of, run_cli
from ..emulators import EMULATED
from ..rounds import LONG, rounds
from .held import LIMIT_S, MAP, NUM_FILES, PASS, chat, held_command, write_held_chats

NUM_CHATS = 600
WORKERS = rounds((1, 3), (1, 2, 4))


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of some units of 20 kB."""
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    path.write_text("".join(json.dumps(chat(number)) + "\n" for number in range(NUM_CHATS)))
    return path


def written(target: str) -> dict[str, bytes]:
    """Every file of a dataset."""
    storage = open_storage(target)
    return {file.key: storage.read(file.key) for file in storage.list_objects("") if "counts" not in file.key}


def messages(target: str | Path) -> list[Any]:
    return [json.loads(sample["messages"]) for sample in PackedStreamingDataset(target)[:]]


@pytest.fixture(scope="session")
def uninterrupted(
    chats: Path, chat_processor: ChatProcessor, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    folder = str(tmp_path_factory.mktemp("uninterrupted") / "chats")
    report = convert([chats], folder, processor=chat_processor, unit_bytes=20_000, shard_bytes=1 << 15, num_workers=1)
    assert report.num_rows == NUM_CHATS
    assert report.num_shards > 4
    return written(folder)


def test_what_is_written_does_not_depend_on_the_number_of_workers(
    chats: Path, chat_processor: ChatProcessor, uninterrupted: dict[str, bytes], tmp_path: Path
) -> None:
    target = str(tmp_path / "out")
    convert([chats], target, processor=chat_processor, unit_bytes=20_000, shard_bytes=1 << 15, num_workers=3)
    assert written(target) == uninterrupted
    assert verify_dataset(target, processor=chat_processor, deep=True, num_workers=1).problems == ()


def test_shards_and_index_are_those_of_mdswriter(chats: Path, uninterrupted: dict[str, bytes], tmp_path: Path) -> None:
    columns = {"messages": "str", "media": "bytes"}
    with MDSWriter(columns=columns, out=str(tmp_path / "mds"), hashes=["xxh3_64"], size_limit=1 << 15) as writer:
        for sample in PackedStreamingDataset(_stored(uninterrupted, tmp_path / "ours"))[:]:
            writer.write(sample)
    theirs = {path.name: path.read_bytes() for path in (tmp_path / "mds").iterdir()}
    assert theirs == {name: data for name, data in uninterrupted.items() if "/" not in name}


def _stored(files: dict[str, bytes], folder: Path) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def test_the_size_of_units_changes_nothing(chats: Path, tmp_path: Path) -> None:
    for unit_bytes in (6_000, 1 << 24):
        convert([chats], str(tmp_path / str(unit_bytes)), unit_bytes=unit_bytes, shard_bytes=1 << 15, num_workers=1)
    small, large = (written(str(tmp_path / str(size))) for size in (6_000, 1 << 24))
    assert small == large
    assert messages(tmp_path / "6000") == [chat(number)["messages"] for number in range(NUM_CHATS)]


# Commands that others follow


@contextmanager
def convert_command(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The command in a process group of its own; nothing of it is left at the end."""
    command = (sys.executable, "-m", "lmms_stream", "convert", *arguments)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(params=["s3", *(["folder", *EMULATED] if LONG else [])])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "out")
    return f"{request.getfixturevalue(request.param)}/{prefix_of(request)}"


def test_a_second_command_for_a_target_is_refused_while_the_first_is_at_work(tmp_path: Path) -> None:
    for number, data in enumerate(write_held_chats(tmp_path)):
        (tmp_path / f"{number}.jsonl").write_bytes(data)
    sources = [f"{number}.jsonl" for number in range(NUM_FILES)]
    unfinished = tmp_path / "out" / "_lmms" / "unfinished.json"
    with held_command(*sources, "out", "--workers", "2", cwd=tmp_path, until=unfinished.exists) as first:
        second = run_cli("convert", *sources, "out", *MAP, "--overwrite", timeout_s=LIMIT_S, cwd=tmp_path)
        assert second.returncode == 1
        assert second.stderr.startswith("error: another process converts to out: wait until it ends")
        (tmp_path / PASS).touch()
        assert first.wait(LIMIT_S) == 0, first.stderr.read_text()


def test_a_conversion_that_was_ended_is_not_gone_on_with_by_another_command(chats: Path, tmp_path: Path) -> None:
    rows, target = tmp_path / "rows.jsonl", str(tmp_path / "out")
    rows.write_text(chats.read_text() + "{broken\n")
    options: dict[str, Any] = {"unit_bytes": 20_000, "shard_bytes": 1 << 15, "num_workers": 1}
    with pytest.raises(DataError, match=rf"rows\.jsonl:{NUM_CHATS + 1}: not valid JSON"):
        convert([rows], target, **options)
    with pytest.raises(StorageError, match="with other shard_bytes: run the original command, or pass"):
        convert([rows], target, **options | {"shard_bytes": 1 << 16})
    with pytest.raises(ConfigError, match="the number of workers must be at least 1, got 0"):
        convert([rows], target, **options | {"num_workers": 0})
    assert (tmp_path / "out" / "shard.00001.mds").exists()
    rows.write_text(chats.read_text() + json.dumps(chat(1)) + "\n")
    with pytest.raises(StorageError, match="with other sources"):
        convert([rows], target, **options)
    with pytest.raises(StorageError, match=r"was begun on .* with its work in .*: run the same command there"):
        convert([rows], target, **options, work=tmp_path / "elsewhere")
    (tmp_path / "out" / "mine.txt").write_text("kept")
    assert not (tmp_path / "out" / "index.json").exists()
    report = convert([rows], target, shard_bytes=1 << 18, overwrite=True, num_workers=1)
    assert report.num_rows == NUM_CHATS + 1
    assert sorted(written(target)) == [
        "_lmms/dataset.json", "_lmms/provenance.json", "_lmms/provenance.npy", "index.json", "mine.txt",
        *(f"shard.{n:05}.mds" for n in range(report.num_shards)),
    ]  # fmt: skip


def test_a_conversion_whose_target_another_machine_took_meanwhile_is_not_called_whole(
    chats: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out"

    def take(num_bytes: int) -> None:
        """As --overwrite does on a machine whose locks are not seen here."""
        theirs = {"id": "theirs", "host": "elsewhere", "work": "/work", "files": [], "extension": "", "num_shards": 16}
        (target / "_lmms" / "unfinished.json").write_text(json.dumps(theirs))

    with pytest.raises(StorageError, match=r"another conversion to this target was started on elsewhere after .*"):
        convert([chats], str(target), progress=Progress(advance=take), num_workers=1)
    assert not (target / "index.json").exists()


# What may be asked


def test_shuffled_samples_are_the_same_in_another_order(
    chats: Path, tmp_path: Path, chat_processor: ChatProcessor
) -> None:
    for name, workers in (("a", 1), ("b", 2)):
        convert(
            [chats], str(tmp_path / name), shuffle_seed=7, unit_bytes=20_000, shard_bytes=1 << 15, num_workers=workers,
            processor=chat_processor,
        )  # fmt: skip
    assert written(str(tmp_path / "a")) == written(str(tmp_path / "b"))
    expected = [chat(number)["messages"] for number in range(NUM_CHATS)]
    found = messages(tmp_path / "a")
    assert found != expected
    assert sorted(found, key=lambda chat: int(chat[0]["content"][:-1])) == expected
    assert np.mean(np.diff([int(chat[0]["content"][:-1]) for chat in found]) > 0) == pytest.approx(0.5, abs=0.05)
    assert verify_dataset(str(tmp_path / "a"), processor=chat_processor, deep=True, num_workers=1).problems == ()


def test_splits_share_the_samples(chats: Path, tmp_path: Path, chat_processor: ChatProcessor) -> None:
    options: dict[str, Any] = {"splits": {"train": 0.9, "validation": 0.1}, "processor": chat_processor}
    report = convert([chats], str(tmp_path / "out"), unit_bytes=20_000, num_workers=1, **options)
    train, validation = (messages(tmp_path / "out" / name) for name in ("train", "validation"))
    assert report.num_rows == len(train) + len(validation) == NUM_CHATS
    assert [split.num_rows for split in report.splits.values()] == [len(train), len(validation)]
    assert report.num_tokens == sum(split.num_tokens or 0 for split in report.splits.values())
    assert len(validation) == pytest.approx(60, abs=18)
    expected = [chat(number)["messages"] for number in range(NUM_CHATS)]
    assert sorted(map(str, train + validation)) == sorted(map(str, expected))
    for name in ("train", "validation"):
        assert (
            verify_dataset(str(tmp_path / "out" / name), processor=chat_processor, deep=True, num_workers=1).problems
            == ()
        )
    convert([chats], str(tmp_path / "again"), num_workers=1, **options)
    assert written(str(tmp_path / "out")) == written(str(tmp_path / "again"))


def test_a_split_without_samples_is_an_error_and_one_that_is_there_is_a_problem(chats: Path, tmp_path: Path) -> None:
    splits = {"train": 0.999, "validation": 0.001}
    with pytest.raises(
        DataError, match=r"the split 'validation' holds none of the 50 samples: choose a larger share than 0\.001,"
    ):
        convert([f"{chats}@[:50]"], str(tmp_path / "out"), splits=splits, num_workers=1)
    assert not any(path.is_file() for path in (tmp_path / "out").rglob("*"))
    convert([f"{chats}@[:50]"], str(tmp_path / "empty"), num_workers=1)
    for name, changes in (("index.json", {"shards": []}), ("_lmms/dataset.json", {"shards": [], "num_samples": 0})):
        path = tmp_path / "empty" / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    (problem,) = (each for each in verify_dataset(str(tmp_path / "empty")).problems if "no sample" in each.what)
    assert problem.where == "index.json"
    assert problem.what == "lists no sample, so nothing can be read from it: convert the dataset again"


@pytest.mark.parametrize("part", ["", "@[10:20]", "@[-5:]"])
@pytest.mark.parametrize("limit", [None, 3])
def test_progress_ends_where_it_should(part: str, limit: int | None, chats: Path, tmp_path: Path) -> None:
    told: list[int] = []
    progress = Progress(begin=told.append, advance=told.append)
    convert([f"{chats}{part}"], str(tmp_path), unit_bytes=2000, num_workers=1, limit=limit, progress=progress)
    assert told[0] == chats.stat().st_size == sum(told[1:])
    assert min(told) >= 0


def test_what_is_left_out_is_listed_once_whatever_the_splits(tmp_path: Path, tokenizer: Path) -> None:
    source = tmp_path / "rows.jsonl"
    long = {"messages": [{"role": "user", "content": "why " * 500}, {"role": "assistant", "content": "so"}]}
    source.write_text("".join(json.dumps(chat(number)) + "\n" for number in range(40)) + f"{{}}\n{json.dumps(long)}\n")
    result = run_cli(
        "convert", str(source), str(tmp_path / "out"), "--split", "train=0.5", "test=0.5", "--on-error", "skip",
        "--tokenizer", str(tokenizer), "--max-tokens", "500",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    train, test = (
        json.loads((tmp_path / "out" / name / "_lmms" / "dataset.json").read_text()) for name in ("train", "test")
    )
    assert (train["num_rejected"], train["num_filtered"], test["num_rejected"], test["num_filtered"]) == (1, 1, 0, 0)
    assert train["num_samples"] + test["num_samples"] == 40
    assert json.loads((tmp_path / "out" / "train" / "_lmms" / "rejects.jsonl").read_text())["row"] == 41
    assert not (tmp_path / "out" / "test" / "_lmms" / "rejects.jsonl").exists()
    assert re.search(rf"rows +│ +{train['num_samples']} +│ +{test['num_samples']} ", result.stdout)
    assert re.search(r"tokens +│ +[\d,]+ +│ +[\d,]+ ", result.stdout)


def test_samples_are_left_out_by_length_and_by_number_and_counted(
    chats: Path, tmp_path: Path, chat_processor: ChatProcessor
) -> None:
    free = convert([chats], str(tmp_path / "all"), processor=chat_processor)
    lengths = PackedStreamingDataset(tmp_path / "all", processor=chat_processor).length_index().lengths
    shortest, longest = (int(np.quantile(lengths, share)) for share in (0.2, 0.8))
    kept = int(np.count_nonzero((lengths >= shortest) & (lengths <= longest)))
    report = convert([chats], str(tmp_path / "some"), processor=chat_processor, shortest=shortest, longest=longest)
    assert (report.num_rows, report.num_filtered) == (kept, free.num_rows - kept)
    limited = convert([chats], str(tmp_path / "few"), limit=200, unit_bytes=25_000, num_workers=2)
    assert limited.num_rows == 200
    assert messages(tmp_path / "few") == [chat(number)["messages"] for number in range(200)]
    with pytest.raises(DataError, match=r"no sample is left to write \(600 were left out for their length\)"):
        convert([chats], str(tmp_path / "none"), processor=chat_processor, shortest=100_000)
    with pytest.raises(ConfigError, match="left out by their tokens"):
        convert([chats], str(tmp_path / "none"), longest=10)


def test_compressed_shards_are_read_and_replaced(chats: Path, tmp_path: Path) -> None:
    for compression in ("zstd:7", "gz"):
        report = convert(
            [chats], str(tmp_path / "out"), compression=compression, shard_bytes=1 << 18, overwrite=True, num_workers=2
        )
        extension = compression.partition(":")[0]
        assert len(list((tmp_path / "out").glob("shard.*"))) == report.num_shards
        assert len(list((tmp_path / "out").glob(f"shard.*.mds.{extension}"))) == report.num_shards
        assert messages(tmp_path / "out") == [chat(number)["messages"] for number in range(NUM_CHATS)]
    with pytest.raises(ConfigError, match="compression 'zip' is not one of"):
        convert([chats], str(tmp_path / "other"), compression="zip")


def test_rows_that_do_not_fit_are_named_by_their_line_whatever_the_units(chats: Path, tmp_path: Path) -> None:
    lines = chats.read_text().splitlines()
    lines[400] = "{broken"
    lines[500] = json.dumps({"messages": [{"role": "user", "content": "unanswered"}]})
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(["", *lines]))
    with pytest.raises(DataError, match=r"rows\.jsonl:402: not valid JSON"):
        convert([source], str(tmp_path / "out"), unit_bytes=25_000, num_workers=2)
    assert not {"index.json", "_lmms/dataset.json"} & set(written(str(tmp_path / "out")))
    report = convert([source], str(tmp_path / "out"), unit_bytes=25_000, num_workers=2, on_error="skip")
    assert (report.num_rows, report.num_rejected) == (NUM_CHATS - 2, 2)
    rejects = [json.loads(line) for line in (tmp_path / "out" / "_lmms" / "rejects.jsonl").read_text().splitlines()]
    assert [reject["row"] for reject in rejects] == [402, 502]
    assert {reject["source"] for reject in rejects} == {str(source)}


@pytest.mark.parametrize("num_workers", [1, 2])
def test_what_was_made_before_a_row_that_does_not_fit_is_kept_and_gone_on_with(
    num_workers: int, chats: Path, tmp_path: Path
) -> None:
    source, target = tmp_path / "rows.jsonl", tmp_path / "out"
    lines = chats.read_text().splitlines(keepends=True)
    source.write_text("".join([*lines[:-2], "{broken\n", *lines[-2:]]))
    options: dict[str, Any] = {"unit_bytes": 25_000, "shard_bytes": 1 << 15, "num_workers": num_workers}
    with pytest.raises(DataError, match=rf"rows\.jsonl:{NUM_CHATS - 1}: not valid JSON"):
        convert([source], str(target), **options)
    made = {path.name: path.stat().st_mtime_ns for path in target.glob("shard.*")}
    assert len(made) > 4
    assert not (target / "index.json").exists()
    report = convert([source], str(target), **options, on_error="skip")
    assert (report.num_rows, report.num_rejected) == (NUM_CHATS, 1)
    assert made.items() <= {path.name: path.stat().st_mtime_ns for path in target.glob("shard.*")}.items()
    convert([source], str(tmp_path / "once"), **options, on_error="skip")
    assert written(str(target)) == written(str(tmp_path / "once"))


def test_a_limit_gives_the_same_samples_and_counts_for_any_number_of_workers(
    chats: Path, tmp_path: Path, chat_processor: ChatProcessor
) -> None:
    lines = chats.read_text().splitlines()
    for number in range(5, NUM_CHATS, 50):
        lines[number] = "{broken"
    rows, other = tmp_path / "rows.jsonl", tmp_path / "other.jsonl"
    rows.write_text("\n".join(lines))
    other.write_text('{"text": "of another kind"}\n')
    reports = []
    for workers in WORKERS:
        target = str(tmp_path / str(workers))
        report = convert(
            [rows, other], target, limit=200, unit_bytes=10_000, num_workers=workers, on_error="skip",
            processor=chat_processor, shortest=200,
        )  # fmt: skip
        assert report.num_rows == 200
        reports.append((report.num_rejected, report.num_filtered, written(target)))
    assert all(report == reports[0] for report in reports)
    num_rejected, num_filtered, _ = reports[0]
    num_read = 200 + num_rejected + num_filtered  # rows up to the last that is written
    assert num_filtered > 0
    assert num_rejected == len(range(5, num_read, 50))
    rows.write_text("\n".join([*(line for line in lines[:250] if line != "{broken"), "{broken", "{}"]))
    for workers in WORKERS:  # behind what is asked for no row is an error
        report = convert([rows], str(tmp_path / f"strict-{workers}"), limit=200, unit_bytes=10_000, num_workers=workers)
        assert report.num_rows == 200


def test_a_processor_must_read_what_the_rows_are(tmp_path: Path, chat_processor: ChatProcessor) -> None:
    source = tmp_path / "texts.jsonl"
    source.write_text('{"text": "some words"}\n')
    with pytest.raises(ConfigError, match="the rows are 'text', and ChatProcessor reads 'messages': leave --processor"):
        convert([source], str(tmp_path / "out"), processor=chat_processor)


def test_a_source_that_changes_while_it_is_read_gives_no_dataset(chats: Path, tmp_path: Path) -> None:
    source = tmp_path / "growing.jsonl"
    source.write_bytes(chats.read_bytes())

    def grow(num_bytes: int) -> None:
        with source.open("a") as file:
            file.write(json.dumps(chat(1)) + "\n")

    target = tmp_path / "out"
    with pytest.raises(DataError, match=r"growing\.jsonl was changed during reading: start again after all writes"):
        convert([source], str(target), num_workers=1, progress=Progress(advance=grow))
    assert [path for path in target.rglob("*") if path.is_file()] == []
    assert convert([source], str(target), num_workers=1).num_rows > 0
