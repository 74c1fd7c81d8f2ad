"""Runs of the families that read tiles, uninterrupted against stopped and resumed, step by step, in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from lmms_stream.errors import ConfigError
from lmms_stream.mds.measuring import index_dataset
from lmms_stream.processors import ProcessorConfig
from lmms_stream.versions.transformers import COUNTS_CHUNKS_BY_SAMPLE
from streaming import MDSWriter

from tests.jobs.runs import differences, steps_of
from tests.processors.tile_vlm import NUM2WORDS, TINY, save_tile_processor, tile_config
from tests.processors.tiny_vlm import film, picture, stored
from tests.rounds import in_long_rounds

from .runs import trainer_of, write_run


@pytest.fixture(scope="module")
def tiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family -> the config of a run on chats with images and videos, or images alone, of a tiny model of it."""

    def config(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        save_tile_processor(folder / "processor", name)
        with MDSWriter(columns={"messages": "str", "media": "bytes"}, out=str(folder / "chats")) as writer:
            for number in range(16):
                video = ("video", film(40, 32, num_frames=4 + number))
                image = ("image", picture(30 + 9 * number, 40, seed=number))
                media = [[image], [image, image], [video] if TINY[name].video else [image], []][number % 4]
                writer.write(stored(("user", [f"{number}?", *media]), ("assistant", "so it is " * (1 + number % 3))))
        processor: dict[str, Any] = {"type": "vision", "path": str(folder / "processor")}
        processor |= {"frame_num": 2} if TINY[name].video else {}
        index_dataset(str(folder / "chats"), ProcessorConfig(**processor).build(), num_workers=1)
        settings: dict[str, Any] = {"global_batch": 2, "max_steps": 4, "lr_scheduler_type": "constant"}
        path = write_run(folder / "run.yaml", folder / "chats", **settings)
        run = yaml.safe_load(path.read_text())
        run["dataset"] |= {"processor": processor, "packing_length": 384, "num_canonical_nodes": 2, "overlong": "drop"}
        run["model"]["config"] = tile_config(name, folder / "processor").to_dict()
        path.write_text(yaml.safe_dump(json.loads(json.dumps(run))))
        return path

    return config


@in_long_rounds
@pytest.mark.parametrize("name", [*TINY])
def test_a_run_of_each_family_goes_on_from_its_checkpoint_to_the_same_losses(
    name: str, tiled: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tiled(name)
    whole, again = tmp_path / "whole", tmp_path / "again"
    trainer_of(path, f"train.output_dir={whole}").train()
    trainer_of(path, f"train.output_dir={again}", "train.max_steps=2").train()
    trainer_of(path, f"train.output_dir={again}").train()
    assert steps_of(again) == [1, 2, 3, 4]
    assert differences(whole, again) == []


def test_a_run_whose_processor_needs_a_library_that_is_missing_names_it(
    tiled: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiled("smolvlm")
    monkeypatch.setattr(NUM2WORDS, None)
    with pytest.raises(ConfigError, match=r"cannot be loaded .*`num2words` is required .*pip install num2words"):
        trainer_of(path, f"train.output_dir={tmp_path}", "train.max_steps=1").train()


@pytest.mark.skipif(COUNTS_CHUNKS_BY_SAMPLE, reason="chunks are counted from the start of each sample")
def test_packs_longer_than_a_chunk_of_llama4_are_refused(tiled: Callable[[str], Path], tmp_path: Path) -> None:
    path = tiled("llama4")
    with pytest.raises(
        ConfigError,
        match=r"a pack of \d+ tokens is longer than the model's attention_chunk_size 128, which counts",
    ):
        trainer_of(path, f"train.output_dir={tmp_path}", "model.config.text_config.attention_chunk_size=128").train()
