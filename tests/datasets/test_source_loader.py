"""The trainer on sources without conversion: its checkpoint holds where they stand."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
from lmms_stream.datasets import DatasetConfig, MultiModalIterableDataset
from lmms_stream.doors.huggingface.trainer import FSDP2SFTTrainer
from lmms_stream.doors.lmms_engine.datasets.epoch_turns import EpochTurns
from lmms_stream.errors import ConfigError, CursorError
from lmms_stream.tools.demo.corpus import VOCABULARY
from lmms_stream.train.model.build import ModelConfig
from lmms_stream.train.report.train_log import read_log
from lmms_stream.train.run.distributed import end_distributed
from lmms_stream.train.run.settings import TrainConfig
from lmms_stream.types import World
from transformers import TrainingArguments

from .chats import text_config
from .streamed import write_rows

MODEL = {
    "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    yield
    end_distributed()


@pytest.fixture
def dataset(tokenizer: Path, tmp_path: Path) -> MultiModalIterableDataset:
    path = write_rows(tmp_path / "rows.jsonl", range(400))
    return MultiModalIterableDataset(
        DatasetConfig(**text_config(path, tokenizer, tmp_path, dataset_type="vision_iterable"))
    )


def train(dataset: MultiModalIterableDataset, output: Path, **settings: Any) -> None:
    args = TrainConfig(
        output_dir=str(output), global_batch=4, learning_rate=1e-3, log_sample_ids=True, num_workers=0, **settings
    )
    FSDP2SFTTrainer(
        ModelConfig(config=MODEL), args, train_dataset=dataset, data_collator=dataset.get_collator()
    ).train()


def samples(output: Path) -> list[list[int]]:
    return [record["sample_ids"] for record in read_log(output)]


def test_a_run_that_is_resumed_trains_on_the_same_packs(dataset: MultiModalIterableDataset, tmp_path: Path) -> None:
    train(dataset, tmp_path / "whole", max_steps=20)
    train(dataset, tmp_path / "resumed", max_steps=7)
    train(dataset, tmp_path / "resumed", max_steps=20)
    assert samples(tmp_path / "whole") == samples(tmp_path / "resumed")
    assert len(samples(tmp_path / "whole")) == 20


def test_a_script_of_lmms_engine_runs_on_an_iterable_dataset(
    dataset: MultiModalIterableDataset, tmp_path: Path
) -> None:
    arguments = TrainingArguments(
        str(tmp_path / "out"), max_steps=3, per_device_train_batch_size=2, logging_steps=1, report_to="none",
        use_cpu=True, save_strategy="no",
    )  # fmt: skip
    trainer = FSDP2SFTTrainer(
        ModelConfig(config=MODEL), arguments, train_dataset=dataset.build(), data_collator=dataset.get_collator()
    )
    assert trainer.train().global_step == 3
    assert trainer.loader.state_dict()["step"] == 3


def test_a_run_has_to_say_its_steps_and_cannot_pass_over_any(
    dataset: MultiModalIterableDataset, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="not known beforehand: set max_steps instead of num_train_epochs"):
        train(dataset, tmp_path / "out", num_train_epochs=1)
    shares = TrainingArguments(str(tmp_path), num_train_epochs=0.5, use_cpu=True, report_to="none")
    with pytest.raises(ConfigError, match="are read without conversion are not known beforehand: set max_steps"):
        FSDP2SFTTrainer(ModelConfig(config=MODEL), shares, train_dataset=dataset)
    loader = dataset.open_loader(global_batch=2, world=World())
    with pytest.raises(ConfigError, match="not known beforehand: leave skip_steps out, or convert the sources"):
        loader.skip_steps(1)
    with pytest.raises(ConfigError, match=r"count steps instead \(max_steps\)"):
        _ = loader.steps_left
    with pytest.raises(ConfigError, match="weights and max_epochs are for datasets of shards"):
        dataset.open_loader(global_batch=2, world=World(), weights={"a": 1.0})
    with pytest.raises(ConfigError, match="balance 'window' is for datasets of shards: set it to deal"):
        dataset.open_loader(global_batch=2, world=World(), balance="window")


def test_states_of_different_steps_are_not_merged(dataset: MultiModalIterableDataset) -> None:
    loaders = [dataset.open_loader(global_batch=2, world=World(rank=rank, world_size=2)) for rank in range(2)]
    for loader, num_steps in zip(loaders, (3, 4), strict=True):
        batches = iter(loader)
        for _ in range(num_steps):
            next(batches)
    with pytest.raises(CursorError, match="states at steps 3 and 4, of 2 and 2 lanes, cannot be merged"):
        loaders[0].merge_states([loader.state_dict() for loader in loaders])


def test_an_iteration_that_begins_waits_for_one_that_begins_in_another_process() -> None:
    turns = EpochTurns()
    with ThreadPoolExecutor(1) as thread:
        with turns._shared.get_lock():
            begun = thread.submit(turns.begin)
            assert not wait([begun], timeout=0.2).done
        assert (begun.result(60), turns.begin()) == (0, 1)
