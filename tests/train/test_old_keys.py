"""Keys of the release before are read as the new ones: in files, as keywords and in checkpoints."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from lmms_stream.config import build_config
from lmms_stream.errors import ConfigError
from lmms_stream.mds.dataset_config import OLD_KEYS as OLD_KEYS_OF_DATASETS
from lmms_stream.mds.dataset_config import DatasetConfig
from lmms_stream.processors.bagel_images import OLD_KEYS as OLD_KEYS_OF_BAGEL
from lmms_stream.processors.bagel_images import BagelSettings, VaeInput
from lmms_stream.train.checkpoint.saving import other_differences
from lmms_stream.train.run.settings import OLD_KEYS, TrainConfig

NEEDED: dict[str, Any] = {"output_dir": "out", "global_batch": 8, "max_steps": 100}
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"adam_beta1": 0.5}, {"optim_args": {"betas": [0.5, 0.999]}}),
    ({"adam_beta1": 0.8, "adam_beta2": 0.95}, {"optim_args": {"betas": [0.8, 0.95]}}),
    ({"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8}, {}),
    ({"adam_epsilon": 1e-6}, {"optim_args": {"eps": 1e-6}}),
    (
        {"lr_scheduler_type": "wsd", "decay_ratio": 0.3},
        {"lr_scheduler_type": "wsd", "lr_scheduler_kwargs": {"decay_ratio": 0.3}},
    ),
    ({"decay_ratio": 0.1, "min_learning_rate": 0.0}, {}),
    ({"min_learning_rate": 1e-6}, {"lr_scheduler_kwargs": {"min_lr": 1e-6}}),
    ({"save_strategy": "best", "save_steps": 5}, {"save_steps": "best"}),
    ({"eval_strategy": "epoch"}, {"eval_steps": "epoch"}),
    ({"save_strategy": False, "logging_strategy": "no"}, {"save_steps": "no", "logging_steps": "no"}),
    (
        {"save_strategy": "steps", "save_steps": 5, "eval_strategy": "no", "eval_steps": 5},
        {"save_steps": 5, "eval_steps": "no"},
    ),
    ({"profile": None}, {}),
    ({"profile": {"first": 2, "stop": 4}}, {"profile_steps": [2, 4]}),
    ({"profile": {"first": 2, "stop": 4, "folder": "there"}}, {"profile_steps": [2, 4, "there"]}),
    ({"on_bad_sample": "quarantine"}, {"bad_samples": {"quarantine": 100}}),
    (
        {"on_bad_sample": "quarantine", "max_bad_samples": 3, "drop": "x"},
        {"bad_samples": {"quarantine": 3, "drop": "x"}},
    ),
    ({"max_bad_samples": 3}, {}),
    ({"drop": [{"file": "a"}, {"file": "b", "from_step": 9}]}, {"bad_samples": {"drop": {"a": 0, "b": 9}}}),
    (
        {"drop": [{"file": "a", "from_step": 5}, {"file": "a"}, {"file": "a", "from_step": 9}]},
        {"bad_samples": {"drop": {"a": 0}}},
    ),
    ({"bad_samples": {"drop": [{"file": "a", "from_step": 9}]}}, {"bad_samples": {"drop": {"a": 9}}}),
    ({"bad_samples": {"action": "quarantine", "max": 3}}, {"bad_samples": {"quarantine": 3}}),
    ({"bad_samples": {"action": "error", "max": 3}}, {}),
    ({"bad_samples": {"max": 3}}, {}),
    ({"sample_timeout_s": 2.5}, {"bad_samples": {"timeout_s": 2.5}}),
    ({"drop": "bad.txt"}, {"bad_samples": {"drop": "bad.txt"}}),
    ({"wrap": ["Block"]}, {"fsdp": {"wrap": ["Block"]}}),
    ({"accumulate": "sharded"}, {"fsdp": {"accumulate": "sharded"}}),
    ({"reshard_after_forward": False}, {"fsdp": {"reshard_after_forward": False}}),
    ({"prefetch_blocks": 2}, {"fsdp": {"prefetch_blocks": 2}}),
    ({"load_best_model_at_end": True}, {"best": {"load": True}}),
    ({"metric_for_best_model": "f1"}, {"best": {"metric": "f1"}}),
    ({"greater_is_better": True}, {"best": {"mode": "max"}}),
    ({"greater_is_better": False}, {"best": {"mode": "min"}}),
    ({"alert_spike": 0, "alert_window": 9}, {"alerts": {"spike": 0}}),
    ({"alerts": {"window": 9}}, {}),
    ({"warmup_steps": 7}, {"warmup": 7}),
    ({"warmup_ratio": 0.25, "warmup_steps": 0}, {"warmup": 0.25}),
    ({"max_steps": None, "max_tokens": 99, "warmup_tokens": 7}, {"max_steps": None, "max_tokens": 99, "warmup": 7}),
    ({"learning_rates": {"a.*": 0.5}}, {"groups": {"a.*": {"lr": 0.5}}}),
    ({"decay_all": False, "weight_decay": 0.1}, {"weight_decay": 0.1}),
    ({"decay_all": True}, {}),
    (
        {"decay_all": True, "weight_decay": 0.1, "learning_rates": {"a.*": 0.5}},
        {"weight_decay": 0.1, "groups": {"*": {"weight_decay": 0.1}, "a.*": {"weight_decay": 0.1, "lr": 0.5}}},
    ),
    (
        {"decay_all": True, "weight_decay": 0.1, "groups": {"*": {"lr": 1.0}, "b": {"weight_decay": 0.0}}},
        {"weight_decay": 0.1, "groups": {"*": {"weight_decay": 0.1, "lr": 1.0}, "b": {"weight_decay": 0.0}}},
    ),
    ({"sequence_parallel": 2, "replication": 2}, {"sequence_parallel": 2}),
    ({"alert_wait_share": 1}, {"alerts": {"wait_share": 1}}),
]

SHARDS: dict[str, Any] = {"remote": "shards"}
CASES_OF_DATASETS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"packing": False}, {"max_samples_per_pack": 1}),
    ({"packing": True}, {}),
    ({"filter_overlong": True}, {"overlong": "drop"}),
    ({"filter_overlong": False}, {"overlong": "keep"}),
    ({"filter_overlong": False, "packing": False}, {"max_samples_per_pack": 1}),
    ({"data_seed": 3}, {"seed": 3}),
]

CASES_OF_BAGEL: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"vae_stride": 4, "vae_min_side": 8, "vae_max_side": 32}, {"vae": {"stride": 4, "min_side": 8, "max_side": 32}}),
    ({"vit_stride": 6, "vit_min_side": 12, "vit_max_side": 24}, {"vit": {"stride": 6, "min_side": 12, "max_side": 24}}),
    ({"vae_positions": 80, "vit_positions": 99}, {"vae": {"positions": 80}, "vit": {"positions": 99}}),
    ({"vae_dropout": 0.1, "vit_dropout": 0.2}, {"vae": {"dropout": 0.1}, "vit": {"dropout": 0.2}}),
]


@pytest.mark.parametrize(("old", "new"), CASES, ids=lambda case: "-".join(case))
@pytest.mark.filterwarnings("ignore:.* is an old key:FutureWarning")
def test_an_old_key_gives_the_same_config_as_the_new_one(old: dict[str, Any], new: dict[str, Any]) -> None:
    expected = build_config(TrainConfig, NEEDED | new, source="run.yaml")
    assert build_config(TrainConfig, NEEDED | old, source="run.yaml") == expected
    assert TrainConfig(**NEEDED | old) == TrainConfig(**NEEDED | new) == expected
    assert dataclasses.replace(TrainConfig(**NEEDED), **old) == expected


@pytest.mark.parametrize(("old", "new"), CASES_OF_DATASETS, ids=lambda case: "-".join(case))
@pytest.mark.filterwarnings("ignore:.* is an old key:FutureWarning")
def test_an_old_key_of_a_dataset_gives_the_same_config(old: dict[str, Any], new: dict[str, Any]) -> None:
    expected = build_config(DatasetConfig, SHARDS | new, source="run.yaml")
    assert build_config(DatasetConfig, SHARDS | old, source="run.yaml") == expected
    assert DatasetConfig(**SHARDS | old) == DatasetConfig(**SHARDS | new) == expected


@pytest.mark.parametrize(("old", "new"), CASES_OF_BAGEL, ids=lambda case: "-".join(case))
@pytest.mark.filterwarnings("ignore:.* is an old key:FutureWarning")
def test_an_old_key_of_bagel_gives_the_same_settings(old: dict[str, Any], new: dict[str, Any]) -> None:
    expected = build_config(BagelSettings, new, source="run.yaml")
    assert build_config(BagelSettings, old, source="run.yaml") == expected
    assert BagelSettings(**old) == BagelSettings(**new) == expected


def test_lengths_by_old_keys_of_bagel_keep_their_name() -> None:
    assert BagelSettings(vae=VaeInput(stride=4, min_side=8, max_side=32)).description == {
        "vae_stride": 4, "vae_min_side": 8, "vae_max_side": 32,
        "vit_stride": 14, "vit_min_side": 378, "vit_max_side": 512,
    }  # fmt: skip


def test_names_of_lmms_engine_give_its_config_without_a_warning() -> None:
    said: dict[str, Any] = {"dataset_type": "vision", "packing": True, "filter_overlong": False, "data_seed": 3}
    made = DatasetConfig(**said)
    assert made == build_config(DatasetConfig, said, source="run.yaml")
    assert (made.source_type, made.overlong, made.seed, made.packing_length) == ("vision", "keep", 3, 32000)


def test_every_old_key_has_a_case() -> None:
    assert {key for old, _ in CASES_OF_DATASETS for key in old} == OLD_KEYS_OF_DATASETS.keys()
    assert {key for old, _ in CASES_OF_BAGEL for key in old} == OLD_KEYS_OF_BAGEL.keys()
    assert {key for old, _ in CASES for key in old} >= OLD_KEYS.keys()


def test_an_old_key_is_told_with_the_new_one() -> None:
    with pytest.warns(FutureWarning, match=r"run.yaml: drop is an old key, .*: write bad_samples.drop$"):
        build_config(TrainConfig, NEEDED | {"drop": "x"}, source="run.yaml")
    with pytest.warns(FutureWarning, match=r"TrainConfig: drop is an old key, .*: write bad_samples.drop$"):
        TrainConfig(**NEEDED | {"drop": "x"})


@pytest.mark.filterwarnings("ignore:.* is an old key:FutureWarning")
def test_an_old_key_beside_its_new_one_is_an_error() -> None:
    both = NEEDED | {"alert_spike": 3.0, "alerts": {"spike": 4.0}}
    with pytest.raises(ConfigError, match=r"alerts.spike is 4.0, and an old key of it 3.0: leave the old key out"):
        build_config(TrainConfig, both, source="run.yaml")
    build_config(TrainConfig, NEEDED | {"alert_spike": 3.0, "alerts": {"window": 4}}, source="run.yaml")
    both = NEEDED | {"learning_rates": {"a.*": 0.5}, "groups": {"a.*": {"weight_decay": 0.1}}}
    with pytest.raises(ConfigError, match=r"groups and learning_rates both have 'a\.\*': write it in groups"):
        build_config(TrainConfig, both, source="run.yaml")


@pytest.mark.filterwarnings("ignore:.* is an old key:FutureWarning")
def test_a_strategy_beside_another_one_in_steps_is_an_error() -> None:
    both = NEEDED | {"save_strategy": "steps", "save_steps": "epoch"}
    with pytest.raises(
        ConfigError, match=r"save_steps is 'epoch', and an old key of it 'steps': leave the old key out"
    ):
        build_config(TrainConfig, both, source="run.yaml")


@pytest.mark.filterwarnings("ignore:.* is an old key:FutureWarning")
def test_a_section_of_steps_to_profile_has_its_keys_alone() -> None:
    with pytest.raises(ConfigError, match=r"profile has no 'frist': did you mean 'first'\?"):
        build_config(TrainConfig, NEEDED | {"profile": {"frist": 1, "stop": 2}}, source="run.yaml")
    with pytest.raises(ConfigError, match=r"profile_steps must be a range \[first, stop\), got \[1, None\]"):
        TrainConfig(**NEEDED | {"profile": {"first": 1}})


@pytest.mark.filterwarnings("ignore:.* is an old key:FutureWarning")
def test_another_action_for_bad_samples_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"action must be error or quarantine, got 'skip': write quarantine, a numb"):
        build_config(TrainConfig, NEEDED | {"bad_samples": {"action": "skip"}}, source="run.yaml")


def test_a_bare_no_of_yaml_is_no() -> None:
    said: dict[str, Any] = {"save_steps": False, "eval_steps": False, "logging_steps": False}
    made = build_config(TrainConfig, NEEDED | said, source="run.yaml")
    assert (made.save_steps, made.eval_steps, made.logging_steps) == ("no", "no", "no")
    assert made == TrainConfig(**NEEDED | said)
    assert build_config(TrainConfig, NEEDED | {"save_steps": 0}, source="run.yaml").save_steps == 0
    with pytest.raises(ConfigError, match=r"save_steps must be a number, got True"):
        build_config(TrainConfig, NEEDED | {"save_steps": True}, source="run.yaml")


def test_settings_of_a_checkpoint_with_old_keys_are_compared_by_their_new_ones() -> None:
    now = json.loads(json.dumps(dataclasses.asdict(TrainConfig(**NEEDED))))
    saved = {name: value for name, value in now.items() if name not in ("alerts", "best", "bad_samples", "fsdp")}
    saved |= {
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "decay_ratio": 0.1,
        "min_learning_rate": 0.0,
    }
    saved |= {"save_strategy": "steps", "eval_strategy": "steps", "logging_strategy": "steps"}
    saved |= {"bad_samples": {"action": "error", "max": 100, "timeout_s": None, "drop": None}}
    saved |= {"decay_all": False, "profile": None}
    saved |= {"alert_spike": 7.0, "alert_window": 50, "greater_is_better": None, "drop": None, "wrap": []}
    found = other_differences({"train": saved, "versions": {}}, {"train": now, "versions": {}})
    assert found == ["train.alerts.spike was 7.0, is 6.0"]
