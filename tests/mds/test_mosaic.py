"""What users of MosaicML's StreamingDataset do, with ours: subclasses, states, shards, streams, other formats."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lmms_stream
import numpy as np
import pytest
import streaming
import torch
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream import (
    PackedLoader,
    PackedStreamingDataset,
    PackingConfig,
    Stream,
    StreamingDataLoader,
    StreamingDataset,
    TextProcessor,
    TrainConfig,
)
from lmms_stream.converters.writing.encoding import column_encoder, fixed_size
from lmms_stream.errors import ConfigError, CursorError, ShardError, StorageError
from lmms_stream.mds import mosaic, packed
from lmms_stream.mds.epochs import EpochCounter
from lmms_stream.mds.mosaic_streams import weigh
from lmms_stream.plan.mosaic_order import BATCHING_METHODS
from lmms_stream.plan.order import OrderConfig
from lmms_stream.storage.fetch_config import FetchConfig
from lmms_stream.types import World
from streaming import CSVWriter, JSONWriter, MDSWriter, TSVWriter, XSVWriter
from streaming.base.format.mds import encodings
from torch.utils.data import DataLoader

from ..rounds import rounds
from ..strategies import examples, seeds

NUM_SAMPLES = 33
SMALL: dict[str, Any] = {"batch_size": 4, "shuffle": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_numbers(tmp_path_factory.mktemp("mosaic") / "plain")


@pytest.fixture(scope="module")
def zipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_numbers(tmp_path_factory.mktemp("mosaic") / "zipped", compression="zstd")


def write_numbers(folder: Path, *, compression: str | None = None, size_limit: int = 200) -> Path:
    with MDSWriter(
        columns={"number": "int"}, out=str(folder), hashes=["sha1"], size_limit=size_limit, compression=compression
    ) as writer:
        for number in range(NUM_SAMPLES):
            writer.write({"number": number})
    return folder


def numbers(samples: Any) -> list[int]:
    return [int(sample["number"]) for sample in samples]


def as_lists(samples: list[dict[str, Any]]) -> dict[str, list[int]]:
    return {"number": numbers(samples)}


class Doubled(StreamingDataset):
    """A subclass as users write it: keywords to the parent, and a transform in __getitem__."""

    def __init__(self, *, factor: int, **keywords: Any):
        super().__init__(**keywords)
        self.factor = factor

    def __getitem__(self, index: Any) -> Any:
        sample = super().__getitem__(index)
        return {"number": sample["number"] * self.factor}


# Iteration


@pytest.mark.parametrize("num_workers", [0, 2])
def test_iterating_gives_what_a_subclass_makes_of_samples(folder: Path, num_workers: int) -> None:
    dataset = Doubled(factor=2, remote=str(folder), **SMALL)
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=4, num_workers=num_workers, collate_fn=as_lists, timeout=60 if num_workers else 0
    )
    assert sorted(n for batch in loader for n in batch["number"]) == list(range(0, 2 * NUM_SAMPLES, 2))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    ("algorithm", "persistent"),
    [("py1e", True), ("blocks", False), *rounds([], [("py1e", False), ("blocks", True)])],
)
def test_epochs_differ_though_the_seed_of_torch_is_set_before_each(
    folder: Path, algorithm: str, persistent: bool
) -> None:
    dataset = StreamingDataset(remote=str(folder), shuffle_algo=algorithm, **SMALL)
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=4, num_workers=2, collate_fn=as_lists, timeout=60, persistent_workers=persistent
    )
    epochs = []
    for _ in range(3):
        torch.manual_seed(0)
        epochs.append([n for batch in loader for n in batch["number"]])
        assert sorted(epochs[-1]) == list(range(NUM_SAMPLES))
    assert len(set(map(tuple, epochs))) == 3
    assert dataset.next_epoch == 3


def _begin(counter: EpochCounter, worker: int, told: Any, goes_on: Any) -> None:
    told.put(counter.begin(SimpleNamespace(id=worker, num_workers=2, seed=7 + worker)))
    goes_on.wait(60)


def test_workers_of_one_seed_begin_one_epoch_whatever_workers_ended_before_they_began() -> None:
    counter, context = EpochCounter(), get_context("fork")
    told, goes_on = context.SimpleQueue(), context.Event()

    def begin(*workers: Any) -> int:
        for each in workers:
            each.start()
        return int(told.get())

    def worker(number: int) -> Any:
        return context.Process(target=_begin, args=(counter, number, told, goes_on), daemon=True)

    goes_on.set()
    looked, slow = worker(0), worker(1)  # at a batch of worker 0, by an iterator that is kept
    assert begin(looked) == 0
    looked.join(60)
    goes_on.clear()
    first, second = worker(0), worker(1)
    assert [begin(second), begin(first)] == [1, 1]
    assert begin(slow) == 0
    first = worker(0)
    context.Process()  # another thread starts processes meanwhile
    assert [begin(first), begin(worker(1))] == [2, 2]
    goes_on.set()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda dataset: pickle.loads(pickle.dumps(dataset))])
def test_a_copy_counts_the_epochs_of_its_workers(folder: Path, copied: Callable[[Any], Any]) -> None:
    dataset = copied(StreamingDataset(remote=str(folder), **SMALL))
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=4, num_workers=2, collate_fn=as_lists, timeout=60)
    epochs = [[n for batch in loader for n in batch["number"]] for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert dataset.next_epoch == 2


@pytest.mark.parametrize("batch_size", [4, 5])
def test_ranks_get_equally_many_samples_by_our_order_too(folder: Path, batch_size: int) -> None:
    read = []
    for rank in range(2):
        world = World(rank=rank, world_size=2)
        dataset = PackedStreamingDataset(folder, batch_size=batch_size, world=world)
        read.append(numbers(dataset))
        assert len(read[-1]) == len(dataset) == 17
        state = dataset.state_dict(34, True)
        assert state["sample_in_epoch"] == 34
    assert set(read[0]) | set(read[1]) == set(range(NUM_SAMPLES))


def test_a_long_epoch_is_worked_out_by_one_process_for_all(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [numbers(dataset) for dataset in [StreamingDataset(remote=str(folder), **SMALL)] for _ in range(2)]
    monkeypatch.setattr("lmms_stream.mds.epochs.MAX_SAMPLES_EACH", 10)
    dataset = StreamingDataset(remote=str(folder), local=str(tmp_path), **SMALL)
    assert [numbers(dataset), numbers(dataset)] == expected
    files = list((tmp_path / "_lmms" / "orders").glob("*.npy"))
    assert len(files) == 1  # that of the epoch before is gone
    again = StreamingDataset(remote=str(folder), local=str(tmp_path), **SMALL)
    again.next_epoch = 1
    assert numbers(again) == expected[1]
    assert list((tmp_path / "_lmms" / "orders").glob("*.npy")) == files
    files[0].write_bytes(files[0].read_bytes()[:200])  # as a full disk leaves it
    again.next_epoch = 1
    assert numbers(again) == expected[1]
    (tmp_path / "_lmms" / "orders" / f".{files[0].name}.1-1.tmp").touch()  # of a process that was killed
    other = StreamingDataset(remote=str(folder), local=str(tmp_path), **{**SMALL, "shuffle_seed": 5})
    numbers(other)
    left = {path.name for path in (tmp_path / "_lmms" / "orders").iterdir()}
    assert len(left) == 3  # with the lock
    assert files[0].name in left  # a run with other settings may still need it
    os.utime(files[0], (1, 1))
    numbers(other)
    assert not files[0].exists()


def test_an_order_that_cannot_be_written_leaves_no_temporary_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmms_stream.mds.epochs.MAX_SAMPLES_EACH", 10)
    dataset = StreamingDataset(remote=str(folder), local=str(tmp_path), **SMALL)
    dataset.batching_method = "no such method"
    with pytest.raises(KeyError, match="no such method"):
        numbers(dataset)
    assert [path.name for path in (tmp_path / "_lmms" / "orders").iterdir()] == ["orders.lock"]


# States


@pytest.mark.parametrize("algorithm", ["py1e", "blocks"])
def test_a_state_that_is_loaded_and_saved_is_the_same_and_an_ended_epoch_is_not_read_again(
    folder: Path, algorithm: str
) -> None:
    def open_one() -> StreamingDataset:
        return StreamingDataset(remote=str(folder), shuffle_algo=algorithm, **SMALL)

    whole = open_one()
    epochs = [numbers(whole) for _ in range(3)]
    resumed = open_one()
    resumed.load_state_dict(whole.state_dict(20, True) | {"epoch": 1})
    state = resumed.state_dict(0, False)
    assert (state["epoch"], state["sample_in_epoch"]) == (1, 20)
    once_more = open_one()
    once_more.load_state_dict(state)
    assert numbers(once_more) == epochs[1][20:]
    at_end = open_one()
    at_end.load_state_dict(once_more.state_dict(NUM_SAMPLES, True))
    ended = at_end.state_dict(0, False)
    assert (ended["epoch"], ended["sample_in_epoch"]) == (1, NUM_SAMPLES)
    after = open_one()
    after.load_state_dict(ended)
    assert [numbers(after), numbers(after)] == [[], epochs[2]]


def test_a_state_of_another_order_is_refused_by_what_differs(folder: Path) -> None:
    keywords: dict[str, Any] = {"remote": str(folder), "shuffle_algo": "blocks", "num_canonical_nodes": 2, **SMALL}
    state = StreamingDataset(**keywords, shuffle_block_size=8).state_dict(8, True)
    for name, value in (("num_canonical_nodes", 4), ("shuffle_block_size", 16), ("shuffle_seed", 1)):
        other = StreamingDataset(**(keywords | {"shuffle_block_size": 8, name: value}))
        with pytest.raises(CursorError, match=f"the saved state has {name} {state[name]}, this dataset has {value}"):
            other.load_state_dict(state)
    theirs = StreamingDataset(remote=str(folder), **SMALL)
    with pytest.raises(CursorError, match="the saved state has shuffle_algo 'blocks', this dataset has 'py1e'"):
        theirs.load_state_dict(state)
    saved = {name: value for name, value in theirs.state_dict(8, True).items() if name != "shuffle_algo"}
    with pytest.raises(CursorError, match="has shuffle_algo \"one of MosaicML's\", this dataset has 'blocks'"):
        StreamingDataset(**keywords).load_state_dict(saved)


def test_the_last_steps_of_an_epoch_are_read_where_canonical_nodes_repeat_samples(folder: Path) -> None:
    def open_one() -> StreamingDataset:
        return StreamingDataset(remote=str(folder), num_canonical_nodes=4, **(SMALL | {"batch_size": 1}))

    whole = numbers(open_one())
    assert len(whole) == 36
    for position in range(NUM_SAMPLES - 1, 37):
        resumed = open_one()
        resumed.load_state_dict(open_one().state_dict(position, True) | {"epoch": 0})
        assert numbers(resumed) == whole[position:]


@pytest.mark.parametrize("method", [*BATCHING_METHODS, "blocks"])
def test_a_state_beyond_the_epoch_is_refused_where_it_is_loaded(folder: Path, method: str) -> None:
    asked: dict[str, Any] = {"shuffle_algo": "blocks"} if method == "blocks" else {"batching_method": method}
    dataset = StreamingDataset(remote=str(folder), **SMALL, **asked)
    loader, ours = StreamingDataLoader(dataset, batch_size=4, collate_fn=numbers), dataset.state_dict(0, True)
    of_mosaicml = ("epoch", "num_canonical_nodes", "shuffle_seed", "initial_physical_nodes", "shuffle_algo")
    first = NUM_SAMPLES + (40 if method == "device_per_stream" else 1)
    for state in (ours, {name: ours[name] for name in of_mosaicml}):
        for position in (first, 4000):
            with pytest.raises(CursorError, match=rf"into the dataset \({position}\) than it has samples \(33\): the"):
                loader.load_state_dict(state | {"sample_in_epoch": position})
    assert sum(map(len, loader)) >= 32  # a refused state changes nothing


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epoch", 1 << 40),
        ("sample_in_epoch", 1 << 70),
        ("num_canonical_nodes", 0),
        ("num_canonical_nodes", 1 << 40),
        ("shuffle_seed", -1),
        ("initial_physical_nodes", 0),
        ("initial_physical_nodes", "one"),
        ("shuffle_block_size", -8),
        ("num_ranks", 0),
    ],
)
def test_a_number_of_a_state_that_is_out_of_range_is_refused(folder: Path, name: str, value: Any) -> None:
    dataset = StreamingDataset(remote=str(folder), **SMALL)
    with pytest.raises(CursorError, match=r"the saved state is damaged .*: use another checkpoint"):
        dataset.load_state_dict(dataset.state_dict(8, True) | {name: value})


def test_a_state_of_other_shards_is_refused_and_one_without_shards_is_loaded(folder: Path, tmp_path: Path) -> None:
    write_numbers(tmp_path / "others", size_limit=400)
    state = StreamingDataset(remote=str(folder), **SMALL).state_dict(8, True)
    other = StreamingDataset(remote=str(tmp_path / "others"), **SMALL)
    with pytest.raises(CursorError, match=r"the saved state has shards '.*', this dataset has '.*': restore it, or"):
        other.load_state_dict(state)
    other.load_state_dict({name: value for name, value in state.items() if name not in ("shards", "num_ranks")})
    assert len(numbers(other)) == NUM_SAMPLES - 8


@pytest.mark.parametrize("setting", [{"shuffle": False}, {"batching_method": "per_stream"}, {"shuffle_block_size": 16}])
def test_a_state_of_an_order_by_other_settings_is_refused(folder: Path, setting: dict[str, Any]) -> None:
    state = StreamingDataset(remote=str(folder), **SMALL).state_dict(8, True)
    (name,) = setting
    with pytest.raises(CursorError, match=f"the saved state has {name} .*, this dataset has "):
        StreamingDataset(remote=str(folder), **(SMALL | setting)).load_state_dict(state)


def test_what_a_state_says_counts_whatever_was_looked_at(folder: Path) -> None:
    """Two processes begin an epoch behind a resumed one: each saw it resumed, or looked at a state, or did neither."""

    def open_one(**keywords: Any) -> StreamingDataset:
        streams = [Stream(remote=folder, proportion=1) for _ in range(4)]
        return StreamingDataset(streams=streams, epoch_size=62, **(SMALL | keywords))

    whole = open_one(num_canonical_nodes=2, shuffle_block_size=4, shuffle_seed=1)
    epochs = [numbers(whole) for _ in range(3)]
    state = whole.state_dict(20, True) | {"epoch": 1}
    for seed in (2, 3, 4):
        resumed = open_one(shuffle_seed=seed)
        resumed.state_dict(0, False)  # as torch.distributed.checkpoint does before it loads
        resumed.load_state_dict(state)
        resumed.next_epoch = 2
        assert numbers(resumed) == epochs[2]
        resumed.load_state_dict(state)
        assert [numbers(resumed), numbers(resumed)] == [epochs[1][20:], epochs[2]]


@pytest.mark.parametrize("keywords", [{"num_workers": 2}, {"world": World(world_size=2)}])
def test_loaders_have_the_batches_of_their_datasets(folder: Path, keywords: dict[str, Any]) -> None:
    dataset = PackedStreamingDataset(folder, world=keywords.pop("world", None))
    with pytest.raises(ConfigError, match=r"have 4 samples and the dataset's 1, .* give the dataset batch_size=4"):
        StreamingDataLoader(dataset, batch_size=4, **keywords)
    StreamingDataLoader(dataset, batch_size=1, **keywords)
    StreamingDataLoader(PackedStreamingDataset(folder), batch_size=4)  # one reader: its samples are in one row


def test_loaders_of_datasets_with_a_world_of_their_own_save_its_position(folder: Path) -> None:
    dataset = PackedStreamingDataset(folder, batch_size=4, world=World(rank=1, world_size=2))
    loader = StreamingDataLoader(dataset, batch_size=4, collate_fn=as_lists)
    next(iter(loader))
    state = loader.state_dict()
    assert state is not None
    assert state["sample_in_epoch"] == 8


def as_columns(samples: list[dict[str, int]]) -> tuple[torch.Tensor, list[int]]:
    return torch.zeros(3, 7), numbers(samples)


@pytest.mark.parametrize(
    ("collate_fn", "settings"),
    [
        *((collate_fn, {}) for collate_fn in (list, numbers, as_columns, str)),
        *((each, {"num_workers": 2, "multiprocessing_context": "fork"}) for each in (as_columns, list, numbers, str)),
    ][: rounds(5, 8)],
)
def test_states_count_samples_whatever_form_their_batches_have(
    folder: Path, collate_fn: Callable[[Any], Any], settings: dict[str, Any]
) -> None:
    dataset = StreamingDataset(local=folder, **SMALL)
    loader = StreamingDataLoader(dataset, batch_size=4, collate_fn=collate_fn, **settings)
    assert loader.collate_fn is collate_fn
    counts = []
    for _ in loader:
        state = loader.state_dict()
        assert state is not None
        counts.append(state["sample_in_epoch"])
    assert counts == [*range(4, NUM_SAMPLES, 4), NUM_SAMPLES]


def test_states_count_samples_without_batches(folder: Path) -> None:
    loader = StreamingDataLoader(StreamingDataset(local=folder, **SMALL), batch_size=None)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    state = loader.state_dict()
    assert state is not None
    assert state["sample_in_epoch"] == 5
    with pytest.raises(ConfigError, match=r"have 1 samples and the dataset's 4, .* give the dataset batch_size=1"):
        StreamingDataLoader(loader.dataset, batch_size=None, num_workers=2)
    with pytest.raises(ConfigError, match=r"have 4 samples and the dataset's 1, "):
        StreamingDataLoader(StreamingDataset(local=folder, shuffle_algo="blocks"), batch_size=4, num_workers=2)


def test_a_state_is_that_which_was_loaded_until_more_is_read(folder: Path) -> None:
    loader = StreamingDataLoader(StreamingDataset(local=folder, **SMALL), batch_size=4, collate_fn=numbers)
    first = loader.state_dict()
    assert first is not None
    batches = list(loader)
    loader.load_state_dict(first)
    assert loader.state_dict() == first
    assert list(loader) == batches  # not those of another epoch


def test_a_state_that_mosaicmls_class_saved_before_the_first_batch_begins_the_first_epoch(folder: Path) -> None:
    saved = {"epoch": -1, "sample_in_epoch": 0, "num_canonical_nodes": 1, "shuffle_seed": 9176}
    fresh, resumed = (StreamingDataset(local=folder, num_canonical_nodes=1, **SMALL) for _ in range(2))
    resumed.load_state_dict(saved)
    for _ in range(2):
        assert numbers(resumed) == numbers(fresh)
    with pytest.raises(CursorError, match=r"the saved state is damaged \(sample_in_epoch is -4\): use another"):
        resumed.load_state_dict(saved | {"epoch": 1, "sample_in_epoch": -4})
    with pytest.raises(CursorError, match="is of a PackedLoader, at a pack: load it in a PackedLoader, or"):
        resumed.load_state_dict({"version": 2, "step": 3, "sources": {}})


# Numbers, shards and the cache


def test_slices_and_numbers_from_the_end_are_those_of_numpy(folder: Path) -> None:
    dataset = StreamingDataset(local=str(folder))
    everything = np.arange(NUM_SAMPLES)
    for chosen in (slice(None, None, -1), slice(5, 2, -1), slice(-3, None), slice(100), slice(None, None, 7)):
        assert numbers(dataset[chosen]) == everything[chosen].tolist()
    assert numbers(dataset.read([-1, 0, -33])) == [32, 0, 0]
    assert numbers(lmms_stream.LocalDataset(folder)[np.array([-1, 7], np.int8)]) == [32, 7]
    with pytest.raises(IndexError, match="sample -34 of a dataset of 33"):
        dataset.read([-34])
    assert dataset.read([]) == []
    for wrong in ([1.7], np.arange(NUM_SAMPLES) < 2, ["3"]):
        with pytest.raises(ConfigError, match="samples are read by their ids, which are integers, got an array of"):
            dataset.read(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("keep_zip", [False, True])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # MosaicML leaves files open
def test_shards_are_prepared_evicted_and_counted(zipped: Path, tmp_path: Path, keep_zip: bool) -> None:
    dataset = StreamingDataset(remote=str(zipped), local=str(tmp_path), keep_zip=keep_zip, cache_limit="1mb")
    assert dataset.num_shards == len(dataset.shards) > 3
    assert [len(shard) for shard in dataset.shards] == dataset.samples_per_shard.tolist()
    assert dataset.cache_usage == 0
    dataset.prepare_shard(1)
    dataset.prepare_shard(2, blocking=False)
    names = [info.name for info in dataset.core.shard_infos]
    assert sorted(path.name for path in tmp_path.glob("*.mds")) == names[1:3]
    assert dataset.cache_usage >= sum(info.size for info in dataset.core.shard_infos[1:3])
    assert numbers([dataset.shards[1][0]]) == numbers([dataset[int(dataset.sample_offset_per_shard[1])]])
    dataset.evict_coldest_shard()
    assert [path.name for path in tmp_path.glob("*.mds")] == [names[1]]  # which was read since
    dataset.evict_shard(1)
    assert list(tmp_path.glob("*.mds")) == []
    with pytest.raises(ConfigError, match="no shard on this node is a copy of ours"):
        dataset.evict_coldest_shard()


def test_a_limit_of_the_largest_shard_will_do(folder: Path, tmp_path: Path) -> None:
    largest = max(path.stat().st_size for path in folder.glob("*.mds"))
    keywords: dict[str, Any] = {"remote": str(folder), "cache_limit": largest, "batch_size": 4}
    in_order = StreamingDataset(local=str(tmp_path / "in order"), **keywords)
    with pytest.warns(UserWarning, match="nearly each sample fetches its shard again"):
        shuffled = StreamingDataset(local=str(tmp_path / "shuffled"), shuffle=True, **keywords)
    for dataset in (in_order, shuffled):
        loader: DataLoader[Any] = DataLoader(dataset, batch_size=4, num_workers=2, collate_fn=numbers, timeout=60)
        assert sorted(chain(*loader)) == [*range(dataset.size)]


def test_the_only_copy_of_a_dataset_is_not_evicted(folder: Path) -> None:
    dataset = StreamingDataset(local=str(folder))
    before = sorted(folder.iterdir())
    dataset.evict_shard(0)
    assert sorted(folder.iterdir()) == before
    assert dataset.cache_usage == sum(info.size for info in dataset.core.shard_infos)


def test_compressed_shards_stay_where_keep_zip_says_so(zipped: Path, s3_copy: str, tmp_path: Path) -> None:
    for keep_zip in (False, True):
        local = tmp_path / str(keep_zip)
        dataset = StreamingDataset(remote=s3_copy, local=str(local), keep_zip=keep_zip)
        assert numbers(dataset[:]) == list(range(NUM_SAMPLES))
        assert len(list(local.glob("*.mds"))) == dataset.num_shards
        assert len(list(local.glob("*.zstd"))) == keep_zip * dataset.num_shards


@pytest.fixture
def s3_copy(zipped: Path, s3_folder: str) -> str:
    from lmms_stream.storage.storage import open_storage

    store = open_storage(s3_folder)
    for path in zipped.iterdir():
        store.upload(path, path.name)
    return s3_folder


def test_our_classes_are_subclasses_of_mosaicmls() -> None:
    assert issubclass(PackedStreamingDataset, streaming.StreamingDataset)
    assert issubclass(StreamingDataLoader, streaming.StreamingDataLoader)
    assert issubclass(Stream, streaming.Stream)


def test_what_was_imported_before_mosaicmls_package_is_of_its_types(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = packed.PackedStreamingDataset(folder)
    assert isinstance(plain, streaming.StreamingDataset)
    assert type(plain) is PackedStreamingDataset
    dataset = mosaic.StreamingDataset(local=folder, **SMALL)
    for kind in (mosaic.StreamingDataLoader, streaming.StreamingDataLoader):
        loader = kind(dataset, batch_size=4, collate_fn=as_lists)
        assert isinstance(loader, streaming.StreamingDataLoader)
        next(iter(loader))
        state = loader.state_dict()
        assert state is not None
        assert state["sample_in_epoch"] == 4
    assert not caplog.messages
    derived = Derived(local=folder, **SMALL)
    next(iter(derived))
    (message,) = caplog.messages
    assert message.startswith(
        "This Derived is of a class of lmms_stream that was taken before `streaming` was imported"
    )


def test_a_dataset_that_was_made_before_mosaicmls_package_was_imported_says_so_when_it_is_read(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        before.delitem(sys.modules, "streaming")
        dataset = mosaic.StreamingDataset(local=folder, **SMALL)
        assert not isinstance(dataset, streaming.StreamingDataset)
        next(iter(dataset))
    assert not caplog.messages
    for _ in range(2):
        next(iter(dataset))
    (message,) = caplog.messages
    assert "its StreamingDataLoader neither saves nor loads a state of it: import streaming before" in message


def test_our_package_may_stand_for_mosaicmls_by_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "streaming", lmms_stream)
    from streaming import StreamingDataset as Named

    assert numbers(Named(local=str(folder), batch_size=1)) == [*range(NUM_SAMPLES)]


class Derived(mosaic.StreamingDataset):
    pass


@pytest.mark.parametrize("base", [mosaic.StreamingDataset, lmms_stream.PackedStreamingDataset])
def test_overridden_methods_that_nothing_calls_are_refused(base: type[mosaic.StreamingDataset]) -> None:
    theirs = {name for name in vars(streaming.StreamingDataset) if not name.startswith("__")}
    assert {*base.NOT_CALLED} <= theirs
    for name, remedy in base.NOT_CALLED.items():
        with pytest.raises(ConfigError, match=f"Own overrides {name}, which nothing here calls: {remedy}"):
            type("Own", (base,), {name: lambda *_: None})
    type("Own", (base,), {"get_item": lambda *_: None, "own_helper": lambda *_: None})


def test_a_tilde_is_the_home_of_the_user(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").symlink_to(folder)
    dataset = StreamingDataset(remote="~/data", local=Path("~/copy"))
    assert numbers([dataset[3], lmms_stream.LocalDataset("~/data")[4]]) == [3, 4]
    assert TrainConfig(global_batch=1, max_steps=1, output_dir="~/run").output_dir == str(tmp_path / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "data"]


def test_threads_share_a_dataset_under_a_limit(tmp_path: Path) -> None:
    with lmms_stream.MDSWriter(columns={"number": "int"}, out=tmp_path / "data", size_limit=300) as writer:
        for number in range(300):
            writer.write({"number": number})
    dataset = StreamingDataset(remote=tmp_path / "data", local=tmp_path / "copy", batch_size=4, cache_limit=2000)

    def read(seed: int) -> bool:
        chosen = np.random.default_rng(seed).integers(0, 300, 40).tolist()
        return bool(numbers(dataset[each] for each in chosen) == chosen)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(read, range(8)))


def test_streams_may_be_read_by_two_datasets(folder: Path, tmp_path: Path) -> None:
    streams = [Stream(remote=str(folder), local=str(tmp_path / str(share)), proportion=share) for share in (1.0, 3.0)]
    for _ in range(2):
        dataset = StreamingDataset(streams=streams, epoch_size=20, **SMALL)
        assert len(numbers(dataset)) == 20
        assert [int(stream.choose) for stream in streams] == [5, 15]
    other = StreamingDataset(streams=streams, epoch_size=8, **SMALL)
    assert (len(numbers(other)), len(numbers(dataset))) == (8, 20)


def test_a_split_is_that_of_streams_that_name_none(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "data/train")
    dataset = StreamingDataset(streams=[Stream(remote=tmp_path / "data")], split="train", **SMALL)
    assert sorted(numbers(dataset)) == list(range(NUM_SAMPLES))


@st.composite
def shares(draw: st.DrawFn, kind: str) -> list[dict[str, Any]]:
    numbers = st.integers(1, 50) | st.floats(0.01, 9)
    one: dict[str, st.SearchStrategy[dict[str, Any]]] = {
        "proportion": st.fixed_dictionaries({"proportion": numbers}),
        "absolute": st.fixed_dictionaries({"repeat": numbers}) | st.fixed_dictionaries({"choose": st.integers(1, 99)})
        | st.just({}),
        "none": st.just({}),
    }  # fmt: skip
    return draw(st.lists(one[kind], min_size=1, max_size=4))


@examples(90)
@given(
    data=st.data(),
    kind=st.sampled_from(["proportion", "absolute", "none"]),
    epoch_size=st.integers(1, 10**6),
    seed=seeds(),
)
def test_streams_are_weighed_as_mosaicmls_class_weighs_them(
    data: st.DataObject, kind: str, epoch_size: int, seed: int
) -> None:
    settings = data.draw(shares(kind))
    sizes = np.array([data.draw(st.integers(100, 10**6)) for _ in settings], np.int64)
    asked = None if kind == "absolute" or data.draw(st.booleans()) else epoch_size
    ours = [Stream(local="data", **each) for each in settings]
    theirs = [streaming.Stream(local="data", **each) for each in settings]
    expected = streaming.Stream.apply_weights(theirs, sizes, asked, seed)
    assert weigh(ours, sizes, epoch_size=asked, seed=seed) == expected
    for mine, other in zip(ours, theirs, strict=True):
        found = mine.proportion, mine.repeat, mine.choose
        assert tuple(map(float, found)) == (float(other.proportion), float(other.repeat), int(other.choose))


def test_streams_are_resampled_by_shard(folder: Path) -> None:
    dataset = StreamingDataset(remote=str(folder), epoch_size=20, **SMALL)
    units, sample_ids = dataset.resample_streams(3)
    assert units.sum() == len(set(sample_ids.tolist())) == 20
    assert [stream.choose for stream in dataset.streams] == [20]


# Keywords


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"allow_unsafe_types": True}, "allow_unsafe_types is refused, because unpickling can run"),
        ({"shuffle_algo": "py9"}, "shuffle_algo must be one of .*py1e.*blocks, got 'py9'"),
        ({"batching_method": "none"}, "batching_method must be one of random, stratified"),
        ({"sampling_granularity": 0}, "sampling_granularity must be at least 1, got 0"),
        ({"shuffle_seed": -1}, "shuffle_seed must be 0 or more, got -1"),
        ({"predownload": -1}, "predownload must be at least 1, got -1"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"num_canonical_nodes": -1}, "num_canonical_nodes must be 0 or more, got -1"),
        ({"cache_limit": 100}, r"cache_limit is 100 bytes and the largest shard takes \d+: raise it to at least"),
        ({"validate_hash": "md5"}, r"no checksum of the kind validate_hash asks for \(md5\): choose one of sha1"),
        (
            {"epoch_size": 10, "shuffle_algo": "blocks", "batching_method": "stratified"},
            "shuffle_algo 'blocks' needs",
        ),
    ],
)
def test_keywords_that_are_wrong_are_named(folder: Path, keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StreamingDataset(remote=str(folder), **keywords)


def test_batches_need_a_batch_size_and_weights_must_fit(folder: Path) -> None:
    with pytest.raises(ConfigError, match="Please pass `batch_size` to StreamingDataset, got None"):
        next(iter(StreamingDataset(remote=str(folder))))
    with pytest.raises(ConfigError, match="stream 1 has no proportion, and other streams have: set it for every"):
        StreamingDataset(streams=[Stream(remote=folder, proportion=1), Stream(remote=folder, repeat=2)])
    with pytest.raises(ConfigError, match="an epoch takes no sample of any stream"):
        StreamingDataset(streams=[Stream(remote=folder, choose=0)])


@pytest.mark.parametrize(
    ("twice", "message"),
    [
        ({"order": OrderConfig(), "shuffle_seed": 1}, "order and shuffle_seed set the same"),
        ({"fetch": FetchConfig(), "cache_limit": "1gb"}, "fetch and cache_limit set the same"),
        ({"world": World(world_size=2, replication=2), "replication": 2}, "world.replication and replication set"),
    ],
)
def test_what_is_said_twice_is_an_error(folder: Path, twice: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PackedStreamingDataset(folder, **twice)


# Streams of other classes, and shards of other formats


class Copying(streaming.Stream):
    """A stream as users write it, which fetches in its own way."""

    def _download_file(self, from_basename: str, to_basename: str | None = None) -> str:
        target = Path(self.local, self.split, to_basename or from_basename)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(self.remote, self.split, from_basename), target)
        self.fetched.append(from_basename)
        return str(target)

    fetched: list[str] = []  # noqa: RUF012


class Preparing(streaming.Stream):
    prepared = 0

    def prepare_shard(self, shard: Any) -> int:
        Preparing.prepared += 1
        return int(super().prepare_shard(shard))


def test_streams_that_fetch_in_their_own_way_do_so(folder: Path, tmp_path: Path) -> None:
    dataset = StreamingDataset(streams=[Copying(remote=str(folder), local=str(tmp_path / "copied"))], batch_size=4)
    assert sorted(numbers(dataset)) == list(range(NUM_SAMPLES))
    assert set(Copying.fetched) == {"index.json", *(info.name for info in dataset.core.shard_infos)}
    assert len(Copying.fetched) == 1 + dataset.num_shards
    prepared = StreamingDataset(streams=[Preparing(remote=str(folder), local=str(tmp_path / "prepared"))], batch_size=4)
    assert sorted(numbers(prepared)) == list(range(NUM_SAMPLES))
    assert Preparing.prepared == prepared.num_shards


@pytest.mark.parametrize("kind", [Copying, Preparing])
def test_copies_of_streams_that_fetch_in_their_own_way_keep_to_the_limit(
    kind: type[streaming.Stream], folder: Path, tmp_path: Path
) -> None:
    size = max(path.stat().st_size for path in folder.glob("*.mds"))
    stream = kind(remote=str(folder), local=str(tmp_path))
    dataset = StreamingDataset(streams=[stream], batch_size=4, cache_limit=4 * size)
    assert numbers(dataset[:]) == list(range(NUM_SAMPLES))
    assert len(list(tmp_path.glob("*.mds"))) <= 4 < dataset.num_shards


@pytest.mark.parametrize("keep_zip", [False, True])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # MosaicML leaves files open
def test_compressed_shards_that_a_stream_prepares_are_read_and_keep_to_the_limit(
    keep_zip: bool, zipped: Path, tmp_path: Path
) -> None:
    free = StreamingDataset(remote=str(zipped), local=str(tmp_path / "free"), batch_size=4, keep_zip=True)
    assert numbers(free[:]) == list(range(NUM_SAMPLES))
    limit = sum(path.stat().st_size for path in (tmp_path / "free").glob("shard*")) // 2
    stream = Preparing(remote=str(zipped), local=str(tmp_path / "limited"), keep_zip=keep_zip)
    dataset = StreamingDataset(streams=[stream], batch_size=4, cache_limit=limit)
    assert numbers(dataset[:]) == list(range(NUM_SAMPLES))
    copies = list((tmp_path / "limited").glob("shard*"))
    assert sum(path.stat().st_size for path in copies) <= limit
    assert any(path.suffix == ".zstd" for path in copies) == keep_zip


class DamagedOnce(Preparing):
    def prepare_shard(self, shard: Any) -> int:
        size = super().prepare_shard(shard)
        if self.damages:
            self.damages.clear()
            Path(self.local, shard.raw_data.basename).write_bytes(b"damaged")
        return size

    damages = ["once"]  # noqa: RUF012


def test_a_damaged_file_of_a_stream_that_fetches_in_its_own_way_is_fetched_again(folder: Path, tmp_path: Path) -> None:
    dataset = StreamingDataset(streams=[DamagedOnce(remote=str(folder), local=str(tmp_path))], batch_size=4)
    assert numbers(dataset[:]) == list(range(NUM_SAMPLES))
    assert not DamagedOnce.damages


WRITERS: dict[str, Any] = {"jsonl": JSONWriter, "csv": CSVWriter, "tsv": TSVWriter, "xsv": XSVWriter}


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("kind", WRITERS)
def test_shards_of_other_formats_are_read(kind: str, compression: str | None, tmp_path: Path) -> None:
    columns = {"number": "int", "name": "str", "weight": "float"}
    separator = {"separator": "|"} if kind == "xsv" else {}
    with WRITERS[kind](
        columns=columns,
        out=str(tmp_path / "data"),
        size_limit=300,
        hashes=["sha1"],
        compression=compression,
        **separator,
    ) as writer:
        for number in range(NUM_SAMPLES):
            writer.write({"number": number, "name": f"ü{number}", "weight": number / 4})
    keywords: dict[str, Any] = {"remote": str(tmp_path / "data"), "batch_size": 4, "shuffle": True}
    ours = StreamingDataset(**keywords, local=str(tmp_path / "ours"))
    assert ours.num_shards > 1
    expected = [{"number": n, "name": f"ü{n}", "weight": n / 4} for n in range(NUM_SAMPLES)]
    assert [ours[number] for number in range(NUM_SAMPLES)] == expected
    assert sorted(ours, key=lambda sample: int(sample["number"])) == expected


def test_a_shard_of_few_characters_is_read(tmp_path: Path) -> None:
    with CSVWriter(columns={"n": "int"}, out=str(tmp_path)) as writer:
        writer.write({"n": 1})
    assert (tmp_path / "shard.00000.csv").read_text() == "n\n1\n"
    assert StreamingDataset(local=str(tmp_path))[0] == {"n": 1}


def test_lengths_of_shards_of_another_format_are_measured(tokenizer: Path, tmp_path: Path) -> None:
    with JSONWriter(columns={"text": "str"}, out=str(tmp_path / "data"), compression="zstd") as writer:
        for number in range(NUM_SAMPLES):
            writer.write({"text": "word " * (1 + number)})
    processor, packing = TextProcessor.from_pretrained(str(tokenizer)), PackingConfig(packing_length=256)
    packed = PackedStreamingDataset(tmp_path / "data", processor=processor, packing=packing)
    expected = [processor.measure(packed[number]) for number in range(NUM_SAMPLES)]
    assert packed.mode == "plan"
    assert packed.length_index().lengths.tolist() == expected
    assert sum(batch.num_tokens for batch in PackedLoader(packed, global_batch=1)) == sum(expected)


def test_a_shard_of_another_format_that_is_cut_short_or_has_unsafe_columns_is_an_error(tmp_path: Path) -> None:
    with JSONWriter(columns={"number": "int"}, out=str(tmp_path), hashes=["sha1"]) as writer:
        for number in range(NUM_SAMPLES):
            writer.write({"number": number})
    index = (tmp_path / "index.json").read_text()
    (tmp_path / "index.json").write_text(index.replace('"number": "int"', '"number": "pkl"'))
    with pytest.raises(ShardError, match="column 'number' has the encoding 'pkl', expected str, int or float"):
        StreamingDataset(local=str(tmp_path))
    (tmp_path / "index.json").write_text(index)
    path = min(tmp_path.glob("shard*"))
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(StorageError, match="does not match the size or checksum in its index"):
        _ = StreamingDataset(local=str(tmp_path))[:]


class Reversed(encodings.Encoding):
    """An encoding that a program registers."""

    def encode(self, obj: Any) -> bytes:
        return bytes(str(obj)[::-1], "utf-8")

    def decode(self, data: bytes) -> Any:
        return data.decode()[::-1]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(encodings._encodings, "reversed", Reversed)


def test_encodings_that_the_program_registered_are_read(registered: None, tmp_path: Path) -> None:
    with MDSWriter(columns={"text": "reversed"}, out=str(tmp_path)) as writer:
        writer.write({"text": "packs"})
    assert StreamingDataset(local=str(tmp_path))[0] == {"text": "packs"}
    assert (column_encoder("reversed")("packs"), fixed_size("reversed")) == (b"skcap", None)
