"""A run that takes milliseconds a step: what tests of checkpoints train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from lmms_stream.config import load_config
from lmms_stream.doors.huggingface.trainer import FSDP2SFTTrainer
from lmms_stream.train.run.distributed import init_distributed
from lmms_stream.train.run_config import RunConfig

VOCABULARY = 512  # of write_tokens, whose samples are their numbers
MODEL = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def write_run(path: Path, dataset: Path | str, *, eval_dataset: dict[str, Any] | None = None, **train: Any) -> Path:
    """The config of a run on a dataset of write_tokens, at a folder or URL. eval_dataset: its settings, if others."""
    data = {
        "remote": str(dataset),
        "processor": {"type": "tokens"},
        "packing_length": 256,
        "num_canonical_nodes": 4,
    }
    settings = {
        "dataset": data,
        "eval_dataset": None if eval_dataset is None else data | eval_dataset,
        "model": {"config": MODEL},
        "train": train_settings(path, global_batch=8) | train,
    }
    path.write_text(yaml.safe_dump(settings))
    return path


def write_small_run(path: Path, dataset: Path | str, **options: Any) -> Path:
    """The same with steps of two packs, a quarter of the work, for tests whose steps may hold any packs."""
    return write_run(path, dataset, **{"global_batch": 2, **options})


def train_settings(path: Path, *, global_batch: int) -> dict[str, Any]:
    """The section `train` of a run whose config lies at a path."""
    return {
        "output_dir": str(path.parent / "default"),
        "global_batch": global_batch,
        "learning_rate": 1e-3,
        "num_workers": 0,
        "timeout_s": 60,
        "log_sample_ids": True,
    }


def trainer_of(
    path: Path, *overrides: str, kind: type[FSDP2SFTTrainer] = FSDP2SFTTrainer, **options: Any
) -> FSDP2SFTTrainer:
    """The trainer of a run, in this process alone or as a rank; end_distributed ends its process group."""
    config = load_config(RunConfig, path, overrides)
    world, _ = init_distributed(config.train.timeout_s)
    return kind(
        model=config.model.build(),
        args=config.train,
        train_dataset=config.build_datasets(world),
        eval_dataset=config.eval_dataset.build(world) if config.eval_dataset else None,
        **options,
    )
