"""Relax's saved states are gone on with in its own order, in the middle of an epoch, and no pickle is run."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lmms_stream.errors import CheckpointError, ConfigError, CursorError
from lmms_stream.rl import Dataset, IndexManager, RolloutDataSourceWithBuffer, StreamingDataset
from lmms_stream.tools.demo.vision import save_processor
from transformers import AutoTokenizer

from .rows import prompts, write_lines

NUM_ROWS, SEED = 40, 7


def relax_order(num_rows: int, epoch: int) -> list[int]:
    """Python's own shuffle by seed + epoch, as Relax calls it."""
    random.seed(SEED + epoch)
    order = list(range(num_rows))
    random.shuffle(order)
    return order


def relax_rows(num_rows: int, epoch: int, position: int, count: int) -> list[int]:
    """The next rows from a position of an epoch on."""
    found = relax_order(num_rows, epoch)[position:]
    while len(found) < count:
        epoch += 1
        found += relax_order(num_rows, epoch)
    return found[:count]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lines(tmp_path_factory.mktemp("rows") / "rows.jsonl", prompts(NUM_ROWS))


def source_of(path: Path, folder: Path, **changes: Any) -> RolloutDataSourceWithBuffer:
    given = {"prompt_data": str(path), "input_key": "text", "label_key": "label", "rollout_seed": SEED}
    places = {"rollout_shuffle": True, "save": str(folder), "load": str(folder)}
    return RolloutDataSourceWithBuffer(SimpleNamespace(**{**given, **places, **changes}))


def labels(source: RolloutDataSourceWithBuffer, count: int) -> list[int]:
    return [int(group[0].label) for group in source.get_samples(count)]


def write_state(folder: Path, rollout_id: int = 0, *, name: str = "dataset", **changes: Any) -> None:
    """A .pt file with the keys that Relax saves."""
    state: dict[str, Any] = {
        "sample_offset": 0, "epoch_id": 0, "sample_group_index": 12, "sample_index": 24, "metadata": {"best": 0.5},
        "use_streaming": False, **changes,
    }  # fmt: skip
    (folder / name).mkdir(parents=True, exist_ok=True)
    torch.save(state, folder / name / f"global_dataset_state_dict_{rollout_id}.pt")


def streaming_state(epoch: int, position: int) -> dict[str, Any]:
    counts = {"filter_count": 3, "total_processed": 70}
    return {"use_streaming": True, "streaming_state": {"epoch_id": epoch, "position": position, **counts}}


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("of_streaming", [False, True])
@pytest.mark.parametrize(("epoch", "position"), [(0, 0), (0, 13), (2, 39), (3, 40)])
def test_a_state_of_relaxs_is_gone_on_with_in_its_order_in_the_middle_of_an_epoch(
    lazy: bool, of_streaming: bool, epoch: int, position: int, rows: Path, tmp_path: Path
) -> None:
    place = streaming_state(epoch, position) if of_streaming else {"sample_offset": position, "epoch_id": epoch}
    write_state(tmp_path, **place)
    source = source_of(rows, tmp_path, use_streaming_dataset=lazy)
    source.load(0)
    assert (source.sample_group_index, source.sample_index, source.get_metadata()) == (12, 24, {"best": 0.5})
    expected = relax_rows(NUM_ROWS, epoch, position, 100)
    assert labels(source, 30) == expected[:30]
    source.save(1)
    for also_lazy in (False, True):  # what is saved from then on is ours, and follows the same order
        resumed = source_of(rows, tmp_path, use_streaming_dataset=also_lazy)
        resumed.load()
        assert labels(resumed, 70) == expected[30:]
        assert resumed.sample_group_index == 12 + 30 + 70


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("offset", [0, 5, 99])
def test_relaxs_eager_dataset_counts_and_shuffles_the_samples_that_it_has_kept(
    shuffled: bool, offset: int, rows: Path, tokenizer: Path, tmp_path: Path
) -> None:
    texts = [row["text"] for row in prompts(NUM_ROWS)]
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    lengths = [len(ids) for ids in loaded(texts, add_special_tokens=False)["input_ids"]]
    limit = sorted(lengths)[NUM_ROWS // 2]
    kept = [number for number, length in enumerate(lengths) if length <= limit]
    write_state(tmp_path, sample_offset=offset, epoch_id=1)
    given = {
        "hf_checkpoint": str(tokenizer), "rollout_max_prompt_len": limit, "rollout_shuffle": shuffled,
        "rollout_batch_size": 100,
    }  # fmt: skip
    source = source_of(rows, tmp_path, **given)
    source.load(0)

    def order(epoch: int) -> list[int]:
        return [kept[index] for index in relax_order(len(kept), epoch)] if shuffled else kept

    expected = [*order(1)[offset:], *order(2), *order(3)][: 2 * len(kept)]
    assert labels(source, len(kept)) == expected[: len(kept)]
    source.save(1)
    resumed = source_of(rows, tmp_path, **given)
    resumed.load(1)
    assert labels(resumed, len(kept)) == expected[len(kept) :]
    lazy = source_of(rows, tmp_path, **given, use_streaming_dataset=True)
    with pytest.raises(CursorError, match=r"eager dataset, which .* load it without --use-streaming-dataset"):
        lazy.load(0)
    if shuffled:
        with pytest.raises(CursorError, match=r"the order 'relax, of \d+ samples', which StreamingDataset does not"):
            lazy.load(1)


def test_places_that_cannot_be_found_again_are_refused_by_name(rows: Path, tmp_path: Path) -> None:
    write_state(tmp_path, 0, **streaming_state(1, 13))
    write_state(tmp_path, 1, **streaming_state(1, NUM_ROWS + 1))
    write_state(tmp_path, 2, **streaming_state(1, NUM_ROWS))
    write_state(tmp_path, 3, sample_offset=-1)
    write_state(tmp_path, 4, sample_offset=3)
    plain, shuffled = source_of(rows, tmp_path, rollout_shuffle=False), source_of(rows, tmp_path)
    with pytest.raises(CursorError, match="which most versions shuffle even without --rollout-shuffle: set"):
        plain.load(0)
    with pytest.raises(CursorError, match=r"position is row 41 of epoch 1, which does not exist \(40 rows\)"):
        shuffled.load(1)
    plain.load(2)  # an epoch's end is the same in any order
    assert labels(plain, 3) == [0, 1, 2]
    with pytest.raises(CursorError, match="sample_offset -1 and epoch_id 0: it is damaged"):
        shuffled.load(3)
    write_state(tmp_path, 5, use_streaming=True)
    with pytest.raises(CursorError, match="the state is not a dataset's: it has no 'epoch_id'"):
        shuffled.load(5)
    with_images = tmp_path / "with_images"
    save_processor(with_images, texts=[row["text"] for row in prompts(9)])
    measured = source_of(rows, tmp_path, hf_checkpoint=str(with_images), rollout_max_prompt_len=99)
    with pytest.raises(CursorError, match=r"eager dataset with a processor .* order differs in each run"):
        measured.load(4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sample_offset": 4000}, r"sample_offset 4000 of an epoch with 40 samples: it is of other data, or"),
        ({"sample_offset": 41, "rollout_batch_size": 40}, r"sample_offset 41 of an epoch with 40 samples"),
        ({"epoch_id": 1 << 40}, r"sample_offset 0 and epoch_id 1099511627776: it is damaged"),
        (streaming_state(0, 4000), r"position is row 4000 of epoch 0, which does not exist \(40 rows\)"),
        (streaming_state(1 << 40, 0), r"row 0 of epoch 1099511627776, which does not exist"),
        (streaming_state(0, "0"), r"row 0 of epoch 0, which does not exist"),  # type: ignore[arg-type]
        ({"sample_index": -1}, "the state has sample_index -1: it is damaged"),
        ({"sample_offset": None, "epoch_id": 1}, r"state of rollout 0 in .* is damaged \(TypeError\("),
        ({"sample_offset": "1"}, r"state of rollout 0 in .* is damaged \(TypeError\("),
        ({"epoch_id": 1.5}, r"state of rollout 0 in .* is damaged \(TypeError\("),
        ({"use_streaming": True, "streaming_state": -1}, r"state of rollout 0 in .* is damaged \(AttributeError\("),
        ({"sample_offset": 3, "metadata": 1}, "is damaged .*metadata is 1"),
        ({"sample_offset": 3, "sample_group_index": "12"}, "the state has sample_group_index '12': it is damaged"),
    ],
)
def test_a_state_of_relaxs_that_is_out_of_range_is_refused(
    changes: dict[str, Any], message: str, rows: Path, tmp_path: Path
) -> None:
    given = {name: changes[name] for name in ("rollout_batch_size",) if name in changes}
    write_state(tmp_path, **{name: value for name, value in changes.items() if name not in given})
    source = source_of(rows, tmp_path, **given)
    with pytest.raises(CursorError, match=message):
        source.load(0)
    assert labels(source, 3) == labels(source_of(rows, tmp_path), 3)  # nothing has moved


class Opened:
    """What a pickle would make, and so run its code."""


def test_a_pickle_is_not_run_and_other_files_are_no_states(rows: Path, tmp_path: Path) -> None:
    source = source_of(rows, tmp_path)
    write_state(tmp_path, 0, metadata={"mine": Opened()})
    with pytest.raises(CheckpointError, match=r"state_dict_0\.pt cannot be read without running pickled code"):
        source.load(0)
    (tmp_path / "dataset" / "global_dataset_state_dict_0.pt").write_bytes(b"no archive")
    with pytest.raises(CheckpointError, match="cannot be read without running"):
        source.load(0)
    torch.save({"weights": torch.ones(2)}, tmp_path / "dataset" / "global_dataset_state_dict_0.pt")
    with pytest.raises(CheckpointError, match="is not a state of Relax's data source"):
        source.load(0)
    with pytest.raises(CheckpointError, match=r"holds no state of rollout 5 \(.*_5\.json, or Relax's \.pt\)"):
        source.load(5)


def test_the_latest_state_is_taken_whoever_saved_it_and_from_the_older_folder_too(rows: Path, tmp_path: Path) -> None:
    write_state(tmp_path, 8, name="rollout", **streaming_state(0, 4))
    source = source_of(rows, tmp_path)
    source.load()
    assert source.sample_offset == 4
    source.save(9)
    write_state(tmp_path, 9, **streaming_state(0, 30))  # of the same rollout, ours comes first
    resumed = source_of(rows, tmp_path)
    resumed.load()
    assert resumed.sample_offset == 4
    write_state(tmp_path, 10, **streaming_state(0, 30))
    resumed.load()
    assert resumed.sample_offset == 30


def test_relaxs_permutation_is_an_order_of_new_runs_too(rows: Path) -> None:
    for dataset in (
        Dataset(rows, label_key="label", seed=SEED, order="relax"),
        StreamingDataset(rows, label_key="label", seed=SEED, order="relax", prefetch_chunk_size=7),
    ):
        dataset.shuffle(0)
        found = [int(sample.label) for sample in dataset.get_batch(100)[0]]
        assert found == relax_rows(NUM_ROWS, 0, 0, 100)
        assert dataset.index_manager.indices == relax_order(NUM_ROWS, 2)
    assert IndexManager(NUM_ROWS, SEED, order="relax").get_next_indices(99)[0] == relax_rows(NUM_ROWS, 0, 0, 99)
    with pytest.raises(ConfigError, match="order must be 'own' or 'relax', got 'theirs'"):
        Dataset(rows, order="theirs")
