"""Every field of a DatasetConfig does something, is told to do nothing, or is refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from lmms_stream.datasets import DatasetConfig, MultiModalDataset, MultiModalIterableDataset
from lmms_stream.doors.lmms_engine.datasets.moot import moot_fields
from lmms_stream.errors import ConfigError

from .chats import text_config, write_jsonl

# Fields that do something for chats of text in files, whichever class packs them.
HONOURED = {
    "dataset_type", "dataset_format", "dataset_path", "datasets", "processor_config", "processor", "packing",
    "packing_length", "packing_strategy", "filter_overlong", "overlong", "max_length", "max_samples_per_pack",
    "shuffle", "data_seed", "seed", "eval_dataset_path", "extra_kwargs", "num_canonical_nodes", "on_error",
    "packing_mode",
}  # fmt: skip
# What shapes the order of a plan, which streams have none of; their defaults are values, so that none can be told.
OF_PLANS = {"reshuffle", "shuffle_block_size", "fetch", "remote"}
SET: dict[str, Any] = {
    "video_backend": "decord", "filter_overlong_workers": 8, "video_sampling_strategy": "fps",
    "video_max_pixels": 50176, "video_min_pixels": 3136, "video_max_frames": 512, "frame_num": 64, "fps": 1.0,
    "cache_dir": "x", "object_storage": "gcs", "bucket_name": "b", "local": "x", "packing_window": 64,
    "num_parts": 0,
}  # fmt: skip
OF_CONVERSION = {"cache_dir", "object_storage", "bucket_name", "local", "packing_window"}


def config(**given: Any) -> DatasetConfig:
    return DatasetConfig(**text_config(Path("a.jsonl"), Path("t"), Path("cache")) | {"cache_dir": None} | given)


def test_every_field_is_honoured_or_told() -> None:
    assert {field.name for field in dataclasses.fields(DatasetConfig)} == HONOURED | OF_PLANS | SET.keys()
    assert moot_fields(config(), streams=False) == moot_fields(config(), streams=True) == {}
    for name, value in SET.items():
        beside = {"bucket_name": {"object_storage": "gcs"}, "object_storage": {"bucket_name": "b"}}.get(name, {})
        given = config(**{name: value}, **beside)
        assert moot_fields(given, streams=True).keys() == {name, *beside}
        assert moot_fields(given, streams=False).keys() == ({name} - OF_CONVERSION)


def test_what_cannot_matter_is_told_once(tokenizer: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said = text_config(write_jsonl(tmp_path / "a.jsonl", 4), tokenizer, tmp_path, packing=False, fps=2)
    said["extra_kwargs"] = {"collator_type": "vision", "packing_kwargs": {"num_buckets": 3}}
    MultiModalDataset(said | {"datasets": [{"path": str(tmp_path / "a.jsonl")}], "dataset_format": "yaml"})
    (told,) = [record.getMessage() for record in caplog.records if "cannot matter here" in record.message]
    for name in ("fps (the", "extra_kwargs.collator_type (", "extra_kwargs.packing_kwargs (", "dataset_path (datasets"):
        assert name in told
    caplog.clear()
    list(MultiModalIterableDataset(said | {"cache_dir": None}))
    assert caplog.text.count("cannot matter here") == 1


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_bukets": 3}, "packing_kwargs has no 'num_bukets': did you mean 'num_buckets'"),
        ([3], r"packing_kwargs must be a mapping, got \[3\]: write its keys"),
    ],
)
def test_packing_kwargs_that_are_unknown_are_refused(kwargs: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MultiModalDataset(config(extra_kwargs={"packing_kwargs": kwargs}))


def test_packing_kwargs_of_streams_are_those_of_the_strategy() -> None:
    given = config(packing_strategy="balanced", extra_kwargs={"packing_kwargs": {"num_buckets": 3}})
    assert MultiModalIterableDataset(given).packing.max_open == 3
    wrong = config(packing_strategy="balanced", extra_kwargs={"packing_kwargs": {"num_open_buckets": 3}})
    with pytest.raises(
        ConfigError, match="packing_kwargs has 'num_open_buckets', and balanced takes num_buckets, fill_"
    ):
        MultiModalIterableDataset(wrong)
    for kwargs in ({"max_swap_iters": 9, "min_gain": 1}, {"fill_threshold": 0.9}):
        moot = moot_fields(config(packing_strategy="balanced", extra_kwargs={"packing_kwargs": kwargs}), streams=True)
        assert [*moot] == [f"extra_kwargs.packing_kwargs.{', '.join(kwargs)}"]
    told = moot_fields(dataclasses.replace(given, dataset_format="mds"), streams=True)
    assert told["extra_kwargs.packing_kwargs"].startswith("packs are made of all lengths: packing_window says")
    with pytest.raises(ConfigError, match=r"packing_mode 'plan' makes packs of all lengths, .*: leave it out"):
        MultiModalIterableDataset(config(packing_mode="plan"))


@pytest.mark.parametrize("strategy", ["first_fit", "next_fit", "best_fit", "balanced", "window_100"])
def test_a_config_of_any_strategy_goes_to_either_class_and_back(
    strategy: str, tokenizer: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = text_config(write_jsonl(tmp_path / "a.jsonl", 40), tokenizer, tmp_path) | {"packing_strategy": strategy}
    numbers: list[list[int]] = []
    for streams, taken in ((False, "best_fit"), (True, "first_fit"), (False, "best_fit")):
        caplog.clear()
        if streams:
            packs = list(MultiModalIterableDataset(DatasetConfig(**said | {"cache_dir": None})).build())
            is_taken = strategy in ("first_fit", "best_fit", "balanced")
        else:
            dataset = MultiModalDataset(DatasetConfig(**said)).build()
            packs = [dataset[number] for number in range(len(dataset))]
            is_taken = strategy != "balanced"
        assert caplog.text.count(f"{strategy} is taken as {taken}") == (not is_taken)
        assert all(pack.num_tokens <= 256 for pack in packs)
        numbers.append(sorted(len(pack.sample_ids) for pack in packs))
    assert [sum(each) for each in numbers] == [40, 40, 40]
    assert numbers[0] == numbers[2]


@pytest.mark.parametrize("made", [MultiModalDataset, MultiModalIterableDataset])
def test_a_strategy_that_neither_class_has_is_refused(made: Any) -> None:
    with pytest.raises(ConfigError, match=r"^strategy must be one of .* \(as window_1024\), got 'fullest'$"):
        made(config(packing_strategy="fullest"))
