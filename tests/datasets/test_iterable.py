"""MultiModalIterableDataset: each row is read once, by any number of readers, also where they stop and others go on."""

from __future__ import annotations

import copy
import gzip
import json
import os
from collections import Counter
from dataclasses import replace
from itertools import count, pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from datasets import Dataset
from lmms_stream.datasets import MultiModalDataset, MultiModalIterableDataset
from lmms_stream.doors.lmms_engine.datasets.length_grouped import DistributedLengthGroupedSampler
from lmms_stream.doors.lmms_engine.datasets.source_files import SourceEntry, sources_of
from lmms_stream.doors.lmms_engine.datasets.source_reader import reading_packs
from lmms_stream.errors import ConfigError, CursorError, DataError, ObjectMissingError, PackingError
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.plan.lane_cursor import LaneState
from lmms_stream.storage.storage import open_storage
from lmms_stream.types import Batch, World
from torch.utils.data import DataLoader

from ..converters.sources.test_by_index import parsed_rows
from ..processors.tiny_vlm import save_processor
from ..rounds import LONG, in_long_rounds, rounds
from .chats import text_config, write_pictures
from .streamed import Readers, counts_of, numbers_of, row, write_rows

ONCE = Counter(range(300))


@pytest.fixture
def config(tokenizer: Path, tmp_path: Path) -> dict[str, Any]:
    """300 rows in three files of different sizes, 12 lanes."""
    for name, numbers in (("a", range(100)), ("b/c", range(100, 290)), ("d", range(290, 300))):
        write_rows(tmp_path / f"rows/{name}.jsonl", numbers)
    return text_config(tmp_path / "rows", tokenizer, tmp_path / "cache", dataset_type="vision_iterable") | {
        "num_canonical_nodes": 12
    }


@pytest.mark.parametrize(
    ("strategy", "shuffle"),
    [
        (strategy, shuffle)
        for shuffle in (True, False)
        for strategy in ("first_fit", "best_fit", "balanced")
        if LONG or shuffle or strategy == "best_fit"
    ],
)
def test_each_row_is_read_once_whatever_the_number_of_readers(
    config: dict[str, Any], tokenizer: Path, strategy: str, shuffle: bool
) -> None:
    config |= {"packing_strategy": strategy, "shuffle": shuffle}
    lanes = []
    for num_ranks, num_workers in ((1, 1), (2, 1), (1, 3), (2, 2)):
        readers = Readers(config, num_ranks, num_workers)
        batches = readers.rest()
        assert counts_of(batches, tokenizer) == ONCE
        assert readers.state.counts.rows == readers.state.counts.samples == 300
        assert all(batch.num_tokens <= 256 for batch in batches)
        of_lane: dict[int, list[list[int]]] = {}
        for batch in batches:
            of_lane.setdefault(batch.afters[0].lane, []).append(batch.input_ids[0].tolist())  # type: ignore[attr-defined]
        lanes.append(of_lane)
    assert len(lanes[0]) > 6
    assert all(each == lanes[0] for each in lanes)  # the packs of a lane do not depend on who reads it


@pytest.mark.parametrize("strategy", ["first_fit", "best_fit", "balanced"])
def test_reading_goes_on_exactly_with_another_number_of_readers(
    config: dict[str, Any], tokenizer: Path, strategy: str
) -> None:
    config |= {"packing_strategy": strategy}
    state, seen = None, []
    for (num_ranks, num_workers), num_batches in (((2, 2), 9), ((1, 1), 7), ((3, 2), 1), ((4, 1), 11), ((1, 2), 999)):
        readers = Readers(config, num_ranks, num_workers, state=state)
        seen += readers.take(num_batches)
        state = readers.state.to_dict()
    assert counts_of(seen, tokenizer) == ONCE
    assert readers.state.counts.rows == 300


def test_the_same_readers_go_on_with_the_same_packs(config: dict[str, Any]) -> None:
    config |= {"packing_strategy": "best_fit"}
    whole = [batch.input_ids[0].tolist() for batch in Readers(config, 1, 1).rest()]
    for stop in range(0, len(whole), rounds(17, 5)):
        first = Readers(config, 1, 1)
        before = [batch.input_ids[0].tolist() for batch in first.take(stop)] if stop else []
        after = [batch.input_ids[0].tolist() for batch in Readers(config, 1, 1, state=first.state.to_dict()).rest()]
        assert before + after == whole


def test_what_lies_before_is_not_read_again(config: dict[str, Any], tmp_path: Path) -> None:
    """Rows that were read and delivered may be broken afterwards, in a file of the same size and time."""
    dataset = MultiModalIterableDataset(config | {"shuffle": False, "num_canonical_nodes": 1})
    for number, batch in enumerate(dataset, start=1):
        dataset.deliver(batch)
        if number == 8:
            break
    state = dataset.state_dict()
    ((_, unit, _, _),) = state["lanes"]["0"]["positions"]
    assert unit > 1
    path = tmp_path / "rows/a.jsonl"
    status, lines = path.stat(), path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"#" * (len(lines[1]) - 1) + b"\n", *lines[2:]]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    again = MultiModalIterableDataset(config | {"shuffle": False, "num_canonical_nodes": 1})
    again.load_state_dict(state)
    assert sum(1 for _ in again) > 20
    with pytest.raises(DataError, match="row 2 of unit 1: not valid JSON"):
        list(MultiModalIterableDataset(config | {"shuffle": False, "num_canonical_nodes": 1}))


def test_it_is_read_by_a_plain_data_loader_with_workers(config: dict[str, Any], tokenizer: Path) -> None:
    dataset = MultiModalIterableDataset(config).build()
    loader = DataLoader(dataset, batch_size=2, num_workers=2, collate_fn=dataset.get_collator())
    seen: list[Batch] = []
    for batch in loader:
        seen.append(batch)
        dataset.deliver(batch)
        if len(seen) == 5:
            break
    assert len(seen[0].afters) == 2  # type: ignore[attr-defined]
    again = MultiModalIterableDataset(config)
    again.load_state_dict(json.loads(json.dumps(dataset.state_dict())))
    seen += DataLoader(again, batch_size=1, num_workers=1, collate_fn=dataset.get_collator())
    assert counts_of(seen, tokenizer) == ONCE


@pytest.mark.parametrize("deliver", [True, False])
def test_a_batch_that_a_loop_breaks_at_is_read_after_the_resume(
    config: dict[str, Any], tokenizer: Path, deliver: bool
) -> None:
    dataset = MultiModalIterableDataset(config)
    seen: list[Batch] = []
    for batch in DataLoader(dataset, batch_size=3, collate_fn=dataset.get_collator()):
        if len(seen) == 4:
            break
        seen.append(batch)
        if deliver:
            dataset.deliver(batch)
    again = MultiModalIterableDataset(config)
    again.load_state_dict(dataset.state_dict())
    seen += again
    assert counts_of(seen, tokenizer) == ONCE


def _epoch(loader: DataLoader[Batch], dataset: MultiModalIterableDataset, tokenizer: Path, stop: int = 0) -> list[str]:
    """The batches of an iteration, in any order, each delivered and told by the rows it holds. stop: break after it."""
    told = []
    for number, batch in enumerate(loader, start=1):
        dataset.deliver(batch)
        told.append(str(numbers_of(batch, tokenizer)))
        if number == stop:
            break
    return sorted(told)


@pytest.fixture(scope="module")
def epochs(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[list[str]]]:
    """A config of 60 rows, and its batches of four epochs, which are all different."""
    folder = tmp_path_factory.mktemp("epochs")
    write_rows(folder / "a.jsonl", range(40))
    write_rows(folder / "b.jsonl", range(40, 60))
    config = text_config(folder, tokenizer, folder, dataset_type="vision_iterable", num_canonical_nodes=4)
    dataset, made = MultiModalIterableDataset(config), []
    for epoch in range(4):
        dataset.set_epoch(epoch)
        batches = list(dataset)
        assert counts_of(batches, tokenizer) == Counter(range(60))
        made.append(sorted(str(numbers_of(batch, tokenizer)) for batch in batches))
    assert len({str(each) for each in made}) == 4
    return config, made


def _loader(dataset: MultiModalIterableDataset, **options: Any) -> DataLoader[Batch]:
    return DataLoader(dataset, batch_size=1, collate_fn=dataset.get_collator(), **options)


Epochs = tuple[dict[str, Any], list[list[str]]]
WORKERS = [
    pytest.param({"num_workers": 0}, id="no workers"),
    pytest.param({"num_workers": 2}, id="workers", marks=in_long_rounds),
    pytest.param({"num_workers": 2, "persistent_workers": True}, id="persistent workers"),
    pytest.param({"num_workers": 2, "multiprocessing_context": "spawn"}, id="spawned workers", marks=in_long_rounds),
]


@pytest.mark.parametrize("options", WORKERS)
def test_each_iteration_is_the_next_epoch_also_after_a_break(
    epochs: Epochs, tokenizer: Path, options: dict[str, Any]
) -> None:
    config, expected = epochs
    dataset = MultiModalIterableDataset(config)
    loader = _loader(dataset, **options)
    assert _epoch(loader, dataset, tokenizer) == expected[0]
    assert set(_epoch(loader, dataset, tokenizer, stop=3)) < set(expected[1])
    assert _epoch(loader, dataset, tokenizer) == expected[2]
    dataset.set_epoch(4)
    dataset.set_epoch(3 + 2)  # the last one counts
    assert _epoch(loader, dataset, tokenizer) not in expected
    with pytest.warns(UserWarning, match=r"set_epoch\(5\): epoch 5 has begun already, .* is epoch 6: .* make a new"):
        dataset.set_epoch(5)
    assert dataset.state_dict()["lanes"]["0"]["epoch"] == 5


@pytest.mark.parametrize("options", WORKERS)
def test_the_first_iteration_after_a_state_continues_its_epoch(
    epochs: Epochs, tokenizer: Path, options: dict[str, Any]
) -> None:
    config, expected = epochs
    dataset = MultiModalIterableDataset(config)
    loader = _loader(dataset, **options)
    _epoch(loader, dataset, tokenizer)
    before = _epoch(loader, dataset, tokenizer, stop=3)
    state = json.loads(json.dumps(dataset.state_dict()))
    assert state == dataset.state_dict()  # looking changes nothing
    again = MultiModalIterableDataset(config)
    again.load_state_dict(state)
    assert again.state_dict() == state
    with pytest.raises(ConfigError, match=r"set_epoch\(0\): the loaded state is in epoch 1, .* give 1 or more"):
        again.set_epoch(0)
    loader = _loader(again, **options)
    assert sorted(before + _epoch(loader, again, tokenizer)) == expected[1]
    assert _epoch(loader, again, tokenizer) == expected[2]
    again.set_epoch(3)  # so that a state at the end of an epoch has the next one left
    last = MultiModalIterableDataset(config)
    last.load_state_dict(again.state_dict())
    assert _epoch(_loader(last, **options), last, tokenizer) == expected[3]


def test_loaders_that_begin_with_the_same_seed_or_at_once_have_epochs_of_their_own(
    epochs: Epochs, tokenizer: Path
) -> None:
    config, expected = epochs
    dataset = MultiModalIterableDataset(config)
    for epoch, stop in enumerate((1, 0)):
        torch.manual_seed(0)
        read = _epoch(_loader(dataset, num_workers=epoch + 1), dataset, tokenizer, stop=stop)
        assert read == expected[epoch] if not stop else set(read) < set(expected[epoch])
    iterators = [iter(_loader(dataset, num_workers=2)) for _ in range(2)]
    made = [sorted(str(numbers_of(batch, tokenizer)) for batch in each) for each in iterators]
    assert sorted(made) == sorted(expected[2:])


class _NumbersWithGaps(type(get_context("fork"))):  # type: ignore[misc]
    """Processes as they are numbered when another thread starts processes, too."""

    def Process(self, *args: Any, **options: Any) -> Any:  # noqa: N802 - the name of multiprocessing
        get_context("fork").Process()
        return get_context("fork").Process(*args, **options)


def test_workers_whose_processes_are_not_numbered_in_turn_read_one_epoch(epochs: Epochs, tokenizer: Path) -> None:
    config, expected = epochs
    dataset = MultiModalIterableDataset(config)
    context = _NumbersWithGaps()
    for epoch in range(2):
        torch.manual_seed(0)
        loader = _loader(dataset, num_workers=2, multiprocessing_context=context)
        assert _epoch(loader, dataset, tokenizer) == expected[epoch]
    loader = _loader(dataset, num_workers=2, multiprocessing_context=context, persistent_workers=True)
    for epoch in range(2, 4):
        assert _epoch(loader, dataset, tokenizer) == expected[epoch]


def test_persistent_workers_that_do_not_hear_of_a_state_are_an_error(epochs: Epochs, tokenizer: Path) -> None:
    config, _ = epochs
    dataset = MultiModalIterableDataset(config)
    loader = _loader(dataset, num_workers=1, persistent_workers=True)
    _epoch(loader, dataset, tokenizer, stop=2)
    dataset.load_state_dict(dataset.state_dict())
    with pytest.raises(ConfigError, match="which cannot receive the state: call it before the DataLoader is"):
        list(loader)


def test_a_copy_counts_its_epochs_on_by_itself(epochs: Epochs, tokenizer: Path) -> None:
    config, expected = epochs
    dataset = MultiModalIterableDataset(config)
    _epoch(_loader(dataset), dataset, tokenizer)
    other = copy.deepcopy(dataset)
    assert _epoch(_loader(other, num_workers=2), other, tokenizer) == expected[1]
    assert _epoch(_loader(dataset), dataset, tokenizer) == expected[1]


def test_without_an_end_epochs_follow_each_other_and_a_state_may_lie_between_them(
    config: dict[str, Any], tokenizer: Path
) -> None:
    state, seen = None, []
    for num_ranks in (2, 3, 1):
        readers = Readers(config, num_ranks, 1, state=state, endless=True)
        seen += readers.take(70)
        state = readers.state.to_dict()
    counts = counts_of(seen, tokenizer)
    epochs = {each.epoch for each in readers.state.lanes.values()}
    assert counts.keys() == ONCE.keys()
    assert min(epochs) - 1 <= min(counts.values()) <= max(counts.values()) <= max(epochs) + 1
    assert max(epochs) > 1


def test_files_that_come_while_it_is_read_are_read_in_the_same_epoch(
    config: dict[str, Any], tokenizer: Path, tmp_path: Path
) -> None:
    readers = Readers(config, 2, 1)
    seen = readers.take(10)
    write_rows(tmp_path / "rows/0.jsonl", range(300, 330))
    seen += readers.take(10)
    readers = Readers(config, 3, 1, state=readers.state.to_dict())  # its look finds the file when the others are read
    seen += readers.take(10)
    write_rows(tmp_path / "rows/z.jsonl", range(330, 350))
    seen += Readers(config, 1, 1, state=readers.state.to_dict()).rest()
    assert counts_of(seen, tokenizer) == Counter(range(350))


def test_a_state_does_not_name_a_file_that_was_there_at_the_end_of_an_earlier_epoch_only(
    config: dict[str, Any], tmp_path: Path
) -> None:
    dataset = MultiModalIterableDataset(config | {"packing": False, "on_error": "skip"})
    passing = tmp_path / "rows/e.jsonl"
    looks = count(1)

    def sources() -> list[SourceEntry]:
        """Found at the look that ends epoch 0, gone when epoch 1 begins. It holds no row, so no pack tells of it."""
        look = next(looks)
        if look == 2:
            passing.write_text("\n")
        if look == 4:
            passing.unlink()
        return sources_of(dataset.config)

    state = dataset.begun(1)
    reading = replace(dataset.reading, num_lanes=state.num_lanes)
    lanes = range(state.num_lanes)
    for pack in reading_packs(sources, reading, lanes=lanes, state=state, endless=True):
        for after in pack.afters:
            state.deliver(after)
        if all(state.lane(lane).epoch == 1 for lane in lanes):
            break
    assert next(looks) > 4
    assert [key for key, *_ in state.to_dict()["files"]["1"] if key == str(passing)] == []


def test_rows_that_are_left_out_after_the_last_pack_of_an_epoch_are_counted(config: dict[str, Any]) -> None:
    dataset = MultiModalIterableDataset(config | {"packing": False, "max_length": 27})
    for epoch in (1, 2):
        num_packs = sum(1 for _ in dataset)
        assert (dataset.counts.rows, dataset.counts.overlong) == (300 * epoch, (300 - num_packs) * epoch)


def test_readers_have_the_same_lanes_where_sources_grow_while_they_begin(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config | {"num_canonical_nodes": None, "packing_length": 64, "packing": True}
    dataset, of_rank_0 = MultiModalIterableDataset(config), MultiModalIterableDataset(config)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    next(iter(of_rank_0))
    lanes = dataset.begun(2).num_lanes, of_rank_0.state_dict()["num_lanes"]
    write_rows(tmp_path / "rows/large.jsonl", range(300, 9000))
    monkeypatch.setenv("RANK", "1")
    of_rank_1 = MultiModalIterableDataset(config)
    next(iter(of_rank_1))
    assert (dataset.begun(2).num_lanes, of_rank_1.state_dict()["num_lanes"]) == lanes
    assert dataset.begun(4).num_lanes != lanes[0]  # others look at the bytes


def test_slices_of_a_file_are_told_apart(tokenizer: Path, tmp_path: Path) -> None:
    """Named in another order they go on; other slices of the same file are not what the state is of."""
    path = write_rows(tmp_path / "rows.jsonl", range(200))

    def sliced(*slices: str) -> dict[str, Any]:
        entries = [{"path": f"{path}@[{each}]", "data_type": "jsonl"} for each in slices]
        config = text_config(path, tokenizer, tmp_path, dataset_type="vision_iterable", num_canonical_nodes=2)
        return config | {"datasets": entries, "dataset_path": None, "dataset_format": "yaml"}

    first = Readers(sliced("0:100", "100:200"), 1, 1)
    seen = first.take(4)
    state = first.state.to_dict()
    rest = Readers(sliced("100:200", "0:100"), 1, 1, state=state).rest()
    assert counts_of(seen + rest, tokenizer) == Counter(range(200))
    with pytest.raises(ObjectMissingError, match=r"rows\.jsonl@\[\d+:\d+\]: the file was removed"):
        Readers(sliced("0:150", "150:200"), 1, 1, state=state).rest()


@pytest.mark.parametrize("kind", ["jsonl", "saved"])
def test_ranks_that_name_slices_of_a_split_have_each_row_once(kind: str, tokenizer: Path, tmp_path: Path) -> None:
    """As LMMS Engine's guide divides a dataset that is too large for the memory of each rank."""
    folder = tmp_path / "set"
    if kind == "jsonl":
        write_rows(folder / "train.jsonl", range(60))
    else:
        Dataset.from_list([row(number) for number in range(60)]).save_to_disk(folder)
    seen: dict[str, list[Batch]] = {"streamed": [], "converted": []}
    for rank in range(3):
        config = text_config(tmp_path, tokenizer, tmp_path / "cache", dataset_format="hf_dataset")
        config["dataset_path"] = f"{folder}?split=train[{rank}::3]"
        seen["streamed"] += Readers(config | {"dataset_type": "vision_iterable"}, 1, 1).rest()
        dataset = MultiModalDataset(config)
        seen["converted"] += [dataset[number] for number in range(len(dataset))]
    assert [counts_of(batches, tokenizer) for batches in seen.values()] == [Counter(range(60))] * 2


def test_a_list_of_sources_may_grow_too(tokenizer: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", range(50))
    write_rows(tmp_path / "b.jsonl", range(50, 80))
    listed = tmp_path / "list.yaml"
    listed.write_text("datasets: [{path: a.jsonl, data_type: jsonl}]\n")
    config = text_config(
        listed, tokenizer, tmp_path, dataset_type="vision_iterable", dataset_format="yaml", num_canonical_nodes=1
    )
    readers = Readers(config, 1, 1)
    seen = readers.take(2)
    listed.write_text("datasets: [{path: a.jsonl, data_type: jsonl}, {path: b.jsonl}]\n")
    assert counts_of(seen + readers.rest(), tokenizer) == Counter(range(80))


def _write_format(folder: Path, format: str) -> Path:
    rows = [row(number) for number in range(120)]
    texts = [{"messages": json.dumps(each["messages"])} for each in rows]
    if format == "jsonl.gz":
        path = folder / "rows.jsonl.gz"
        path.write_bytes(gzip.compress("".join(json.dumps(each) + "\n" for each in rows).encode()))
    elif format == "json":
        path = folder / "rows.json"
        path.write_text(json.dumps(rows))
    elif format == "csv":
        path = folder / "rows.csv"
        quoted = ['"' + each["messages"].replace('"', '""') + '"' for each in texts]
        path.write_text("messages\n" + "\n".join(quoted) + "\n")
    elif format == "parquet":
        path = folder / "rows.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=50)
    elif format == "arrow":
        path = folder / "rows.arrow"
        table = pyarrow.Table.from_pylist(rows)
        with pyarrow.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=30)
    else:  # hf_dataset
        path = folder / "saved"
        Dataset.from_list(rows).save_to_disk(path)
    return path


@pytest.mark.parametrize("format", ["jsonl.gz", "json", "csv", "parquet", "arrow", "hf_dataset", "hub"])
def test_all_formats_are_read_as_they_lie(tokenizer: Path, tmp_path: Path, format: str) -> None:
    if format == "hub":  # as a dataset of the hub is read, from a folder
        path: Any = f"hf:json?data_files={write_rows(tmp_path / 'rows.jsonl', range(120))}&split=train"
    else:
        path = _write_format(tmp_path, format)
    config = text_config(
        path, tokenizer, tmp_path, dataset_type="vision_iterable", dataset_format=format.partition(".")[0],
        num_canonical_nodes=4,
    )  # fmt: skip
    config["dataset_format"] = "hf_dataset" if format == "hub" else config["dataset_format"]
    first = Readers(config, 2, 1)
    seen = first.take(5)
    seen += Readers(config, 1, 1, state=first.state.to_dict()).rest()
    assert counts_of(seen, tokenizer) == Counter(range(120))


def test_rows_of_a_store_are_read_where_they_lie(
    config: dict[str, Any], tokenizer: Path, tmp_path: Path, s3_folder: str
) -> None:
    storage = open_storage(s3_folder)
    for path in (tmp_path / "rows").rglob("*.jsonl"):
        storage.write(path.relative_to(tmp_path / "rows").as_posix(), path.read_bytes())
    config |= {"dataset_path": s3_folder}
    first = Readers(config, 2, 1)
    seen = first.take(12)
    storage.write("new.jsonl", write_rows(tmp_path / "new.jsonl", range(300, 320)).read_bytes())
    seen += Readers(config, 1, 1, state=first.state.to_dict()).rest()
    assert counts_of(seen, tokenizer) == Counter(range(320))


def test_chats_about_pictures_are_what_they_are_converted(tmp_path: Path) -> None:
    path, processor = write_pictures(tmp_path / "pictures"), tmp_path / "processor"
    save_processor(processor, "qwen2_5_vl")
    config = {
        "dataset_type": "vision_iterable",
        "dataset_format": "parquet",
        "dataset_path": str(path),
        "processor_config": {"processor_name": str(processor), "processor_type": "qwen2_5_vl"},
        "packing": True,
        "packing_length": 512,
        "num_canonical_nodes": 4,
    }
    first = Readers(config, 2, 1)
    streamed = first.take(2)
    streamed += Readers(config, 4, 1, state=first.state.to_dict()).rest()
    stored = MultiModalDataset(config | {"dataset_type": "vision", "cache_dir": str(tmp_path / "cache")})
    converted = [stored[number] for number in range(len(stored))]
    assert sorted(map(str, _segments(streamed))) == sorted(map(str, _segments(converted)))
    assert _pixels(streamed) == _pixels(converted) != []


def _pixels(batches: list[Batch]) -> list[bytes]:
    """The patches of all pictures, in some order."""
    found = [patches for batch in batches for patches in batch.inputs.get("pixel_values", torch.empty(0)).numpy()]
    return sorted(map(bytes, found))


def _segments(batches: list[Batch]) -> list[list[int]]:
    return [
        batch.input_ids[0, start:stop].tolist()
        for batch in batches
        for start, stop in pairwise(batch.cu_seqlens.tolist())
    ]


def test_documents_are_cut_into_packs_and_nothing_is_left_out(tokenizer: Path, tmp_path: Path) -> None:
    path = tmp_path / "docs.jsonl"
    texts = [" ".join(f"word{number}" for number in range(20 * size)) for size in range(1, 30)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = text_config(path, tokenizer, tmp_path, dataset_type="fineweb_edu", packing=False, packing_length=64)
    del config["processor_config"]["processor_type"]
    config["processor_config"]["processor_type"] = "pure_text"
    first = Readers(config, 2, 1)
    seen = first.take(7)
    seen += Readers(config, 1, 1, state=first.state.to_dict()).rest()
    dataset = first.dataset
    lengths = [len(dataset.processor.process({"text": text})["input_ids"]) for text in texts]
    assert sum(batch.num_tokens for batch in seen) == sum(lengths)
    assert max(batch.num_tokens for batch in seen) == 64
    assert all(len(batch.sample_ids) == 1 for batch in seen)


def test_what_cannot_be_read_is_an_error_or_counted_once(
    config: dict[str, Any], tokenizer: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "rows/e.jsonl"
    lines = [json.dumps(row(number)) for number in range(300, 310)]
    lines[3], lines[7] = '{"messages": [', json.dumps({"messages": [{"role": "user"}]})
    broken.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r'\(or set on_error="skip" to leave out unreadable rows, with a count\)'):
        Readers(config, 1, 1).rest()
    (tmp_path / "rows/f.jsonl").write_text("")
    for num_ranks in (1, 3):
        readers = Readers(config | {"on_error": "skip"}, num_ranks, 1)
        seen = counts_of(readers.rest(), tokenizer)
        assert seen == Counter(number for number in range(310) if number not in (303, 307))
        assert readers.state.counts.unreadable == 2  # rows; the empty file is passed over
    assert "left out: " in caplog.text
    assert "e.jsonl: row " in caplog.text
    assert "passed over: " in caplog.text
    assert "f.jsonl is empty (0 bytes)" in caplog.text


def test_samples_that_are_longer_than_a_pack_are_counted_or_an_error(config: dict[str, Any], tokenizer: Path) -> None:
    config |= {"packing_length": 30}
    readers = Readers(config, 1, 1)
    seen = counts_of(readers.rest(), tokenizer)
    assert 0 < len(seen) < 300
    assert readers.state.counts.overlong == 300 - len(seen)
    kept = Readers(config | {"filter_overlong": False}, 1, 1)
    batches = kept.rest()
    assert counts_of(batches, tokenizer) == ONCE
    assert kept.state.counts.overlong == 300 - len(seen)
    assert sum(batch.num_tokens > 30 for batch in batches) == 300 - len(seen)
    assert all(len(batch.sample_ids) == 1 for batch in batches if batch.num_tokens > 30)
    with pytest.raises(PackingError, match=r"row \d+ of unit \d+ has \d+ tokens, more than packing_length 30: raise"):
        Readers(config | {"overlong": "error"}, 1, 1).rest()


@pytest.mark.parametrize(("overlong", "pieces"), [("truncate", [100]), ("split", [100, 50])])
def test_long_chats_of_text_are_cut_by_processors_of_media_too(
    tmp_path: Path, overlong: str, pieces: list[int]
) -> None:
    save_processor(tmp_path / "processor", "qwen2_vl")
    words = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "x" * 100}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(words) + "\n")
    config = {
        "dataset_type": "vision_iterable", "dataset_path": str(tmp_path / "rows.jsonl"), "packing": True,
        "processor_config": {"processor_name": str(tmp_path / "processor"), "processor_type": "qwen2_vl"},
        "packing_length": 100, "overlong": overlong, "num_canonical_nodes": 1,
    }  # fmt: skip
    packs = [*MultiModalIterableDataset(config)]
    assert [pack.num_tokens for pack in packs] == pieces
    assert all(pack.position_ids[:, 0, 0].tolist() == [0] * 4 for pack in packs)


def test_a_file_that_changes_or_goes_while_it_is_read_is_an_error(config: dict[str, Any], tmp_path: Path) -> None:
    readers = Readers(config, 1, 1)
    readers.take(3)
    state = readers.state.to_dict()
    path = tmp_path / "rows/b/c.jsonl"
    text = path.read_text()
    path.write_text(text + json.dumps(row(999)) + "\n")
    with pytest.raises(DataError, match=r"c\.jsonl was changed during reading: .* write new rows to new files"):
        Readers(config, 1, 1, state=state).rest()
    path.unlink()
    with pytest.raises(ObjectMissingError, match=r"c\.jsonl: the file was removed .*: restore it"):
        Readers(config, 1, 1, state=state).rest()


def test_readers_that_cannot_share_the_lanes_are_refused_with_the_numbers(config: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError,
        match=r"5 ranks of 1 workers are 5 readers, which cannot share 12 lanes: ranks times workers must be one of "
        "1, 2, 3, 4, 6, 12; .* num_canonical_nodes to a multiple of 5",
    ):
        Readers(config, 5, 1).rest()


def test_a_state_of_other_lanes_or_settings_is_refused(config: dict[str, Any]) -> None:
    first = Readers(config, 1, 1)
    first.take(2)
    state = first.state.to_dict()
    with pytest.raises(
        CursorError, match=r"has 12 lanes, this dataset 8: set num_canonical_nodes to 12, .* 1, 2, 3, 4"
    ):
        Readers(config | {"num_canonical_nodes": 8}, 1, 1, state=state)
    with pytest.raises(CursorError, match=r"has other settings \(packing, order\): restore them"):
        Readers(config | {"packing_length": 128, "data_seed": 1}, 1, 1, state=state)
    with pytest.raises(CursorError, match="the saved state is damaged"):
        Readers(config, 1, 1, state=state | {"lanes": {"0": {}}})
    with pytest.raises(CursorError, match="does not belong to sources read without conversion"):
        Readers(config, 1, 1, state={"version": 1, "plan": "x"})


def test_a_state_with_a_number_out_of_range_is_refused(config: dict[str, Any]) -> None:
    first = Readers(config, 1, 1)
    first.take(2)
    state = first.state.to_dict()
    lane = next(number for number, each in state["lanes"].items() if each["positions"])

    def changed(**changes: Any) -> dict[str, Any]:
        return state | {"lanes": state["lanes"] | {lane: state["lanes"][lane] | changes}}

    ((file, unit, *_), *others) = state["lanes"][lane]["positions"]
    for damaged in (
        state | {"step": -1},
        state | {"lanes": state["lanes"] | {"12": state["lanes"][lane]}},
        changed(epoch=-1),
        changed(num_packs=-1),
        changed(finished=[[-1, 0]]),
        changed(positions=[[file, -1, 0, 0], *others]),
        changed(positions=[[99, 0, 0, 0], *others]),
    ):
        with pytest.raises(CursorError, match="the saved state is damaged"):
            Readers(config, 1, 1, state=damaged)
    for position in ([file, 1 << 40, 0, 0], [file, unit, 1 << 40, 0], [file, unit, 0, 1 << 40]):
        with pytest.raises(
            CursorError, match=r"the saved state is at \w+ 1099511627776 of .*, which has \d+: the state"
        ):
            Readers(config, 1, 1, state=changed(positions=[position, *others])).rest()


def write_long_rows(path: Path) -> Path:
    """1000 chats, whose lengths differ as those of chats do: some seven of them fill a pack of 1024 tokens."""
    words = np.clip(np.random.default_rng(0).lognormal(np.log(60), 0.8, 1000), 1, 450).astype(int).tolist()
    path.write_text(
        "".join(
            json.dumps({"messages": [*row(number)["messages"][:1], {"role": "assistant", "content": "It is. " * size}]})
            + "\n"
            for number, size in enumerate(words)
        )
    )
    return path


@in_long_rounds
@pytest.mark.parametrize("strategy", ["first_fit", "best_fit", "balanced"])
def test_lanes_are_few_enough_that_packs_are_as_full_as_in_one_lane(
    strategy: str, tokenizer: Path, tmp_path: Path
) -> None:
    """Sums over three files: the order of rows follows from a file's path, and some orders pack a little better."""
    num_packs, in_one, planned, num_lanes = 0, 0, 0, 4
    for number in range(3):
        path = write_long_rows(tmp_path / f"rows-{number}.jsonl")
        config = text_config(path, tokenizer, tmp_path / "cache", dataset_type="vision_iterable") | {
            "packing_length": 1024, "packing_strategy": strategy,
        }  # fmt: skip
        readers = Readers(config, 2, 2)
        assert readers.state.num_lanes == num_lanes
        in_one += len(Readers(config | {"num_canonical_nodes": 1}, 1, 1).rest())
        num_packs += len(readers.rest())
        planned += len(MultiModalDataset(config | {"dataset_type": "vision"})) if strategy == "best_fit" else 0
    assert num_packs <= 1.02 * in_one + 3 * num_lanes
    assert strategy != "best_fit" or num_packs <= 1.03 * planned


def test_the_lanes_of_a_state_are_kept_and_those_of_before_load(tokenizer: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", range(300))
    config = text_config(path, tokenizer, tmp_path / "cache", dataset_type="vision_iterable")
    assert [Readers(config, num, 1).state.num_lanes for num in (1, 3, 100)] == [1, 3, 100]
    for num_lanes, others in ((64, (2, 2)), (12, (1, 3))):
        before = Readers(config | {"num_canonical_nodes": num_lanes}, 1, 1)
        seen = before.take(9)
        after = Readers(config, *others, state=before.state.to_dict())  # which has chosen its lanes already
        assert after.state.num_lanes == num_lanes
        assert counts_of([*seen, *after.rest()], tokenizer) == ONCE
    loader = MultiModalIterableDataset(config).open_loader(global_batch=5, world=World(rank=0, world_size=5))
    with pytest.raises(
        CursorError, match="has 12 lanes, which 5 readers cannot share: ranks times workers must be one"
    ):
        loader.load_state_dict(before.state.to_dict())


def test_memory_of_a_stream_is_that_of_its_open_packs(config: dict[str, Any]) -> None:
    for strategy, num_open in (("first_fit", 2), ("best_fit", 8)):
        dataset = MultiModalIterableDataset(config | {"packing_strategy": strategy})
        found = dataset.estimate_memory(num_workers=3)
        assert found.largest_pack == 24 * 256 == found.pack
        assert found.plan == 4 * num_open * found.pack  # a worker reads 4 of 12 lanes
        assert found.worker == found.plan + 3 * found.largest_pack
        assert (found.disk, found.index) == (0, 0)
    chosen = MultiModalIterableDataset(config | {"num_canonical_nodes": None})
    assert chosen.estimate_memory(num_workers=0) == chosen.estimate_memory(num_workers=1)


@pytest.mark.parametrize(("epoch", "message"), [(-1, "at least 0, got -1"), ("1", "a whole number"), (1.5, "a whole")])
def test_what_is_no_epoch_is_refused(config: dict[str, Any], epoch: Any, message: str) -> None:
    sampler = DistributedLengthGroupedSampler(1, lengths=[1])
    for each in (MultiModalIterableDataset(config), MultiModalDataset(config), sampler):
        with pytest.raises(ConfigError, match=f"epoch must be {message}"):
            each.set_epoch(epoch)


def test_packs_have_no_numbers(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"dataset\[3\]: packs of a MultiModalIterableDataset have no numbers"):
        MultiModalIterableDataset(config)[3]


def test_on_shards_it_is_their_lanes(config: dict[str, Any], tokenizer: Path, tmp_path: Path) -> None:
    from lmms_stream.converters.convert import convert

    convert([str(tmp_path / "rows")], str(tmp_path / "shards"), num_workers=1)
    changes = {"dataset_format": "mds", "dataset_path": str(tmp_path / "shards"), "packing_window": 64}
    dataset = MultiModalIterableDataset(config | changes | {"num_canonical_nodes": 4, "packing_strategy": "best_fit"})
    expected = [batch.input_ids for batch, _ in zip(PackedLoader(dataset, global_batch=1), range(40), strict=False)]
    found = [batch.input_ids for batch, _ in zip(dataset, range(40), strict=False)]
    assert all(one.equal(other) for one, other in zip(expected, found, strict=True))
    second = [batch.input_ids for batch, _ in zip(dataset, range(40), strict=False)]
    planner = PackedLoader(dataset, global_batch=1)
    epoch_1 = {str(lane): LaneState(epoch=1).to_dict() for lane in range(4)}
    planner.load_state_dict(planner.state_dict() | {"lanes": epoch_1})
    assert all(one.equal(other.input_ids) for one, other in zip(second, planner, strict=False))
    assert not all(one.equal(other) for one, other in zip(second, found, strict=True))
    with pytest.raises(ConfigError, match="state_dict: the state of a dataset of shards is kept by its loader"):
        dataset.state_dict()


@pytest.mark.parametrize("shuffle", rounds([True], [True, False]))
def test_rows_that_a_state_has_passed_are_not_parsed(tokenizer: Path, tmp_path: Path, shuffle: bool) -> None:
    """Of a unit that was begun only what is left is parsed, and of packs that were open their rows."""
    path = write_rows(tmp_path / "rows.jsonl", range(1600))
    config = text_config(path, tokenizer, tmp_path, dataset_type="vision_iterable", num_canonical_nodes=1)
    config |= {"shuffle": shuffle, "packing_strategy": "best_fit"}
    first = Readers(config, 1, 1)
    while True:
        first.take(1)
        progress = first.state.lane(0)
        ((_, (unit, row, piece)),) = progress.positions.items()
        if unit > 1 and row > 150:
            break
    rest = 1600 - progress.counts.rows + (piece > 0)
    num_open = len({ref[:3] for pack in progress.open for ref in pack})
    with parsed_rows() as parsed:
        seen = Readers(config, 1, 1, state=first.state.to_dict()).rest()
    assert len(seen) > 50
    assert num_open > 0
    assert len(parsed) == num_open + rest  # and the first rows, which decide the kind, together
    assert len(json.dumps(first.state.to_dict())) < 2000
