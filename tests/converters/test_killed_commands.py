"""Commands that are killed: what is read until they end, and the same bytes after a second start.

One table for each way of an end: a process that is killed with kill -9 (tests of Ray, parts and scripts have ways of
their own), and a storage that takes no further change, after each number of changes.
"""

from __future__ import annotations

import gzip
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from lmms_stream.converters import append as growing
from lmms_stream.converters import convert as conversion
from lmms_stream.converters.append import append
from lmms_stream.converters.convert import convert
from lmms_stream.converters.exporting import export
from lmms_stream.converters.exporting.export import export_dataset
from lmms_stream.converters.stored import appending, merge
from lmms_stream.converters.stored.merge import merge_datasets
from lmms_stream.converters.stored.verify import verify_dataset
from lmms_stream.errors import LmmsStreamError, StorageError
from lmms_stream.mds import measuring
from lmms_stream.mds.measuring import index_dataset
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.processors.base import Processor
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.processors.text import TextProcessor
from lmms_stream.storage.storage import open_storage

from ..conftest import run_cli, write_tokens
from ..processes import start_module
from ..rounds import LONG, in_long_rounds, rounds
from .ends_after import EndsAfter
from .held import (
    LIMIT_S,
    MAP,
    NUM_FILES,
    PASS,
    ROWS_PER_FILE,
    has_files,
    held_command,
    kill,
    write_held_chats,
)
from .test_concat import write_texts
from .test_convert_runs import target, written
from .test_overwriting import shards_of, write_chats
from .test_provenance import told_rows

__all__ = ["target"]  # a fixture

# Processes that are killed


@dataclass(frozen=True, kw_only=True)
class Killed:
    """A conversion. before: the number of chats in the target's old dataset, where it has one.

    options: of each start; first: of the first start alone. stdout: a part of what the last start prints.
    """

    options: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    before: int = 0
    num_workers: int = rounds(1, 2)
    is_source_stored: bool = False
    stdout: str = ""


NUM_OLD = 30
ONCE: dict[str, Any] = {"num_workers": 1, "map": "holding.py:hold", "shard_bytes": 16 << 10}
DROPPED = range(7, ROWS_PER_FILE * NUM_FILES, 11)
KILLED = {
    "converts": Killed(num_workers=2),
    "appends": Killed(options=("--append",), before=NUM_OLD),
    "reads a store": Killed(is_source_stored=True, num_workers=2),
}
if LONG:  # the table of storages below has conversions that overwrite, test_dropping.py what is left out
    KILLED["overwrites"] = Killed(first=("--overwrite",), before=NUM_OLD)
    KILLED["leaves rows out"] = Killed(options=("--drop", "bad.txt"), stdout=f"{len(DROPPED):,} rows that --drop names")


@pytest.mark.parametrize("case", KILLED)
def test_a_command_that_is_killed_goes_on_to_the_bytes_of_one_that_is_not(
    case: str, target: str, s3_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    killed, contents = KILLED[case], write_held_chats(tmp_path)
    source = f"{s3_folder}/source" if killed.is_source_stored else "source"
    for number, data in enumerate(contents):
        is_whole = killed.is_source_stored and number in (1, 6)  # fetched whole
        name = f"{number}.jsonl" + ".gz" * is_whole
        open_storage(source).write(name, gzip.compress(data) if is_whole else data)
    write_chats(Path("old.jsonl"), range(5000, 5000 + NUM_OLD))
    drop = [f"{number // ROWS_PER_FILE}.jsonl:{1 + number % ROWS_PER_FILE}\n" for number in DROPPED]
    Path("bad.txt").write_text("".join(drop))
    out, options, work = f"{target}/out", ("--shard-size", "16kb", *killed.options), ("--work", "work")
    sources = ("old.jsonl", source) if case == "appends" else (source,)
    for folder in (out, "once") if killed.before else ():
        assert convert(["old.jsonl"], folder, **ONCE).num_rows == NUM_OLD
    old, num_files = written(out), len(written(out))
    moments = random.Random(3)
    for number in range(rounds(1, 20)):
        command = (*sources, out, *options, *(killed.first if number == 0 else ()), *work)
        until = has_files(out, num_files + 5) if number == 0 else lambda: True
        with held_command(*command, "--workers", f"{killed.num_workers}", cwd=tmp_path, until=until) as job:
            time.sleep(moments.uniform(0, rounds(0, 4)))
            kill(job)
        assert old.items() <= written(out).items()
        assert killed.before or "index.json" not in written(out)
    Path(PASS).touch()
    is_finished = False
    while LONG and not is_finished:  # up to its end, which comes a little nearer in each of them
        with held_command(*command, "--workers", "1", cwd=tmp_path, until=lambda: True) as job:
            time.sleep(moments.uniform(0, 8))
            job.send_signal(signal.SIGKILL)
            is_finished = job.wait(LIMIT_S) == 0
    result = run_cli("convert", *sources, out, *options, *work, "--workers", "1", *MAP, timeout_s=LIMIT_S)
    assert result.returncode == 0, result.stderr
    assert is_finished or killed.stdout in result.stdout
    write = append if case == "appends" else convert
    write([*sources], "once", **ONCE, drop="bad.txt" if "--drop" in options else None, overwrite=bool(killed.first))
    assert written(out) == written("once")
    assert verify_dataset(out).problems == ()
    assert not [path for path in Path("work").rglob("*") if path.suffix in (".samples", ".gz")]


# Storages that take no further change


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A command that ends in `run`, and whose second start is `again`, in the folder where `begin` left the old state.

    modules: those that open its storages; step: from a number of changes to the next; least: of changes that it makes.
    processor: by which the dataset is read. is_same: its second start gives the bytes of one command. words: the
    command's own, of the first start and of further ones.
    """

    modules: tuple[ModuleType, ...]
    begin: Callable[[Path], object]
    run: Callable[[Path], object]
    again: Callable[[Path, int], object]
    least: int
    step: int = 1
    processor: Processor | None = None
    is_same: bool = True
    words: Callable[[Path, bool], Sequence[str | Path]] | None = None

    def read(self, folder: Path) -> list[str]:
        """All samples as texts; none where no dataset is."""
        try:
            dataset = PackedStreamingDataset(folder, processor=self.processor)
        except LmmsStreamError:
            return []
        samples = [str(sample) for sample in dataset[:]]
        assert self.processor is None or dataset.size == len(samples)
        return samples


def overwrites(folder: Path, processor: ChatProcessor, _: TextProcessor) -> Ended:
    first, second = (write_chats(folder / f"{rows.start}.jsonl", rows) for rows in (range(60), range(40, 140)))
    options: dict[str, Any] = {"processor": processor, "shard_bytes": 1 << 14, "num_workers": 1}

    def again(out: Path, num_changes: int) -> None:
        is_begun = num_changes % 2 and (out / "_lmms" / "unfinished.json").exists()
        convert([second], str(out), overwrite=not is_begun, **options)  # what --overwrite began goes on without it

    return Ended(
        modules=(conversion,),
        begin=lambda out: convert([first], str(out), **options),
        run=lambda out: convert([second], str(out), overwrite=True, **options),
        again=again, least=8, step=rounds(3, 1), processor=processor, is_same=False,
    )  # fmt: skip


def appends(folder: Path, processor: ChatProcessor, _: TextProcessor) -> Ended:
    first, second = (write_chats(folder / f"{n}.jsonl", range(20 * n, 20 * n + 20)) for n in range(2))
    options: dict[str, Any] = {"processor": processor, "shard_bytes": 1 << 16, "num_workers": 1}

    def again(out: Path, num_changes: int) -> None:
        if num_changes % 2:
            append([first, second], str(out), **options)
        else:  # other sources, as it were: what was begun is put in place or replaced
            append([second], str(out), overwrite=True, **options)

    return Ended(
        modules=(growing, conversion, appending),
        begin=lambda out: convert([first], str(out), **options),
        run=lambda out: append([first, second], str(out), **options),
        again=again, least=20, step=rounds(3, 1), processor=processor, is_same=False,
    )  # fmt: skip


def concatenates(folder: Path, _: ChatProcessor, processor: TextProcessor) -> Ended:
    texts = write_texts(folder / "texts.jsonl", range(60))
    options: dict[str, Any] = {"unit_bytes": 4000, "shard_bytes": 1 << 13, "num_workers": 1, "concat": 128}

    def run(out: Path) -> None:
        convert([texts], str(out), processor=processor, work=folder / f"work-{out.name}", **options)

    return Ended(
        modules=(conversion,), begin=Path.mkdir, run=run, again=lambda out, _: run(out), least=5, step=rounds(2, 1)
    )


def measures(folder: Path, processor: ChatProcessor, _: TextProcessor) -> Ended:
    rows = write_chats(folder / "rows.jsonl", range(40))
    options = ("--tokenizer", processor.tokenizer.name, "--workers", "2", "--work", folder / "work")
    return Ended(
        modules=(measuring,),
        begin=lambda out: convert([rows], str(out), num_workers=1, shard_bytes=1 << 13),
        run=lambda out: index_dataset(str(out), processor, num_workers=1),
        again=lambda out, _: index_dataset(str(out), processor, num_workers=1),
        least=2, words=lambda out, _: ("index", out, *options),
    )  # fmt: skip


def merges(folder: Path, *_: object) -> Ended:
    def run(out: Path, *, overwrite: bool = False) -> None:
        merge_datasets(str(out), [str(out / "a"), str(out / "b")], overwrite=overwrite)

    def begin(out: Path) -> None:
        for name in "ab":
            write_tokens(out / name, num_samples=30)

    return Ended(
        modules=(merge,), begin=begin, run=run, again=lambda out, _: run(out, overwrite=True), least=2,
        words=lambda out, is_again: ("merge", out, out / "a", out / "b", *["--overwrite"] * is_again),
    )  # fmt: skip


def exports(folder: Path, *_: object) -> Ended:
    write_tokens(folder / "tokens", num_samples=300)

    def run(out: Path) -> object:
        return export_dataset(str(folder / "tokens"), str(out), format="jsonl")

    return Ended(
        modules=(export,), begin=Path.mkdir, run=run, again=lambda out, _: run(out), least=2,
        words=lambda out, _: ("unload", folder / "tokens", out, "--format", "jsonl"),
    )  # fmt: skip


@pytest.mark.parametrize("command", [overwrites, appends, concatenates, measures, merges, exports])
def test_a_command_that_ends_at_any_change_leaves_the_old_dataset_or_the_new_one(
    command: Callable[..., Ended], tmp_path: Path, chat_processor: ChatProcessor, tokenizer: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    ended, once = command(tmp_path, chat_processor, TextProcessor.from_pretrained(str(tokenizer))), tmp_path / "once"
    ended.begin(once)
    old = ended.read(once)
    ended.run(once)
    new, states, is_ended = ended.read(once), [], True
    for num_changes in range(0, 100, ended.step):
        out = tmp_path / f"out-{num_changes}"
        ended.begin(out)
        left = [num_changes]
        with monkeypatch.context() as context:
            for module in ended.modules:
                context.setattr(module, "open_storage", lambda url, left=left: EndsAfter(Path(url), left))
            try:
                ended.run(out)
                is_ended = False
            except StorageError as error:
                assert "ended" in str(error)  # noqa: PT017 - the last one does not end so
        states.append(ended.read(out))
        assert states[-1] in (old, new)
        if is_ended:
            ended.again(out, num_changes)
        assert ended.read(out) == new
        if command is not exports:
            assert verify_dataset(str(out), deep=True, processor=ended.processor, num_workers=1).problems == ()
        assert not any("grown" in name or "growing" in name or "unfinished" in name for name in written(str(out)))
        if ended.is_same or not is_ended:
            assert written(str(out)) == written(str(once))
        if command is overwrites:
            assert shards_of(str(out)) == {shard.name for shard in PackedStreamingDataset(out).core.shard_infos}
        if command is appends:
            assert told_rows(out)[20] == "1.jsonl:1"
        if not is_ended:
            break
    assert not is_ended
    assert num_changes > ended.least
    assert states[0] == old
    assert states == sorted(states, key=lambda state: state == new)


@in_long_rounds
@pytest.mark.parametrize("command", [measures, merges, exports])
def test_a_command_that_is_killed_later_each_time_leaves_the_old_dataset_or_the_new_one(
    command: Callable[..., Ended], tmp_path: Path, chat_processor: ChatProcessor, tokenizer: Path
) -> None:
    """With kill -9, in new folders and in the folder of earlier ones, until the command comes to its end."""
    ended, once = command(tmp_path, chat_processor, TextProcessor.from_pretrained(str(tokenizer))), tmp_path / "once"
    assert ended.words is not None
    ended.begin(once)
    old = ended.read(once)
    ended.run(once)
    new, moments = ended.read(once), random.Random(3)
    for number in range(5):
        out, is_finished, num_kills = tmp_path / f"out-{number}", False, 0
        ended.begin(out)
        while not is_finished:
            words = [str(word) for word in ended.words(out, num_kills > 0)]
            with start_module("lmms_stream", words, [{}]) as job:
                time.sleep(moments.uniform(0, 0.1 * num_kills))
                job.send_signal(signal.SIGKILL)
                is_finished = job.wait(LIMIT_S) == 0
            num_kills += 1
            assert ended.read(out) in (old, new)
        assert num_kills > 1
        assert ended.read(out) == new
        assert written(str(out)) == written(str(once))
