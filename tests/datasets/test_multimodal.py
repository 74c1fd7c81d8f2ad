"""MultiModalDataset: packs by number, the same in every epoch, under a plain DataLoader too."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lmms_stream.datasets import DatasetConfig, MultiModalDataset, MultiModalIterableDataset
from lmms_stream.errors import ConfigError, DataError
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.plan.assign import pack_costs
from lmms_stream.types import Batch, World
from torch.utils.data import DataLoader, DistributedSampler

from ..processes import PROCESSES
from .chats import text_config, write_jsonl


@pytest.fixture
def config(tokenizer: Path, tmp_path: Path) -> dict[str, Any]:
    return text_config(write_jsonl(tmp_path / "chats.jsonl"), tokenizer, tmp_path / "cache")


def all_ids(batches: Iterable[Batch]) -> list[int]:
    return [number for batch in batches for number in ids(batch)]


def ids(batch: Batch) -> list[int]:
    found: list[int] = batch.sample_ids.tolist()
    return found


def test_packs_are_numbered_and_hold_each_sample_once(config: dict[str, Any]) -> None:
    dataset = MultiModalDataset(DatasetConfig(**config))
    assert dataset.build() is dataset
    packs = [dataset[number] for number in range(len(dataset))]
    assert sorted(all_ids(packs)) == list(range(60))
    assert all(pack.num_tokens <= 256 for pack in packs)
    assert dataset.lengths.tolist() == [pack.num_tokens for pack in packs] == dataset.modality_length
    assert ids(dataset[-1]) == ids(packs[-1])
    with pytest.raises(IndexError, match=f"pack {len(packs)} of a dataset of {len(packs)} packs"):
        dataset[len(packs)]


def test_without_packing_each_pack_is_a_sample(config: dict[str, Any]) -> None:
    dataset = MultiModalDataset(config | {"packing": False})
    assert len(dataset) == 60
    assert sorted(all_ids(dataset[number] for number in range(60))) == list(range(60))


def test_the_trainer_reads_the_same_packs_in_every_epoch_in_another_order(config: dict[str, Any]) -> None:
    dataset = MultiModalDataset(config)
    loader = PackedLoader(dataset, global_batch=1, world=World())
    epochs = [[tuple(ids(batch)) for batch in loader] for _ in range(3)]
    assert epochs[0] == [tuple(ids(dataset[number])) for number in range(len(dataset))]
    assert [sorted(epoch) for epoch in epochs] == [sorted(epochs[0])] * 3
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("streams", [False, True])
def test_shuffle_orders_samples_before_they_are_packed(config: dict[str, Any], streams: bool) -> None:
    def order(shuffle: bool) -> list[int]:
        given = {**config, "shuffle": shuffle, "packing_strategy": "next_fit", "num_canonical_nodes": 1}
        dataset: Any = (
            MultiModalIterableDataset(given | {"cache_dir": None}) if streams else MultiModalDataset(given).build()
        )
        packs = dataset if streams else (dataset[number] for number in range(len(dataset)))
        return [int(each) for pack in packs for each in pack.sample_ids]

    stored, shuffled = order(False), order(True)
    assert stored == sorted(stored)
    assert shuffled != stored
    assert sorted(shuffled) == stored


def test_with_reshuffle_packs_are_made_anew_in_each_epoch(config: dict[str, Any]) -> None:
    dataset = MultiModalDataset(config | {"reshuffle": True})
    before = [ids(dataset[number]) for number in range(len(dataset))]
    dataset.set_epoch(1)
    after = [ids(dataset[number]) for number in range(len(dataset))]
    loader = PackedLoader(dataset, global_batch=1, world=World())
    assert [[ids(batch) for batch in loader] for _ in range(2)] == [before, after]
    assert sorted(map(sorted, before)) != sorted(map(sorted, after))
    kept = DataLoader(
        dataset, batch_size=1, collate_fn=dataset.get_collator(), num_workers=1, persistent_workers=True,
        multiprocessing_context=PROCESSES,
    )  # fmt: skip
    for epoch, packs in enumerate((before, after)):
        dataset.set_epoch(epoch)
        assert [ids(batch) for batch in kept] == packs


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_data_loader_with_a_distributed_sampler_gives_each_rank_its_packs(
    config: dict[str, Any], num_workers: int
) -> None:
    dataset = MultiModalDataset(config).build()
    seen: list[int] = []
    for rank in range(2):
        sampler: DistributedSampler[Batch] = DistributedSampler(dataset, num_replicas=2, rank=rank, drop_last=True)
        loader = DataLoader(
            dataset, batch_size=2, sampler=sampler, num_workers=num_workers, collate_fn=dataset.get_collator(),
            multiprocessing_context=PROCESSES if num_workers else None,
        )  # fmt: skip
        batches = list(loader)
        assert all(isinstance(batch, Batch) for batch in batches)
        assert batches[0].cu_seqlens[-1] == batches[0].num_tokens
        seen += all_ids(batches)
    assert len(seen) == len({*seen}) >= 50


def test_the_collator_joins_packs_and_refuses_what_is_none(config: dict[str, Any]) -> None:
    dataset = MultiModalDataset(config)
    collator = dataset.get_collator()
    joined = collator([dataset[0], dataset[1]])
    assert ids(joined) == ids(dataset[0]) + ids(dataset[1])
    assert torch.equal(joined.input_ids, torch.cat([dataset[0].input_ids, dataset[1].input_ids], dim=1))
    with pytest.raises(ConfigError, match="was given dict"):
        collator([{}])


def test_sources_are_converted_once_and_found_again(config: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    first, again = MultiModalDataset(config).build(), MultiModalDataset(config | {"packing_length": 512}).build()
    assert first.core.url == again.core.url
    assert caplog.text.count("once, into") == 1
    changed = MultiModalDataset(config | {"max_length": 40}).build()
    assert changed.core.url != first.core.url
    Path(config["dataset_path"]).touch()  # as the page says to do after a picture was replaced
    assert MultiModalDataset(config).build().core.url != first.core.url


def test_samples_that_are_too_long_are_left_out_and_counted(
    config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lmms_stream")
    whole = MultiModalDataset(config).build()
    lengths = np.array(whole.core.length_index().lengths)
    limit = int(np.median(lengths))
    short = MultiModalDataset(config | {"max_length": limit}).build()
    assert short.core.num_samples == int((lengths <= limit).sum())
    assert f"{int((lengths > limit).sum())} were longer than max_length" in caplog.text
    kept = MultiModalDataset(config | {"max_length": limit, "filter_overlong": False, "packing": True}).build()
    assert kept.core.num_samples == whole.core.num_samples
    assert "max_length (filter_overlong: false keeps all samples)" in caplog.text
    dropped = MultiModalDataset(config | {"packing_length": limit})
    assert sum(len(ids(dropped[number])) for number in range(len(dropped))) == int((lengths <= limit).sum())


def test_samples_that_are_too_long_are_kept_where_they_are_not_filtered(config: dict[str, Any]) -> None:
    lengths = MultiModalDataset(config | {"packing": False}).lengths
    length = int(np.median(lengths))
    dataset = MultiModalDataset(config | {"packing_length": length, "filter_overlong": False})
    packs = [dataset[number] for number in range(len(dataset))]
    assert sorted(all_ids(packs)) == list(range(60))
    assert sorted(pack.num_tokens for pack in packs if pack.num_tokens > length) == sorted(lengths[lengths > length])
    assert all(len(pack.sample_ids) == 1 for pack in packs if pack.num_tokens > length)
    assert dataset.lengths.tolist() == [pack.num_tokens for pack in packs]
    plan = dataset.core.plan
    assert [plan.num_overlong(0), plan.longest_pack] == [sum(lengths > length), max(lengths)]
    assert plan.num_tokens(0) == lengths.sum()
    assert 0.5 < plan.efficiency(0) <= 1
    assert dataset.estimate_memory().largest_pack == 24 * lengths.max()
    before = MultiModalDataset(config | {"packing_length": length}).estimate_memory()
    assert before.largest_pack <= 24 * length
    loader = PackedLoader(dataset, global_batch=1, world=World())
    costs = pack_costs(plan.packs(0, 0, len(packs)), linear_cost=0)
    assert costs.tolist() == [int((np.diff(pack.cu_seqlens[: pack.num_segments + 1]) ** 2).sum()) for pack in packs]
    assert [ids(batch) for batch in loader] == [ids(pack) for pack in packs]


def test_rows_that_do_not_fit_end_the_build_or_are_counted(
    config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lmms_stream")
    with Path(config["dataset_path"]).open("a") as file:
        file.write('{"messages": [{"role": "user"}]}\n')
    with pytest.raises(DataError, match=r"chats.jsonl:61"):
        MultiModalDataset(config).build()
    assert MultiModalDataset(config | {"on_error": "skip"}).build().core.num_samples == 60
    assert "1 rows did not fit" in caplog.text


def test_shards_that_are_there_are_read_where_they_lie(config: dict[str, Any], dataset_folder: Path) -> None:
    shards = MultiModalDataset(config | {"dataset_format": "mds", "dataset_path": str(dataset_folder)}).build()
    assert shards.core.url == str(dataset_folder)
    assert len(shards[0].input_ids)
    with pytest.raises(ConfigError, match="convert the sources again with --max-tokens"):
        MultiModalDataset(shards.config.__class__(**config | {
            "dataset_format": "mds", "dataset_path": str(dataset_folder), "max_length": 3,
        })).build()  # fmt: skip


def test_memory_is_told_before_a_run(config: dict[str, Any]) -> None:
    dataset = MultiModalDataset(config).build()
    told = dataset.estimate_memory()
    assert told.disk == sum(path.stat().st_size for path in Path(dataset.core.url).glob("*.mds"))
    assert told.index == 4 * 60
    assert told.largest_pack == 24 * dataset.lengths.max()
    assert told.pack <= told.largest_pack < told.worker


def test_a_dataset_goes_to_other_processes(config: dict[str, Any]) -> None:
    dataset = MultiModalDataset(config).build()
    assert ids(dataset[3]) == ids(pickle.loads(pickle.dumps(dataset))[3])


def test_what_is_no_config_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"is a str: give a DatasetConfig of lmms_stream\.datasets, or"):
        MultiModalDataset("chats.jsonl")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="packs of lanes have no numbers"):
        MultiModalDataset(config | {"packing_mode": "lanes"}).build()
