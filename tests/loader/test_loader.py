from __future__ import annotations

import copy
import json
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from lmms_stream.errors import ConfigError, CursorError, DataError, LengthsError, WorkerError
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.mds.lengths import LengthIndex, lengths_names
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.packing import Overlong, PackingConfig
from lmms_stream.processors.base import processor_fingerprint
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.types import Batch, World

from ..rounds import rounds

PACKING_LENGTH = 1024
GLOBAL_BATCH = 8

Steps = dict[tuple[int, int], list[int]]  # (epoch, step counted from the epoch's start) -> sorted sample ids


def open_dataset(
    folder: Path, processor: ChatProcessor, *, seed: int = 0, overlong: Overlong = "drop"
) -> PackedStreamingDataset:
    return PackedStreamingDataset(
        folder,
        processor=processor,
        packing=PackingConfig(packing_length=PACKING_LENGTH, overlong=overlong),
        order=OrderConfig(seed=seed, num_canonical_nodes=2, shuffle_block_size=100),
    )


@pytest.fixture
def dataset(dataset_folder: Path, chat_processor: ChatProcessor) -> PackedStreamingDataset:
    return open_dataset(dataset_folder, chat_processor)


def read_steps(
    dataset: PackedStreamingDataset,
    *,
    state: dict[str, Any] | None = None,
    world_size: int = 1,
    num_nodes: int = 1,
    num_steps: int | None = None,
    num_workers: int = 0,
    global_batch: int = GLOBAL_BATCH,
) -> tuple[Steps, list[dict[str, Any]]]:
    """What all ranks deliver from `state` on, to the end of the epoch or for `num_steps`; each rank's state then."""
    steps: Steps = defaultdict(list)
    states = []
    for rank in range(world_size):
        world = World(rank=rank, world_size=world_size, num_nodes=num_nodes)
        loader = PackedLoader(dataset, global_batch=global_batch, world=world, num_workers=num_workers, timeout_s=60)
        if state is not None:
            loader.load_state_dict(state)
        at = loader.cursor.sources["data"]
        epoch, first, begin = at.epoch, at.packs // global_batch, loader.step
        batches: Iterator[Batch] = iter(loader)
        for batch in batches:
            steps[epoch, first + batch.step - begin] += batch.sample_ids.tolist()
            if batch.step + 1 - begin == num_steps and batch.micro_batch == loader.micro_batches - 1:
                break
        states.append(loader.state_dict())
    return {step: sorted(ids) for step, ids in steps.items()}, states


def all_ids(*runs: Steps) -> list[int]:
    return sorted(sample_id for steps in runs for ids in steps.values() for sample_id in ids)


def test_an_epoch_delivers_each_packed_sample_once_in_the_plans_steps(dataset: PackedStreamingDataset) -> None:
    steps, (state,) = read_steps(dataset)
    plan = dataset.plan
    delivered = all_ids(steps)
    expected = np.flatnonzero(plan.lengths <= PACKING_LENGTH).tolist()
    assert delivered == expected
    assert len(expected) < len(dataset)
    assert plan.num_overlong(0) == len(dataset) - len(expected)
    for (_, step), ids in steps.items():
        packs = plan.packs(0, step * GLOBAL_BATCH, min((step + 1) * GLOBAL_BATCH, plan.num_packs(0)))
        assert ids == sorted(packs.sample_ids.tolist())
    assert state["sources"] == {"data": {"plan": plan.fingerprint, "epoch": 1, "packs": 0, "credit": 0}}


def test_a_batch_holds_its_samples_as_the_processor_makes_them(
    dataset: PackedStreamingDataset, chat_processor: ChatProcessor
) -> None:
    loader = PackedLoader(dataset, global_batch=GLOBAL_BATCH)
    batch = next(iter(loader))
    expected = [chat_processor.process(dataset[i])["input_ids"] for i in batch.sample_ids.tolist()]
    assert np.array_equal(batch.input_ids[0].numpy(), np.concatenate(expected))
    assert PACKING_LENGTH // 2 < batch.num_tokens <= PACKING_LENGTH
    assert batch.cu_seqlens.tolist() == np.cumsum([0, *map(len, expected)]).tolist()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_steps_of_batches_are_counted_from_the_beginning_of_the_run(
    dataset: PackedStreamingDataset, num_workers: int
) -> None:
    first, resumed = (PackedLoader(dataset, global_batch=GLOBAL_BATCH, num_workers=num_workers) for _ in range(2))
    for batch in first:
        assert batch.step == first.step - (batch.micro_batch == first.micro_batches - 1)
        if batch.step == 3:
            break
    resumed.load_state_dict(first.state_dict())
    resumed.skip_steps(1)
    assert next(iter(resumed)).step == resumed.step == 4
    *_, last = resumed
    num_steps = resumed.step
    assert last.step == num_steps - 1
    assert next(iter(resumed)).step == num_steps  # the next epoch


@pytest.mark.parametrize(("world_size", "num_nodes"), rounds([(4, 2)], [(2, 1), (4, 1), (4, 2)]))  # see test_elastic.py
def test_global_batches_do_not_depend_on_the_world(
    dataset: PackedStreamingDataset, world_size: int, num_nodes: int
) -> None:
    assert read_steps(dataset, world_size=world_size, num_nodes=num_nodes)[0] == read_steps(dataset)[0]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine with fewer cores
@pytest.mark.parametrize("num_workers", rounds([3], [1, 3]))
def test_global_batches_and_states_do_not_depend_on_workers(dataset: PackedStreamingDataset, num_workers: int) -> None:
    assert read_steps(dataset, num_workers=num_workers, num_steps=7) == read_steps(dataset, num_steps=7)
    assert read_steps(dataset, num_workers=num_workers) == read_steps(dataset)


@pytest.mark.timeout(200)
def test_spawned_workers_deliver_what_forked_ones_do(dataset: PackedStreamingDataset) -> None:
    def batches(start_method: Literal["fork", "spawn"]) -> list[list[int]]:
        loader = PackedLoader(
            dataset, global_batch=8, num_workers=rounds(1, 2), timeout_s=90, start_method=start_method
        )
        return [batch.sample_ids.tolist() for _, batch in zip(range(12), loader, strict=False)]

    assert batches("spawn") == batches("fork")


def test_a_copy_of_a_loader_tells_its_persistent_workers_where_to_begin(dataset: PackedStreamingDataset) -> None:
    loader = copy.deepcopy(PackedLoader(dataset, global_batch=8, num_workers=2, persistent_workers=True))
    start = loader.state_dict()
    epochs = [[batch.sample_ids.tolist() for batch in loader] for _ in range(2)]
    assert epochs[0] != epochs[1]
    loader.load_state_dict(start)
    assert [batch.sample_ids.tolist() for batch in loader] == epochs[0]


def test_a_state_is_small_json_and_resumes_at_another_world_size_and_worker_count(
    dataset: PackedStreamingDataset, dataset_folder: Path, chat_processor: ChatProcessor
) -> None:
    whole, _ = read_steps(dataset)
    total = len(whole)
    for stop, world_size, num_workers in ((1, 2, 0), (5, 4, 1), (total - 1, 2, 2), (total, 1, 1)):
        first, states = read_steps(dataset, world_size=2, num_steps=stop)
        assert states[0] == states[1]
        text = json.dumps(states[0])
        assert len(text) < 400
        fresh = open_dataset(dataset_folder, chat_processor)
        rest, _ = read_steps(fresh, state=json.loads(text), world_size=world_size, num_workers=num_workers)
        if stop == total:
            assert all(epoch == 1 for epoch, _ in rest)
            assert rest == read_steps(dataset, state=states[0])[0]
        else:
            assert first | rest == whole


def test_another_global_batch_goes_on_with_the_very_next_pack(dataset: PackedStreamingDataset) -> None:
    whole, _ = read_steps(dataset)
    first, (state,) = read_steps(dataset, num_steps=3)
    rest, _ = read_steps(dataset, state=state, global_batch=12, world_size=3)
    packs = dataset.plan.packs(0, 24, 36)
    assert rest[0, 2] == sorted(packs.sample_ids.tolist())
    assert all_ids(first, rest) == all_ids(whole)


def test_a_step_that_was_delivered_in_part_is_not_counted(dataset: PackedStreamingDataset) -> None:
    loader = PackedLoader(dataset, global_batch=GLOBAL_BATCH)
    batches = iter(loader)
    for number in range(1, 2 * GLOBAL_BATCH + 1):
        next(batches)
        state = loader.state_dict()
        assert state["step"] == number // GLOBAL_BATCH
        assert state["sources"]["data"]["packs"] == number // GLOBAL_BATCH * GLOBAL_BATCH


def test_every_rank_makes_the_same_number_of_steps_and_the_last_is_padded(dataset: PackedStreamingDataset) -> None:
    num_packs = dataset.plan.num_packs(0)
    global_batch = next(g for g in (8, 12, 16, 20) if num_packs % g)
    padding, counts = 0, []
    for rank in range(4):
        loader = PackedLoader(dataset, global_batch=global_batch, world=World(rank=rank, world_size=4))
        batches = list(loader)
        counts.append(len(batches))
        padding += sum(len(batch.sample_ids) == 0 for batch in batches)
        assert all(batch.num_loss_tokens == 0 for batch in batches if len(batch.sample_ids) == 0)
        assert len(loader) == -(-dataset.plan.num_packs(1) // global_batch) * global_batch // 4
    assert counts == [-(-num_packs // global_batch) * global_batch // 4] * 4
    assert padding == -num_packs % global_batch


def test_a_short_last_step_can_be_dropped(dataset: PackedStreamingDataset) -> None:
    num_packs = dataset.plan.num_packs(0)
    global_batch = next(g for g in (8, 12, 16, 20) if num_packs % g)
    loader = PackedLoader(dataset, global_batch=global_batch, drop_last=True)
    assert len(loader) == num_packs // global_batch * global_batch
    assert all(len(batch.sample_ids) for batch in loader)
    assert loader.cursor.sources["data"].epoch == 1
    assert loader.num_dropped_packs == num_packs % global_batch


def test_truncated_samples_fill_a_pack_and_are_counted(dataset_folder: Path, chat_processor: ChatProcessor) -> None:
    dataset = open_dataset(dataset_folder, chat_processor, overlong="truncate")
    steps, _ = read_steps(dataset)
    assert all_ids(steps) == list(range(len(dataset)))
    overlong = int(np.flatnonzero(dataset.plan.lengths > PACKING_LENGTH)[0])
    for batch in PackedLoader(dataset, global_batch=GLOBAL_BATCH):
        if overlong in batch.sample_ids.tolist():
            assert batch.sample_ids.tolist() == [overlong]
            whole = chat_processor.process(dataset[overlong])["input_ids"]
            assert np.array_equal(batch.input_ids[0].numpy(), whole[:PACKING_LENGTH])
            return
    pytest.fail("the truncated sample was not delivered")


def test_a_cursor_of_another_plan_or_beyond_it_is_refused(
    dataset: PackedStreamingDataset, dataset_folder: Path, chat_processor: ChatProcessor
) -> None:
    state = PackedLoader(dataset, global_batch=GLOBAL_BATCH).state_dict()
    other = PackedLoader(open_dataset(dataset_folder, chat_processor, seed=1), global_batch=GLOBAL_BATCH)
    with pytest.raises(CursorError, match=r"the checkpoint follows plan .* they differ in the order settings \(seed"):
        other.load_state_dict(state)
    source = state["sources"]["data"] | {"packs": 10**6}
    with pytest.raises(CursorError, match=r"is at pack 1000000 of epoch 0 of 'data', which has \d+"):
        PackedLoader(dataset, global_batch=GLOBAL_BATCH).load_state_dict(state | {"sources": {"data": source}})


def test_a_refused_state_leaves_nothing_of_its_seeds_and_shares(dataset: PackedStreamingDataset) -> None:
    loader = PackedLoader({"a": dataset, "b": dataset}, global_batch=GLOBAL_BATCH, weights={"a": 1, "b": 2})
    before = loader.deal_settings, loader.mixture.shares
    at = {"plan": dataset.plan.fingerprint, "epoch": 0, "packs": 10**6, "credit": 0}  # of an earlier release: one seed
    with pytest.raises(CursorError, match="is at pack 1000000 of epoch 0 of 'a'"):
        loader.load_state_dict({"version": 2, "step": 7, "sources": {"a": at, "b": at}})
    assert (loader.deal_settings, loader.mixture.shares) == before


def test_skipped_steps_are_not_read(dataset: PackedStreamingDataset) -> None:
    whole, _ = read_steps(dataset)
    loader = PackedLoader(dataset, global_batch=GLOBAL_BATCH)
    loader.skip_steps(3)
    rest, _ = read_steps(dataset, state=loader.state_dict())
    assert rest == {step: ids for step, ids in whole.items() if step[1] >= 3}


def test_ranks_of_a_replication_group_read_the_same_batches(dataset: PackedStreamingDataset) -> None:
    def batches(rank: int) -> list[list[int]]:
        world = World(rank=rank, world_size=4, num_nodes=2, replication=2)
        return [batch.sample_ids.tolist() for batch in PackedLoader(dataset, global_batch=GLOBAL_BATCH, world=world)]

    assert batches(0) == batches(1) != batches(2) == batches(3)
    assert sorted(sum(batches(0) + batches(2), start=[])) == all_ids(read_steps(dataset)[0])  # noqa: RUF017
    with pytest.raises(ConfigError, match="replication 3 does not divide the world size 4: choose a divisor"):
        World(world_size=4, replication=3)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_several_datasets_are_mixed_by_weight_and_resumed(
    dataset: PackedStreamingDataset, dataset_folder: Path, chat_processor: ChatProcessor, num_workers: int
) -> None:
    sources = {"one": dataset, "two": open_dataset(dataset_folder, chat_processor, seed=5)}

    def loader() -> PackedLoader:
        return PackedLoader(
            sources, global_batch=8, weights={"one": 3, "two": 1}, num_workers=num_workers, timeout_s=60
        )

    def take(from_loader: PackedLoader, num_batches: int) -> list[tuple[str, list[int]]]:
        return [(b.source, b.sample_ids.tolist()) for _, b in zip(range(num_batches), from_loader, strict=False)]

    first = loader()
    whole = take(first, 48)
    assert Counter(source for source, _ in whole) == {"one": 36, "two": 12}
    stopped = loader()
    assert take(stopped, 19) == whole[:19]
    resumed = loader()
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert take(resumed, 32) == whole[16:]
    with pytest.raises(ConfigError, match="have no end: count steps instead"):
        len(first)


def test_impossible_settings_are_refused(dataset: PackedStreamingDataset, dataset_folder: Path) -> None:
    with pytest.raises(
        ConfigError, match="global_batch 8 cannot be shared equally by 3 ranks: make it a multiple of 3"
    ):
        PackedLoader(dataset, global_batch=8, world=World(rank=0, world_size=3))
    with pytest.raises(ConfigError, match="a PackedLoader needs a processor: give dataset 'data' one"):
        PackedLoader(PackedStreamingDataset(dataset_folder), global_batch=8)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sample_that_disagrees_with_the_index_is_an_error_in_the_consumer(
    dataset_folder: Path, chat_processor: ChatProcessor, tmp_path: Path, num_workers: int
) -> None:
    for path in dataset_folder.glob("*"):
        if path.is_file():
            (tmp_path / path.name).symlink_to(path)
    true = PackedStreamingDataset(dataset_folder, processor=chat_processor).length_index()
    wrong = np.array(true.lengths)
    wrong[5] += 1
    LengthIndex.from_array(wrong, fingerprint=true.fingerprint, processor=true.processor).write(tmp_path)
    assert (tmp_path / lengths_names(processor_fingerprint(chat_processor))[0]).exists()
    loader = PackedLoader(
        open_dataset(tmp_path, chat_processor), global_batch=GLOBAL_BATCH, num_workers=num_workers, timeout_s=60
    )
    with pytest.raises(LengthsError, match=rf"^sample 5 of .* has {wrong[5] - 1} tokens and its .* says\s+{wrong[5]}"):
        list(loader)


class _Refusing(ChatProcessor):
    def process(self, sample: Any) -> Any:
        raise DataError("cannot be read")


def test_an_error_of_the_processor_names_the_sample(dataset_folder: Path, chat_processor: ChatProcessor) -> None:
    dataset = open_dataset(dataset_folder, _Refusing(chat_processor.tokenizer))
    with pytest.raises(DataError, match=r"sample \d+ of .*: cannot be read"):
        next(iter(PackedLoader(dataset, global_batch=GLOBAL_BATCH)))


class _Dying(ChatProcessor):
    """Its process is killed at the first sample, as the kernel does when memory runs out."""

    def process(self, sample: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


class _Sleeping(ChatProcessor):
    def process(self, sample: Any) -> Any:
        time.sleep(30)


class _Crashing(ChatProcessor):
    def process(self, sample: Any) -> Any:
        os.kill(os.getpid(), signal.SIGSEGV)


def test_a_worker_that_crashes_says_where(
    dataset_folder: Path, chat_processor: ChatProcessor, capfd: pytest.CaptureFixture[str]
) -> None:
    dataset = open_dataset(dataset_folder, _Crashing(chat_processor.tokenizer))
    with pytest.raises(WorkerError, match="a loader worker died"):
        next(iter(PackedLoader(dataset, global_batch=GLOBAL_BATCH, num_workers=1, timeout_s=30)))
    said = capfd.readouterr().err
    assert "Fatal Python error: Segmentation fault" in said
    assert "test_loader.py" in said


@pytest.mark.parametrize("processor", [_Dying, _Sleeping])
def test_a_worker_that_dies_or_hangs_is_an_error_in_bounded_time(
    dataset_folder: Path, chat_processor: ChatProcessor, processor: type[ChatProcessor]
) -> None:
    dataset = open_dataset(dataset_folder, processor(chat_processor.tokenizer))
    loader = PackedLoader(dataset, global_batch=GLOBAL_BATCH, num_workers=2, timeout_s=5)
    with pytest.raises(WorkerError, match="a loader worker died or gave nothing within 5 s"):
        next(iter(loader))
