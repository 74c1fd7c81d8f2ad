"""Configs of runs and datasets as YAML: new keys, old keys, LMMS Engine's names -> the values that they load to."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import yaml
from lmms_stream.config import load_config, load_mapping
from lmms_stream.doors.lmms_engine.launch.file import launch_of
from lmms_stream.mds.dataset_config import DatasetConfig
from lmms_stream.train.run_config import RunConfig

TOKENS = {"type": "tokens"}
DATA = {"remote": "datasets/numbers", "processor": TOKENS}
MODEL = {"config": {"model_type": "llama", "hidden_size": 16}}
NEEDED = {"output_dir": "out", "global_batch": 8}

TRAIN: dict[str, dict[str, Any]] = {
    "least": {"max_steps": 5},
    "new keys": {
        "num_train_epochs": 2, "warmup": 0.1, "lr_scheduler_type": "wsd", "lr_scheduler_kwargs": {"decay_ratio": 0.3},
        "optim": "adamw", "optim_args": {"betas": [0.8, 0.95], "eps": 1e-6}, "save_steps": 5, "logging_steps": 2,
        "bad_samples": {"quarantine": 3, "drop": {"a": 0, "b": 9}, "timeout_s": 2.5}, "skip_steps": [[6, 8]],
        "groups": {"a.*": {"lr": 0.5}}, "fsdp": {"reshard_after_forward": False}, "balance": "window",
    },
    "old keys of the optimizer": {
        "max_steps": 100, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6, "decay_all": True,
        "weight_decay": 0.1, "learning_rates": {"a.*": 0.5},
    },
    "old keys of the schedule": {
        "max_steps": 100, "lr_scheduler_type": "wsd", "decay_ratio": 0.3, "min_learning_rate": 1e-6, "warmup_steps": 7,
    },
    "old keys of tokens": {"max_tokens": 99, "warmup_tokens": 7},
    "old keys of a share": {"max_steps": 100, "warmup_ratio": 0.25, "warmup_steps": 0},
    "old keys of saving": {
        "max_steps": 100, "save_strategy": "best", "save_steps": 5, "eval_strategy": "epoch", "logging_strategy": "no",
        "load_best_model_at_end": True, "metric_for_best_model": "f1", "greater_is_better": True,
    },
    "old keys of bad samples": {
        "max_steps": 100, "on_bad_sample": "quarantine", "max_bad_samples": 3, "sample_timeout_s": 2.5,
        "drop": [{"file": "a"}, {"file": "b", "from_step": 9}],
    },
    "old keys of bad samples, in a section": {"max_steps": 100, "bad_samples": {"action": "quarantine", "max": 3}},
    "old keys of sharding": {
        "max_steps": 100, "wrap": ["Block"], "accumulate": "sharded", "reshard_after_forward": False,
        "prefetch_blocks": 2, "sequence_parallel": 2, "replication": 2,
    },
    "old keys of alerts and profiles": {
        "max_steps": 100, "alert_spike": 0, "alert_window": 9, "alert_wait_share": 1,
        "profile": {"first": 2, "stop": 4, "folder": "there"},
    },
}  # fmt: skip
DATASETS: dict[str, dict[str, Any]] = {
    "least": {"remote": "shards"},
    "new keys": {
        "remote": "s3://bucket/shards", "local": "cache", "num_parts": 2, "packing_length": {0: 4096, 20000: 32768},
        "packing_strategy": "window_64", "packing_window": 99, "overlong": "split", "max_samples_per_pack": 5,
        "seed": 3, "reshuffle": False, "num_canonical_nodes": 8, "shuffle_block_size": 4096, "packing_mode": "plan",
        "fetch": {"cache_limit": "2gb"}, "processor": {"type": "chat", "tokenizer": "t", "learn": "last"},
    },
    "old keys": {"remote": "shards", "packing": False, "filter_overlong": True, "data_seed": 3},
    "old key of packs": {"remote": "shards", "filter_overlong": False},
    "old keys of BAGEL": {
        "remote": "shards",
        "processor": {"type": "bagel", "tokenizer": "t", "bagel": {
            "vae_stride": 4, "vae_min_side": 8, "vae_max_side": 32, "vit_positions": 99, "vit_dropout": 0.2,
        }},
    },
    "LMMS Engine's, naive": {
        "dataset_type": "vision", "dataset_format": "jsonl", "dataset_path": "rows.jsonl", "packing": True,
        "filter_overlong": False, "data_seed": 3, "processor_config": {"processor_name": "p", "processor_type": "p"},
    },
    "LMMS Engine's, iterable": {
        "dataset_type": "vision_iterable", "dataset_format": "parquet", "dataset_path": "rows.parquet",
        "packing_strategy": "first_fit", "packing_length": 2048, "max_length": 1024, "on_error": "skip",
        "processor_config": {"processor_name": "p", "processor_type": "pure_text"},
    },
    "LMMS Engine's, a list": {
        "dataset_type": "vision", "dataset_format": "yaml",
        "datasets": [{"path": "a.jsonl", "data_folder": "", "data_type": "jsonl"}],
        "processor_config": {"processor_name": "p", "processor_type": "p"}, "cache_dir": "cache",
    },
    "LMMS Engine's, documents": {
        "dataset_type": "fineweb_edu", "dataset_format": "hf_dataset", "dataset_path": "documents",
        "processor_config": {"processor_name": "p", "processor_type": "pure_text"},
    },
}  # fmt: skip
LAUNCH: dict[str, Any] = {
    "trainer_type": "fsdp2_trainer",
    "dataset_config": {
        "dataset_type": "vision", "dataset_format": "jsonl", "dataset_path": "rows.jsonl", "packing": True,
        "packing_length": 1024, "packing_strategy": "first_fit", "filter_overlong": True, "cache_dir": "cache",
        "processor_config": {"processor_name": "processors/tokenizer", "processor_type": "pure_text"},
    },
    "model_config": {"load_from_config": {"model_type": "llama", "config": {"vocab_size": 400, "hidden_size": 16}}},
    "trainer_args": {
        "output_dir": "out", "per_device_train_batch_size": 2, "learning_rate": 1e-3, "lr_scheduler_type": "cosine",
        "max_steps": 4, "logging_steps": 1, "fsdp2": True, "use_rmpad": True, "report_to": "none", "ema_enabled": True,
        "ema_decay": 0.9, "sp_ulysses_degree": 1,
    },
}  # fmt: skip


def runs() -> dict[str, dict[str, Any]]:
    found = {
        f"train, {name}": {"dataset": DATA, "model": MODEL, "train": NEEDED | train} for name, train in TRAIN.items()
    }
    found |= {
        f"dataset, {name}": {"dataset": dataset, "model": MODEL, "train": NEEDED | {"max_steps": 5}}
        for name, dataset in DATASETS.items()
    }
    mixed = {"weights": {0: {"a": 1, "b": 2}, 100: {"b": 1}}, "max_epochs": {"a": 2, "b": 9}, "max_steps": 5}
    found["datasets by name"] = {
        "datasets": {"a": DATA, "b": DATA | {"seed": 4}},
        "eval_dataset": DATA,
        "model": {"pretrained": "m", "adapter": {"r": 4}},
        "train": NEEDED | mixed | {"eval_steps": 2},
        "task": {"type": "dft"},
    }
    return found


def write_configs(root: Path) -> None:
    """Write configs/ below a folder: a file for each run, and a launch file."""
    folder = root / "configs"
    folder.mkdir()
    for number, (name, run) in enumerate(runs().items()):
        text = f"# {name}\n{yaml.safe_dump(run, sort_keys=False)}"
        (folder / f"run-{number:02}.yaml").write_text(text, encoding="utf-8")
    (folder / "launch.yaml").write_text(yaml.safe_dump(LAUNCH, sort_keys=False), encoding="utf-8")


def values_of(value: Any) -> Any:
    """Return the JSON values of a config, with the name of the class of its fields."""
    if isinstance(value, DatasetConfig):
        fields = dataclasses.fields(value)
        of_fields = [each for each in type(value).__mro__[:-1] if dataclasses.fields(each) == fields]
        return {"class": of_fields[-1].__name__, **_fields(value)}
    if dataclasses.is_dataclass(value):
        return _fields(value)
    if isinstance(value, dict):
        return {str(key): values_of(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [values_of(inner) for inner in value]
    return json.loads(json.dumps(value, default=str))


def _fields(value: Any) -> dict[str, Any]:
    return {each.name: values_of(getattr(value, each.name)) for each in dataclasses.fields(value)}


def config_values(root: Path) -> dict[str, Any]:
    """Return what each stored config loads to, by the name of its file."""
    found = {path.name: values_of(load_config(RunConfig, path)) for path in sorted((root / "configs").glob("run-*"))}
    path = root / "configs" / "launch.yaml"
    return found | {path.name: values_of(launch_of(load_mapping(path), source=path.name))}
