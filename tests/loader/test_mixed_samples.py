"""Packs that hold samples of several datasets, read in any world, by name, and refused with a remedy."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lmms_stream.errors import ConfigError, CursorError
from lmms_stream.loader.loader import PackedLoader, begin_stretch, stretch_of
from lmms_stream.mds.core import PackedDataset
from lmms_stream.mds.mixed import mixed
from lmms_stream.mds.mosaic_streams import Stream
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.mds.streams import StreamConfig
from lmms_stream.plan.ledger import StepLookup
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.tools.ledger.run import OpenedSources, open_stretches
from lmms_stream.types import Batch, Processed, Sample, World

from ..conftest import write_samples, write_tokens
from ..rounds import LONG

SIZES = {"small": 40, "middle": 300, "large": 1200}
ORDER = OrderConfig(seed=5, num_canonical_nodes=4, shuffle_block_size=150)
PACKING = PackingConfig(packing_length=256, window=64)
WORLDS = [(1, 1, 0), (2, 1, 2), (4, 2, 0)]  # ranks, nodes, workers

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine with fewer cores


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("streams")
    for name, size in SIZES.items():
        write_tokens(root / name, num_samples=size, longest=50 if name == "large" else 150)
    return root


def datasets(root: Path, **changes: Any) -> dict[str, PackedDataset]:
    settings: dict[str, Any] = {"processor": TokensProcessor(), "packing": PACKING, "order": ORDER} | changes
    return {name: PackedDataset(root / name, **settings) for name in SIZES}


def read(
    dataset: Any,
    num_steps: int,
    world: tuple[int, int, int] = (1, 1, 0),
    state: Any = None,
    *,
    seen: Callable[[Batch], list[int]] = lambda batch: batch.sample_ids.tolist(),
    **options: Any,
) -> tuple[dict[int, list[list[int]]], Any]:
    """Sample ids (or other numbers) of the packs of each step, and the state after them."""
    steps: dict[int, list[list[int]]] = {}
    world_size, num_nodes, num_workers = world
    for rank in range(world_size):
        loader = PackedLoader(
            dataset,
            world=World(rank=rank, world_size=world_size, num_nodes=num_nodes),
            num_workers=num_workers,
            timeout_s=60,
            **{"global_batch": 8} | options,
        )
        if state is not None:
            loader.load_state_dict(state)
        stop = loader.step + num_steps
        while loader.step < stop:
            for batch in loader:
                steps.setdefault(batch.step, []).append(seen(batch))
                if loader.step == stop:
                    break
    return {step: sorted(packs) for step, packs in steps.items()}, loader.state_dict()


def test_the_same_packs_come_in_any_world_from_streams_and_from_datasets_by_name(root: Path) -> None:
    streams = [Stream(remote=root / name) for name in SIZES]
    dataset = PackedStreamingDataset(streams=streams, processor=TokensProcessor(), packing=PACKING, order=ORDER)
    last = -(-dataset.plan.num_packs(0) // 8)
    whole, _ = read(dataset, last + 3)
    ids = [each for step in range(last) for pack in whole[step] for each in pack]
    assert sorted(ids) == list(range(sum(SIZES.values())))
    for stop, world in zip((2, last - 1, last), WORLDS, strict=True):
        before, state = read(datasets(root), stop, world, mixing="samples")
        after, _ = read(dataset, last + 3 - stop, WORLDS[stop % 3], state)
        assert before | after == whole
    state = read(dataset, 2)[1]
    rest, _ = read(dataset, 4, state=state, global_batch=4)
    assert [rest[step] for step in range(2, 6)] != [whole[step] for step in range(2, 6)]
    assert Counter(map(tuple, rest[2] + rest[3])) == Counter(map(tuple, whole[2]))


def test_starts_with_equal_settings_and_datasets_in_another_order_change_neither_history_nor_steps(root: Path) -> None:
    """The ledger of the stretches shows the packs that were read."""
    history: list[Any] = []
    steps: dict[int, list[Any]] = {}
    state = None
    for names in ([*SIZES], [*SIZES], [*SIZES][::-1]):
        loader = PackedLoader({name: datasets(root)[name] for name in names}, global_batch=4, balance=5)
        if state is not None:
            loader.load_state_dict(state)
        begin_stretch(history, stretch_of(loader))
        for batch in loader:
            steps.setdefault(batch.step, []).append((batch.source, *batch.sample_ids.tolist()))
            if loader.step == batch.step + 1 == 7 * (1 + loader.step // 8):
                break
        history, state = json.loads(json.dumps([history, loader.state_dict()], sort_keys=True))
    assert len(history) == 1
    ledger = StepLookup(open_stretches(history, OpenedSources(), where="here"))
    for step, packs in steps.items():
        assert sorted(packs) == sorted((each.source, *each.sample_ids.tolist()) for each in ledger.step(step).packs)
    del history[0]["cursor"]["order"]  # of an earlier release: its datasets were in the order of the keys
    begin_stretch(history, stretch_of(loader))
    assert len(history) == 2


def test_weights_are_shares_of_the_tokens_of_each_epoch(root: Path) -> None:
    dataset = mixed(datasets(root), weights={"small": 1, "middle": 1, "large": 2})
    assert sum(dataset.counts) == dataset.num_samples
    for epoch in range(3):
        tokens = dataset.plan.tokens_of_streams(epoch)
        assert tokens / tokens.sum() == pytest.approx([0.25, 0.25, 0.5], abs=0.01)
    assert mixed(datasets(root), weights={"small": 3}).counts == (sum(SIZES.values()), 0, 0)


def test_a_state_of_other_weights_is_refused(root: Path) -> None:
    _, state = read(datasets(root), 1, mixing="samples", weights={"small": 1, "large": 1})
    with pytest.raises(CursorError, match=r"they differ in the shards \(dataset\), or the samples of its streams"):
        read(datasets(root), 1, state=state, mixing="samples", weights={"small": 1, "large": 2})


class Drawing:
    """Processor of tokens with the values of its draws as inputs: tokens of sample 7, repeat 2, epoch 1 have 20701."""

    columns, schema, description = TokensProcessor.columns, "tokens", TokensProcessor().description

    def measure(self, sample: Sample) -> int:
        return TokensProcessor().measure(sample)

    def process(self, sample: Sample) -> Processed:
        return TokensProcessor().process(sample)

    def process_drawn(self, sample: Sample, drawn: Sequence[int]) -> Processed:
        made = self.process(sample)
        epoch, sample_id, *repeat = drawn
        number = epoch + 100 * sample_id + 1_000_000 * sum(repeat)
        return {**made, "token_inputs": {"drawn": np.full(len(made["input_ids"]), number)}}


def draws(batch: Batch) -> list[int]:
    if "drawn" not in batch.token_inputs:
        return [100 * each + 1_000_000 * batch.repeat_of(at) for at, each in enumerate(batch.sample_ids.tolist())]
    starts = [start for start, _ in batch.sample_bounds]
    return [int(each) for each in batch.token_inputs["drawn"][0, starts]]


@pytest.mark.parametrize("processor", [Drawing(), *([TokensProcessor()] if LONG else [])])
def test_repeats_in_an_epoch_have_draws_of_their_own_in_any_world(root: Path, processor: Any) -> None:
    dataset = mixed(datasets(root, processor=processor), weights={"small": 1, "large": 1})
    last = dataset.plan.num_packs(0) // 8
    whole, _ = read(dataset, last + 2, WORLDS[2], seen=draws)
    drawn = Counter(number for step in range(last) for pack in whole[step] for number in pack)
    assert max(drawn.values()) == 1
    of_small = sorted(number for number in drawn if number // 100 % 10_000 == 7)
    assert of_small == [700 + 1_000_000 * repeat for repeat in range(len(of_small))]
    assert len(of_small) > 5
    before, state = read(dataset, 3, WORLDS[0], seen=draws)
    after, _ = read(dataset, last - 1, WORLDS[1], state, seen=draws)
    assert before | after == whole


def test_samples_fetches_and_drop_lists_name_the_stream(root: Path, tmp_path: Path) -> None:
    (tmp_path / "drop").write_text("middle:7\nlarge:0\n")
    loader = PackedLoader(datasets(root), mixing="samples", global_batch=8, drop=str(tmp_path / "drop"))
    assert [each.sample_id for each in loader.left_out.samples] == [47, 340]
    assert [loader.name_of("data", each) for each in (39, 47, 340)] == ["small:39", "middle:7", "large:0"]
    assert [*loader.urls] == [*loader.counts.fetched] == [*SIZES]
    stretch = stretch_of(loader)
    assert stretch is not None
    (source,) = stretch["sources"].values()
    assert [(each["name"], each["count"]) for each in source["streams"]] == [*SIZES.items()]
    (tmp_path / "drop").write_text("middle:300\n")
    with pytest.raises(ConfigError, match="middle:300 is no sample: the sources are data"):
        PackedLoader(datasets(root), mixing="samples", global_batch=8, drop=str(tmp_path / "drop"))


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        (
            {"packing": dataclasses.replace(PACKING, packing_length=300)},
            {},
            "packing_length is 256 for 'small' and 300 for 'large': set one value, or take mixing: packs",
        ),
        ({"order": OrderConfig(seed=6)}, {}, "order.seed is 5 for 'small' and 6 for 'large'"),
        ({"packing_mode": "lanes"}, {}, "packing_mode is 'auto' for 'small' and 'lanes' for 'large'"),
        ({}, {"weights": {0: {"small": 1}}}, "weights is a schedule: name a single weight for each dataset"),
        ({}, {"weights": {"other": 1}}, "weights name 'other', the datasets are small, middle, large"),
        ({}, {"max_epochs": {"small": 1}}, "max_epochs ends single datasets: leave it out, or take mixing: packs"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_by_name(
    root: Path, changes: Mapping[str, Any], options: dict[str, Any], message: str
) -> None:
    named = datasets(root) | {"large": datasets(root, **changes)["large"]}
    with pytest.raises(ConfigError, match=message):
        PackedLoader(named, mixing="samples", global_batch=8, **options)


def test_lanes_and_packs_that_stay_cannot_mix_samples(root: Path) -> None:
    with pytest.raises(ConfigError, match="lanes pack a single dataset, each sample once an epoch"):
        PackedLoader(datasets(root, packing_mode="lanes"), mixing="samples", global_batch=8)
    fixed = datasets(root, order=dataclasses.replace(ORDER, reshuffle=False))
    with pytest.raises(ConfigError, match="reshuffle: false keeps the packs of the first epoch"):
        PackedLoader(fixed, mixing="samples", global_batch=8)


def test_an_error_names_the_sample_in_its_stream(root: Path) -> None:
    dataset = mixed(datasets(root))
    assert dataset.name_of(47) == f"sample 7 of {root / 'middle'}"
    with pytest.raises(IndexError, match="sample 1540 of a dataset of 1540"):
        dataset.name_of(1540)
    assert dataset.plan.streams_of(np.array([39, 40, 339, 340])).tolist() == [0, 1, 1, 2]


def test_processes_share_the_file_of_joined_lengths_and_replace_a_damaged_one(root: Path) -> None:
    first, second = (mixed(datasets(root)).length_index() for _ in range(2))
    (path,) = {Path(each.lengths.filename) for each in (first, second)}  # type: ignore[attr-defined]
    assert isinstance(first.lengths, np.memmap)
    expected = np.concatenate([each.length_index().lengths for each in datasets(root).values()])
    assert first.lengths.tolist() == second.lengths.tolist() == expected.tolist()
    path.write_bytes(path.read_bytes()[:-40])
    assert mixed(datasets(root)).length_index().lengths.tolist() == expected.tolist()
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_tokens_whose_columns_differ_are_not_packed_together(root: Path, tmp_path: Path) -> None:
    write_samples(tmp_path / "more", [(np.arange(30, dtype=np.int32), np.array([[0, 30]], np.int32))] * 9)
    index = json.loads((tmp_path / "more" / "index.json").read_text())
    for shard in index["shards"]:
        shard["column_encodings"][1] = "ndarray:int16"
    (tmp_path / "more" / "index.json").write_text(json.dumps(index))
    both = [StreamConfig(remote=root / "small"), StreamConfig(remote=tmp_path / "more")]
    dataset = PackedDataset(both, processor=TokensProcessor(), packing=PACKING)
    with pytest.raises(ConfigError, match=r"differ in their columns .*: convert them with the same options"):
        _ = dataset.pack_reader


def test_a_state_of_mixed_samples_refuses_its_datasets_in_another_order_and_names_other_samples(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Datasets of equal sizes and lengths have one plan in any order."""

    def write_rows(name: str, first: int) -> None:
        shutil.rmtree(tmp_path / name, ignore_errors=True)
        rows = [np.arange(length, dtype=np.int32) + first for length in range(5, 25)]
        write_samples(tmp_path / name, [(each, np.array([[0, 5]], np.int32)) for each in rows])

    for number, name in enumerate("ab"):
        write_rows(name, number)

    def loader(names: str) -> PackedLoader:
        named = {n: PackedDataset(tmp_path / n, processor=TokensProcessor(), packing=PACKING) for n in names}
        return PackedLoader(named, global_batch=1, mixing="samples")

    state = loader("ab").state_dict()
    loader("ab").load_state_dict(state)
    with pytest.raises(CursorError, match=r"of the datasets in the order a, b, and they are named as b, a"):
        loader("ba").load_state_dict(state)

    def loader_of_streams(names: str) -> PackedLoader:
        """Streams of two datasets: the state lists the streams of both."""
        settings: dict[str, Any] = {"processor": TokensProcessor(), "packing": PACKING}
        streams = [Stream(local=str(tmp_path / name)) for name in names]
        return PackedLoader(
            {
                "x": PackedStreamingDataset(streams=[Stream(local=str(root / n)) for n in SIZES], **settings),
                "y": PackedStreamingDataset(streams=streams, **settings),
            },
            global_batch=1,
        )

    state = loader_of_streams("ab").state_dict()
    loader_of_streams("ab").load_state_dict(state)
    with pytest.raises(CursorError, match=r"of the datasets in the order .*a, .*b, and they are named as .*b, .*a"):
        loader_of_streams("ba").load_state_dict(state)
    assert not caplog.records
    state = loader("ab").state_dict()
    write_rows("b", 2)
    loader("ab").load_state_dict(state)
    assert "dataset 'b' (identity" in caplog.text
    assert "has other samples than the loaded state: restore it" in caplog.text
    assert len(caplog.records) == 1


def test_equal_shards_under_two_names_are_named_before_the_run(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    named = {name: PackedDataset(root / "small", processor=TokensProcessor(), packing=PACKING) for name in "ab"}
    PackedLoader(named, global_batch=1)
    assert "shards of dataset 'b' are also shards of 'a'" in caplog.text
