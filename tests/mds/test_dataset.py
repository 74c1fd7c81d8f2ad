from __future__ import annotations

import gc
import multiprocessing
import pickle
import shutil
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lmms_stream import PackedLoader, Stream
from lmms_stream.doors import mosaicml
from lmms_stream.errors import ConfigError, CursorError, LengthsError, ShardError, StorageError
from lmms_stream.mds.core import PackedDataset
from lmms_stream.mds.dataset_config import DatasetConfig
from lmms_stream.mds.lengths import LengthIndex
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.mds.streams import StreamConfig
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors import ProcessorConfig
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.storage.fetch_config import FetchConfig
from lmms_stream.storage.local import LocalStorage
from lmms_stream.storage.storage import open_storage
from lmms_stream.types import Sample, World
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from torch.utils.data import DataLoader

from ..conftest import write_tokens
from ..simulate.cluster_of_loaders import CountedStore


def test_samples_are_indexed_like_a_numpy_array(dataset_folder: Path) -> None:
    dataset = mosaicml.PackedStreamingDataset(dataset_folder)
    everything = [dataset.get_item(i) for i in range(len(dataset))]
    assert isinstance(dataset, StreamingDataset)
    assert dataset.size == len(dataset) == len(everything)
    assert dataset[0] == everything[0]
    assert dataset[-1] == everything[-1]
    assert dataset[5:2:-1] == everything[5:2:-1]
    assert dataset[np.array([7, 3])] == [everything[7], everything[3]]
    assert dataset[[1, [2]]] == [everything[1], [everything[2]]]
    mask = np.arange(len(dataset)) % 7 == 3
    assert dataset[mask] == dataset[mask.tolist()] == everything[3::7]
    for wrong in (mask[1:], True, [1, True]):
        with pytest.raises(ConfigError, match=r"a mask has a boolean for each|named by a number"):
            dataset[wrong]
    assert dataset.read(np.array([2, 0])) == [everything[2], everything[0]]
    with pytest.raises(IndexError, match=f"sample {len(dataset)} of a dataset of {len(dataset)}"):
        dataset[len(dataset)]


def test_a_dataset_that_is_dropped_closes_its_shards(dataset_folder: Path, tmp_path: Path) -> None:
    mapped = str(shutil.copytree(dataset_folder, tmp_path / "own"))
    dataset = PackedStreamingDataset(mapped)
    assert len([sample["messages"] for sample in dataset]) == len(dataset)  # its threads still wait for more to fetch
    assert mapped in Path("/proc/self/maps").read_text()
    del dataset
    gc.collect()
    assert mapped not in Path("/proc/self/maps").read_text()


def test_a_forked_process_makes_a_dataset_where_its_parent_has_made_one(dataset_folder: Path) -> None:
    torch.set_num_threads(2)
    torch.zeros(1 << 16).share_memory_()  # by torch's threads, which a forked process does not have
    first = PackedStreamingDataset(dataset_folder)[0]

    def read() -> None:
        sys.exit(0 if PackedStreamingDataset(dataset_folder)[0] == first else 1)

    process = multiprocessing.get_context("fork").Process(target=read)
    process.start()
    process.join(60)
    process.kill()
    torch.set_num_threads(1)
    assert process.exitcode == 0


def test_a_forked_process_fetches_shards_after_its_parent_fetched_others(tmp_path: Path) -> None:
    """Threads of the parent that fetch do not run in the forked process."""
    write_tokens(tmp_path / "data", num_samples=400)
    source = CountedStore(LocalStorage(tmp_path / "data"), tmp_path / "downloads")
    stream = StreamConfig(source=source, remote="counted", local=tmp_path / "cache")
    dataset = PackedDataset([stream], processor=TokensProcessor(), fetch=FetchConfig(attempts=1, timeout_s=5))
    assert dataset.reader[0]["input_ids"][0] == 0

    def read() -> None:
        sys.exit(0 if dataset.reader[399]["input_ids"][0] == 399 else 1)

    process = multiprocessing.get_context("fork").Process(target=read)
    process.start()
    process.join(60)
    process.kill()
    assert process.exitcode == 0
    assert sum(name.startswith("shard") for name in (tmp_path / "downloads").read_text().split()) == 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_iterating_gives_each_sample_once_to_one_rank_and_worker(dataset_folder: Path, num_workers: int) -> None:
    texts: list[str] = []
    for rank in range(2):
        dataset = PackedStreamingDataset(dataset_folder, world=World(rank=rank, world_size=2))
        loader: DataLoader[Sample] = DataLoader(
            dataset, batch_size=None, num_workers=num_workers, timeout=60 if num_workers else 0
        )
        texts += [sample["messages"] for sample in loader]
    expected = [sample["messages"] for sample in PackedStreamingDataset(dataset_folder)[:]]
    again = len(expected) % 2  # shares are of one length, so of an odd number one sample is in both
    assert set(texts) == set(expected)
    assert len(texts) == len(expected) + again
    assert texts != expected


def test_epochs_are_shuffled_anew_and_unshuffled_ones_are_in_stored_order(dataset_folder: Path) -> None:
    dataset = PackedStreamingDataset(dataset_folder)
    first, second = ([sample["messages"] for sample in dataset] for _ in range(2))
    assert sorted(first) == sorted(second)
    assert first != second
    plain = PackedStreamingDataset(dataset_folder, order=OrderConfig(shuffle=False))
    assert list(plain) == plain[:]


def test_shards_of_a_plain_mds_writer_are_read_compressed_ones_too(tmp_path: Path) -> None:
    with MDSWriter(
        columns={"number": "int"}, out=str(tmp_path / "out"), compression="zstd", hashes=["xxh3_64"], size_limit=256
    ) as writer:
        for number in range(50):
            writer.write({"number": number})
    dataset = PackedStreamingDataset(tmp_path / "out", tmp_path / "cache")
    assert len(dataset.core.shard_infos) > 1
    assert [sample["number"] for sample in dataset[:]] == list(range(50))


def test_the_reader_locates_each_sample(dataset_folder: Path) -> None:
    dataset = PackedStreamingDataset(dataset_folder)
    shard_ids, indices = dataset.core.reader.locate(np.arange(len(dataset)))
    assert np.array_equal(shard_ids, np.repeat(np.arange(len(dataset.core.shard_infos)), dataset.samples_per_shard))
    assert np.array_equal(indices, np.concatenate([np.arange(count) for count in dataset.samples_per_shard]))


def test_a_pickled_dataset_reads_the_same(dataset_folder: Path, chat_processor: ChatProcessor) -> None:
    dataset = PackedStreamingDataset(
        dataset_folder, processor=chat_processor, packing=PackingConfig(packing_length=4096, overlong="drop")
    )
    fingerprint, first = dataset.plan.fingerprint, dataset[0]
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy[0] == first
    assert copy.plan.fingerprint == fingerprint


def test_missing_parts_are_named_with_the_remedy(
    dataset_folder: Path, chat_processor: ChatProcessor, tmp_path: Path
) -> None:
    with pytest.raises(StorageError, match=r"holds no dataset \(index.json is missing\).*lmms-stream convert"):
        PackedStreamingDataset(tmp_path)
    with pytest.raises(LengthsError, match=r"has no lengths index for this processor.*lmms-stream index"):
        PackedStreamingDataset(dataset_folder, processor=TokensProcessor()).length_index()
    with pytest.raises(ConfigError, match="packs need packing: give the dataset a PackingConfig"):
        _ = PackedStreamingDataset(dataset_folder, processor=chat_processor).plan
    with MDSWriter(columns={"number": "int"}, out=str(tmp_path / "plain")) as writer:
        writer.write({"number": 1})
    with pytest.raises(LengthsError, match="lists no lengths index"):
        PackedStreamingDataset(tmp_path / "plain").length_index()
    (tmp_path / "index.json").write_text('{"version": 2, "shards": []}')
    with pytest.raises(ShardError, match="lists no samples"):
        PackedStreamingDataset(tmp_path)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_mosaics_loader_resumes_in_the_middle_of_an_epoch_and_at_its_end(
    dataset_folder: Path, num_workers: int
) -> None:
    def texts_of(samples: list[Sample]) -> dict[str, list[str]]:
        return {"messages": [sample["messages"] for sample in samples]}

    def open_loader() -> StreamingDataLoader:
        dataset = mosaicml.PackedStreamingDataset(dataset_folder, batch_size=8)
        return StreamingDataLoader(dataset, batch_size=8, num_workers=num_workers, collate_fn=texts_of)

    def texts(loader: StreamingDataLoader, *, num_batches: int | None = None) -> list[str]:
        return [text for batch in islice(loader, num_batches) for text in batch["messages"]]

    whole = open_loader()
    epochs = [texts(whole), texts(whole), texts(whole)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert len({*map(tuple, epochs)}) == 3
    loader = open_loader()
    texts(loader)
    first = texts(loader, num_batches=5)
    resumed = open_loader()
    resumed.load_state_dict(loader.state_dict())
    assert first + texts(resumed) == epochs[1]
    at_end = open_loader()
    at_end.load_state_dict(resumed.state_dict())
    assert texts(at_end) == []  # what is left of the epoch, as with the parent
    assert texts(at_end) == epochs[2]


def test_a_place_in_another_order_is_refused(dataset_folder: Path) -> None:
    state = PackedStreamingDataset(dataset_folder).state_dict(3, True)
    with pytest.raises(CursorError, match="the saved state has shuffle_seed 0, this dataset has 1: restore it"):
        PackedStreamingDataset(dataset_folder, order=OrderConfig(seed=1)).load_state_dict(state)
    with pytest.raises(CursorError, match=r"the saved state is damaged \(.*\): use another checkpoint"):
        PackedStreamingDataset(dataset_folder).load_state_dict(state | {"epoch": None})


def test_a_dataset_config_builds_what_it_says(dataset_folder: Path, tokenizer: Path) -> None:
    config = DatasetConfig(
        remote=str(dataset_folder),
        processor=ProcessorConfig(tokenizer=str(tokenizer)),
        packing_length=512,
        packing_strategy="next_fit",
        overlong="truncate",
        seed=3,
        shuffle=False,
    )
    plan = config.build().plan
    assert plan.packing == PackingConfig(packing_length=512, strategy="next_fit", overlong="truncate")
    assert plan.order == OrderConfig(seed=3, shuffle=False, num_canonical_nodes=1)
    with pytest.raises(ConfigError, match=r"processor\.tokenizer is missing"):
        DatasetConfig(remote="x").build()


def test_an_index_that_was_written_again_is_not_mistaken_for_the_old_one(
    dataset_folder: Path, s3: str, chat_processor: ChatProcessor, tmp_path: Path
) -> None:
    store = open_storage(f"{s3}/written-again")
    for path in dataset_folder.rglob("*"):
        if path.is_file():
            store.upload(path, str(path.relative_to(dataset_folder)))

    def read() -> LengthIndex:
        return PackedStreamingDataset(store.url, tmp_path / "cache", processor=chat_processor).length_index()

    old = read()
    changed = LengthIndex.from_array(np.array(old.lengths)[::-1], fingerprint=old.fingerprint, processor=old.processor)
    for name in changed.write(tmp_path):
        store.upload(tmp_path / name, name)
    new = read()
    assert np.array_equal(new.lengths, changed.lengths)
    assert not np.array_equal(new.lengths, old.lengths)
    store.write(f"_lmms/lengths/{old.fingerprint}.json", b"{}")
    with pytest.raises(LengthsError, match=r"the description of lengths index .* cannot be read \('num_samples'\)"):
        read()


@pytest.mark.parametrize(
    "keywords",
    [{"epoch_size": 4}, *({"streams": {name: value}} for name, value in (("choose", 4), ("repeat", 2)))],
    ids=str,
)
def test_settings_that_give_an_epoch_other_samples_give_its_packs_other_samples(
    keywords: dict[str, Any], dataset_folder: Path, chat_processor: ChatProcessor
) -> None:
    packing = PackingConfig(packing_length=1024, overlong="drop")
    if "streams" in keywords:
        keywords = {"streams": [Stream(local=dataset_folder, **keywords["streams"])]}
    else:
        keywords = {"local": dataset_folder, **keywords}
    dataset = PackedStreamingDataset(processor=chat_processor, packing=packing, **keywords)
    assert dataset.plan.epoch_size == dataset.epoch_size != dataset.size
    read = [len(batch.sample_ids) for batch in PackedLoader(dataset, global_batch=1)]
    assert sum(read) == dataset.epoch_size - dataset.plan.num_overlong(0)
