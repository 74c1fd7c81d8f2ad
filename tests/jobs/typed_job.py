"""A job: a run on rows by their dataset_type. It takes a YAML file, settings as NAME=VALUE, and held_at=N.

The file has the sections dataset, train and, where the model is one of transformers' or diffusers', model. Without it
the model is the tiny one of the dataset's type: a decoder and its discriminator, or that of examples/bagel. held_at:
each rank stands still before the update of step N + 1, with `held-<rank>` in its output_dir, until it is killed.
"""

from __future__ import annotations

import logging
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from lmms_stream.config import build_config, load_mapping
from lmms_stream.doors.huggingface.data import open_config
from lmms_stream.doors.huggingface.trainer import FSDP2SFTTrainer
from lmms_stream.loader.worker_server import fork_worker_server
from lmms_stream.mds.dataset_config import DatasetConfig
from lmms_stream.plugins.tasks.reconstruction import L1, HingeGAN, Reconstruction, Term
from lmms_stream.train.run.distributed import end_distributed, init_distributed
from lmms_stream.train.run.settings import TrainConfig
from lmms_stream.train.run_config import RunConfig


def model_and_task(data: dict[str, Any], folder: Path) -> tuple[Any, Any]:
    """The task is None where the dataset's processor says it."""
    if "model" in data:
        config = build_config(RunConfig, data, source=str(folder))
        return config.model, config.build_task()
    if data["dataset"]["dataset_type"].startswith("bagel"):
        from tests.train.bagel import build_model

        return build_model(), None
    from tests.train.images import adversary

    terms: list[Term] = [L1(), HingeGAN(discriminator_from_step=1, from_step=2)]
    return adversary(), Reconstruction(encoder=folder / "encoder", terms=terms)


def _write_numbers() -> None:
    """Stand in for the library that transformers' SmolVLMProcessor needs, which is not installed here."""
    import_module("tests.processors.tile_vlm")


def hold(trainer: FSDP2SFTTrainer, step: int) -> None:
    """Have this rank stand still once so many steps are done."""

    def wait(*_: Any) -> None:
        if trainer.step == step:
            Path(trainer.config.output_dir, f"held-{trainer.world.rank}").touch()
            signal.pause()

    trainer.optimizer.register_step_pre_hook(wait)


def main() -> None:
    logging.basicConfig(format="%(message)s")
    logging.getLogger("lmms_stream").setLevel(logging.INFO)
    path, held_at = Path(sys.argv[1]), 0
    overrides = [each for each in sys.argv[2:] if not each.startswith("held_at=")]
    for each in {*sys.argv[2:]} - {*overrides}:
        held_at = int(each.partition("=")[2])
    data: dict[str, Any] = load_mapping(path, overrides)
    config = build_config(TrainConfig, data["train"], source=str(path))
    if data.get("model", {}).get("config", {}).get("model_type") == "smolvlm":
        _write_numbers()  # before the workers are forked, who read with it, too
    if config.num_workers:
        fork_worker_server()
    world, _ = init_distributed(config.timeout_s)
    dataset = open_config(build_config(DatasetConfig, data["dataset"], source=str(path)), world)
    model, task = model_and_task(data, path.parent)
    trainer = FSDP2SFTTrainer(model=model, args=config, train_dataset=dataset, task=task)
    trainer.build()
    if held_at:
        hold(trainer, held_at)
    trainer.train()
    end_distributed()


if __name__ == "__main__":
    main()
