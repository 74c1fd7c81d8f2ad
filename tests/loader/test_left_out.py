from __future__ import annotations

import json
import multiprocessing
import random
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lmms_stream.errors import ConfigError, DataError, StorageError, WorkerError
from lmms_stream.loader.bad_samples import BadSamples, is_of_sample
from lmms_stream.loader.drop_list import DropList, append_left_out, read_left_out, write_left_out
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.loader.worker import START_BYTES
from lmms_stream.loader.workers import StartMethod
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.left_out import LeftOut, LeftOutSample
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.packing import Overlong, PackingConfig
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.types import Batch, Processed, Sample, World

from ..conftest import write_tokens
from ..processes import run_module
from ..rounds import LONG, in_long_rounds, rounds

RAISES, LONGER, SLEEPS = "asyncio.run(", "StreamReader", "Semaphore"  # samples with these words are bad
BAD = BadSamples(on_bad_sample="quarantine")
LISTED = LeftOutSample("data", 3, "cannot be decoded", 5, "quarantined")


class _Fails(ChatProcessor):
    """Some samples cannot be processed, of others it makes more tokens than it measures."""

    def process(self, sample: Sample) -> Processed:
        text = str(sample)
        if RAISES in text:
            raise ValueError("this sample is damaged")
        processed = super().process(sample)
        if LONGER in text:
            return {name: np.append(values, 0) for name, values in processed.items()}
        return processed


class _NeedsMemory(ChatProcessor):
    def process(self, sample: Sample) -> Processed:
        raise MemoryError


class _Hangs(ChatProcessor):
    def process(self, sample: Sample) -> Processed:
        if SLEEPS in str(sample):
            time.sleep(60)
        return super().process(sample)


def open_dataset(folder: Path, processor: Any, *, overlong: Overlong = "drop", length: int = 1024) -> Any:
    return PackedStreamingDataset(
        folder,
        processor=processor,
        packing=PackingConfig(packing_length=length, overlong=overlong),
        order=OrderConfig(num_canonical_nodes=2, shuffle_block_size=100),
    )


def shown(batch: Batch) -> dict[tuple[int, int], tuple[list[int], list[int], list[int]]]:
    """The segments of a pack by sample and offset: tokens, labels, positions."""
    found = {}
    for number, (start, stop) in enumerate(batch.sample_bounds):
        at = slice(start, stop)
        rows = (batch.input_ids[0, at], batch.labels[0, at], batch.position_ids[0, at])
        found[batch.sample_of(number), start] = tuple(row.tolist() for row in rows)
    return found  # type: ignore[return-value]


def check_masked(plain: list[Batch], masked: list[Batch], left_out: Mapping[int, int]) -> None:
    """The same packs, but for segments of samples that are left out from a step on."""
    assert len(plain) == len(masked)
    num_masked = 0
    for expected, batch in zip(plain, masked, strict=True):
        assert batch.cu_seqlens.tolist() == expected.cu_seqlens.tolist()
        assert batch.sample_ids.tolist() == expected.sample_ids.tolist()
        others = shown(expected)
        for key, (tokens, labels, positions) in shown(batch).items():
            if left_out.get(key[0], 1 << 60) <= batch.step:
                num_masked += 1
                assert set(tokens) == {0}
                assert set(labels) == {-100}
                assert positions == others[key][2]
            else:
                assert (tokens, labels, positions) == others[key]
        assert batch.num_loss_tokens == int((batch.labels != -100).sum())
        here = {each for each in expected.sample_ids.tolist() if left_out.get(each, 1 << 60) <= batch.step}
        assert {each.sample_id for each in batch.left_out} == here
    assert num_masked or not left_out


@pytest.mark.parametrize(
    ("overlong", "num_workers"),
    [
        ("split", 0),
        ("drop", 2),
        pytest.param("split", 2, marks=in_long_rounds),
        pytest.param("drop", 0, marks=in_long_rounds),
    ],
)
def test_samples_that_fail_are_padding_and_all_else_stays(
    dataset_folder: Path, chat_processor: ChatProcessor, tmp_path: Path, num_workers: int, overlong: Overlong
) -> None:
    length = 1024 if overlong == "drop" else 200
    good = open_dataset(dataset_folder, chat_processor, overlong=overlong, length=length)
    failing = open_dataset(dataset_folder, _Fails(chat_processor.tokenizer), overlong=overlong, length=length)
    plain = list(PackedLoader(good, global_batch=8))
    bad = BadSamples(on_bad_sample="quarantine", folder=str(tmp_path))
    loader = PackedLoader(failing, global_batch=8, num_workers=num_workers, bad=bad)
    masked = list(loader)
    wrong = [i for i in range(good.num_samples) if any(word in str(good[i]) for word in (RAISES, LONGER))]
    packed = {each for batch in plain for each in batch.sample_ids.tolist()}
    assert len(wrong) > 2
    check_masked(plain, masked, {each: 0 for each in wrong if each in packed})
    assert {each.sample_id for each in loader.left_out.samples} == packed & {*wrong}
    assert any("this sample is damaged" in each.reason for each in loader.left_out.samples)
    assert any("its lengths index says" in each.reason for each in loader.left_out.samples)
    assert read_left_out(tmp_path, loader.identities).left_out.samples == loader.left_out.samples


def test_what_an_earlier_start_left_out_is_not_tried_again(dataset_folder: Path, chat_processor: ChatProcessor) -> None:
    good = open_dataset(dataset_folder, chat_processor)
    plain = list(PackedLoader(good, global_batch=8))
    sample_id = int(plain[0].sample_ids[0])
    loader = PackedLoader(good, global_batch=8, num_workers=1)
    loader.leave_out(LeftOut([LeftOutSample("data", sample_id, "damaged", 0, "quarantined")]))
    check_masked(plain, list(loader), {sample_id: 0})


def test_a_bad_sample_is_an_error_that_names_it_unless_it_is_asked_for(
    dataset_folder: Path, chat_processor: ChatProcessor
) -> None:
    dataset = open_dataset(dataset_folder, _Fails(chat_processor.tokenizer))
    with pytest.raises(Exception, match=r"damaged|lengths index says") as told:
        list(PackedLoader(dataset, global_batch=8))
    assert "sample " in str([told.value, *getattr(told.value, "__notes__", [])])
    with pytest.raises(MemoryError):
        list(
            PackedLoader(open_dataset(dataset_folder, _NeedsMemory(chat_processor.tokenizer)), global_batch=8, bad=BAD)
        )


def test_a_failing_store_or_machine_is_no_bad_sample() -> None:
    of_store = DataError("it cannot be decoded")
    of_store.__cause__ = OSError(5, "Input/output error")
    errors: list[Exception] = [StorageError("x"), ConfigError("x"), MemoryError(), ImportError("x"), of_store]
    assert not any(map(is_of_sample, errors))
    assert all(map(is_of_sample, [DataError("x"), OSError("image file is truncated"), KeyError("messages")]))


@pytest.mark.parametrize("num_workers", [1, pytest.param(2, marks=in_long_rounds)])
def test_a_sample_that_takes_too_long_ends_the_run_with_its_name(
    dataset_folder: Path, chat_processor: ChatProcessor, num_workers: int
) -> None:
    dataset = open_dataset(dataset_folder, _Hangs(chat_processor.tokenizer))
    bad = BadSamples(on_bad_sample="quarantine", sample_timeout_s=1)
    loader = PackedLoader(dataset, global_batch=8, num_workers=num_workers, bad=bad)
    with pytest.raises(WorkerError, match=r"takes longer than sample_timeout_s, 1 s.*drop names: data:\d+") as told:
        list(loader)
    assert SLEEPS in str(dataset[int(str(told.value).rpartition(":")[2])])


def test_a_slow_sample_is_named_without_workers(dataset_folder: Path, chat_processor: ChatProcessor) -> None:
    dataset = open_dataset(dataset_folder, chat_processor)
    loader = PackedLoader(dataset, global_batch=8, bad=BadSamples(sample_timeout_s=1e-9))
    with pytest.raises(WorkerError, match="takes longer than sample_timeout_s"):
        list(loader)


@in_long_rounds
def test_a_process_without_workers_ends_itself_when_a_sample_never_ends(tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", num_samples=20)
    done = run_module("tests.loader.hanging_program", str(tmp_path / "data"), timeout_s=120)
    assert done.returncode == 1
    assert "ends itself, as it is still at this sample; error: sample data:7 takes longer than" in done.stderr
    assert "drop names: data:7\n" in done.stderr
    assert "in process\n" in done.stderr  # the stack of its thread


@pytest.mark.parametrize("num_workers", [0, 1])
def test_dropped_samples_of_packs_made_at_once_are_padding(tmp_path: Path, num_workers: int) -> None:
    write_tokens(tmp_path / "data", num_samples=300, longest=150)
    dataset = open_dataset(tmp_path / "data", TokensProcessor(), overlong="split", length=64)
    plain = list(PackedLoader(dataset, global_batch=8))
    (tmp_path / "drop").write_text("# a comment\ndata:7\n\n:19\n")
    later = [*(each for each in range(100, 110))]
    write_left_out(tmp_path / "later", LeftOut(LeftOutSample("data", each, "", 0, "quarantined") for each in later), {})
    drop: list[DropList | Mapping[str, Any]] = [
        DropList(file=str(tmp_path / "drop")),
        {"file": str(tmp_path / "later"), "from_step": 9},
    ]
    loader = PackedLoader(dataset, global_batch=8, num_workers=num_workers, drop=drop)
    check_masked(plain, list(loader), {7: 0, 19: 0} | dict.fromkeys(later, 9))
    assert {each.kind for each in loader.left_out.samples} == {"dropped"}


@pytest.mark.parametrize("start_method", ["fork", *(["spawn", "server"] if LONG else [])])
def test_persistent_workers_hear_of_left_out_samples_of_any_size(
    tmp_path: Path, start_method: StartMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    write_tokens(tmp_path, num_samples=300, longest=60)
    dataset = open_dataset(tmp_path, TokensProcessor(), length=64)
    plain = PackedLoader(dataset, global_batch=8)
    loader = PackedLoader(
        dataset, global_batch=8, num_workers=2, persistent_workers=True, start_method=start_method, timeout_s=90
    )
    left_out: dict[int, int] = {}
    started: list[set[int | None]] = []
    for sample_id, num_characters in ((3, 1), (4, START_BYTES), (5, 1), (6, 3 * START_BYTES)):
        reason = "r" * num_characters
        loader.leave_out(loader.left_out.merge([LeftOut([LeftOutSample("data", sample_id, reason, 0, "quarantined")])]))
        left_out[sample_id] = 0
        if num_characters > START_BYTES:  # while workers that cannot read it are about to be ended
            with monkeypatch.context() as changed:
                changed.setattr(loader._workers, "end", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    next(iter(loader))
        check_masked(list(plain), list(loader), left_out)
        started.append({child.pid for child in multiprocessing.active_children()})
    assert started[0] != started[1] == started[2] != started[3]  # others only where the memory was too small


def test_rows_of_converted_files_are_dropped(
    dataset_folder: Path, chat_processor: ChatProcessor, tmp_path: Path
) -> None:
    dataset = open_dataset(dataset_folder, chat_processor)
    row = dataset.core.origin_of(5)
    (tmp_path / "drop").write_text(f"{row}\n")
    loader = PackedLoader(dataset, global_batch=8, drop=str(tmp_path / "drop"))
    assert [each.name for each in loader.left_out.samples] == ["data:5"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("data:100000", r"line 1: data has no sample 100000: it has \d+"),
        ("nowhere.jsonl:3", "nowhere.jsonl:3 is no sample: the sources are data, and as a row of a file"),
        ("nowhere.jsonl:0", "line 1: nowhere.jsonl:0: rows are counted from 1"),
        ("seven", "line 1: 'seven' names no sample: write SOURCE:ID, or FILE:ROW"),
        ('{"source": "books", "sample_id": 1}', "there is no source 'books': the sources are data"),
        ('{"source": "data"}', "is no JSON with source and sample_id"),
        (None, "cannot be read"),
    ],
)
def test_drop_lists_with_unknown_names_are_refused(
    dataset_folder: Path, chat_processor: ChatProcessor, tmp_path: Path, line: str | None, message: str
) -> None:
    if line is not None:
        (tmp_path / "drop").write_text(line)
    with pytest.raises(ConfigError, match=message):
        PackedLoader(open_dataset(dataset_folder, chat_processor), global_batch=8, drop=str(tmp_path / "drop"))


def test_settings_that_cannot_be_are_refused(dataset_folder: Path, chat_processor: ChatProcessor) -> None:
    dataset = open_dataset(dataset_folder, chat_processor)
    with pytest.raises(ConfigError, match="on_bad_sample must be error or quarantine, got 'skip'"):
        BadSamples(on_bad_sample="skip")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="sample_timeout_s must be above 0, and at most 1,000,000,000 seconds, got 0"):
        BadSamples(sample_timeout_s=0)
    with pytest.raises(ConfigError, match="from_step of the drop list x must be 0 or more, got -1"):
        DropList(file="x", from_step=-1)
    with pytest.raises(ConfigError, match=r"drop must be a file, \{FILE: STEP\}, or a list of"):
        PackedLoader(dataset, global_batch=8, drop=[{"files": "x"}])
    own = PackedLoader(dataset, global_batch=8, collator=lambda *_, **__: None)  # type: ignore[arg-type]
    only_of_language_models = "only batches of language models can leave samples out, but the collator is your own"
    with pytest.raises(ConfigError, match=only_of_language_models):
        PackedLoader(dataset, global_batch=8, bad=BAD, collator=own.settings.collator)
    with pytest.raises(ConfigError, match=only_of_language_models):
        own.leave_out(LeftOut([LISTED]))


def test_a_list_on_disk_lacks_at_most_an_unfinished_line(tmp_path: Path) -> None:
    append_left_out(tmp_path, LISTED, dataset="0f", rank=0, worker=1)
    path = tmp_path / "rank-0-worker-1.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:20])
    assert read_left_out(tmp_path, {"data": "0f"}).left_out.samples == [LISTED]
    append_left_out(tmp_path, replace(LISTED, sample_id=4), dataset="0f", rank=0, worker=1)
    assert [each.sample_id for each in read_left_out(tmp_path, {"data": "0f"}).left_out.samples] == [3, 4]
    for line, message in (
        (b"{}", "has no dataset"),
        (b'{"dataset": "0f"}', "must have exactly source"),
        (b"7", "has no dataset"),
    ):
        path.write_bytes(line + b"\n")
        with pytest.raises(DataError, match=rf"line 1: .*{message}.*; correct the line or remove the file"):
            read_left_out(tmp_path, {"data": "0f"})
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be appended to"):
        append_left_out(tmp_path / "file", LISTED, dataset="0f", rank=0, worker=0)
    assert json.loads(whole)["sample_id"] == 3


def test_lists_of_other_datasets_leave_nothing_out(tmp_path: Path) -> None:
    books = replace(LISTED, source="books")
    append_left_out(tmp_path, LISTED, dataset="0f", rank=0, worker=0)
    append_left_out(tmp_path, replace(LISTED, sample_id=4), dataset="1e", rank=1, worker=0)
    append_left_out(tmp_path, books, dataset="2d", rank=1, worker=0)
    found = read_left_out(tmp_path, {"data": "1e"})
    assert [each.name for each in found.left_out.samples] == ["data:4"]
    assert found.of_others == ("data:3", "books:3")


def test_a_list_that_a_run_wrote_is_refused_for_another_dataset(tmp_path: Path) -> None:
    for name, num_samples in (("data", 60), ("other", 61)):
        write_tokens(tmp_path / name, num_samples=num_samples)
    one, other = (open_dataset(tmp_path / name, TokensProcessor()) for name in ("data", "other"))
    drop = str(tmp_path / "left_out.jsonl")
    write_left_out(Path(drop), LeftOut([LISTED]), PackedLoader(one, global_batch=8).identities)
    assert [each.name for each in PackedLoader(one, global_batch=8, drop=drop).left_out.samples] == ["data:3"]
    with pytest.raises(
        ConfigError, match=r"line 1: the sample is of a dataset \w{16}, and data is \w{16}, with other sample"
    ):
        PackedLoader(other, global_batch=8, drop=drop)


class _Tokens:
    """A TokensProcessor that makes samples one by one, and fails for those whose number leaves 3 when divided by 17."""

    columns, schema, description = TokensProcessor.columns, TokensProcessor.schema, TokensProcessor().description

    def measure(self, sample: Sample) -> int:
        return len(sample["input_ids"])

    def process(self, sample: Sample) -> Processed:
        if sample["input_ids"][0] % 17 == 3:
            raise DataError("it is one of those that fail")
        return TokensProcessor().process(sample)


def _check_drops(folder: Path, drop_folder: Path, draw: random.Random, *, num_steps: int = 25) -> None:
    """Resume in other worlds with other drop lists: samples are padding from the steps of these lists on."""
    names, fails = ["a", "b"][: draw.randint(1, 2)], draw.random() < 0.3
    processor: Any = _Tokens() if fails else TokensProcessor()
    length, overlong = draw.choice([(64, "split"), (200, "error"), (50, "truncate")])

    def opened(**options: Any) -> PackedLoader:
        datasets = {
            name: open_dataset(folder / name, processor, overlong=overlong, length=length)  # type: ignore[arg-type]
            for name in names
        }
        return PackedLoader(datasets, global_batch=12, timeout_s=60, **options)

    plain = [batch for batch in PackedLoader(
        {name: open_dataset(folder / name, TokensProcessor(), overlong=overlong, length=length) for name in names},  # type: ignore[arg-type]
        global_batch=12,
    ) if batch.step < num_steps]  # fmt: skip
    state, step, last_step, left_out = None, 0, plain[-1].step, LeftOut()
    while step <= last_step:
        lists = {}
        for number in range(draw.randint(0, 2)):
            listed = {(draw.choice(names), draw.randrange(40)) for _ in range(draw.randint(0, 30))}
            file, from_step = drop_folder / f"{number}", draw.choice([0, step, step + 2, draw.randrange(num_steps)])
            file.write_text("".join(f"{source}:{sample_id}\n" for source, sample_id in sorted(listed)))
            lists[str(file)] = listed, from_step
        since = {each: min(first for ids, first in lists.values() if each in ids)
                 for each in set().union(*(ids for ids, _ in lists.values()))}  # fmt: skip
        world_size = draw.choice([1, 2, 3, 4])
        stop = min(last_step + 1, step + draw.randint(1, 8))
        masked = []
        for rank in range(world_size):
            num_workers = draw.choice([0, 0, 1, 2])
            loader = opened(
                world=World(rank=rank, world_size=world_size), num_workers=num_workers,
                start_method="fork", persistent_workers=num_workers > 0 and draw.random() < 0.3,
                drop={file: first for file, (_, first) in lists.items()} or None,
                bad=BadSamples(on_bad_sample="quarantine" if fails else "error"),
            )  # fmt: skip
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
            loader.leave_out(left_out)
            for batch in loader:
                masked.append(batch)
                if loader.step == stop:
                    break
            after, quarantined = loader.state_dict(), loader.left_out.of_kind("quarantined")
        state, left_out = after, draw.choice([left_out, quarantined])
        expected = [batch for batch in plain if step <= batch.step < stop]
        assert len(masked) == len(expected)
        for wanted, batch in zip(sorted(expected, key=_key), sorted(masked, key=_key), strict=True):
            _check_pack(wanted, batch, since, fails=fails)
        step = stop


def _pack(batch: Batch) -> tuple[Any, ...]:
    return batch.step, batch.source, batch.sample_ids.tolist(), batch.cu_seqlens.tolist()


def _key(batch: Batch) -> tuple[Any, ...]:
    """The labels tell the pieces of one sample apart."""
    return *_pack(batch), batch.labels.tolist()


def _check_pack(wanted: Batch, batch: Batch, since: Mapping[tuple[str, int], int], *, fails: bool) -> None:
    assert _pack(wanted) == _pack(batch)
    hidden = set()
    others = shown(wanted)
    for key, (tokens, labels, positions) in shown(batch).items():
        dropped = since.get((batch.source, key[0]), 1 << 60) <= batch.step
        if dropped or (fails and key[0] % 17 == 3):
            hidden.add(key[0])
            assert (set(tokens), set(labels), positions) == ({0}, {-100}, others[key][2])
        else:
            assert (tokens, labels, positions) == others[key]
    assert {each.sample_id for each in batch.left_out} == hidden
    assert batch.num_loss_tokens == int((batch.labels != -100).sum())


def test_drop_lists_hold_from_their_steps_on_whatever_world_resumes(tmp_path: Path) -> None:
    for name, num_samples in (("a", 400), ("b", 60)):
        write_tokens(tmp_path / name, num_samples=num_samples, longest=150)
    for case in range(rounds(3, 120)):
        _check_drops(tmp_path, tmp_path, random.Random(case))
