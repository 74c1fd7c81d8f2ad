"""Jobs on the CPU: runs on chats with images and videos, uninterrupted against stopped and resumed, step by step."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from lmms_stream.train.report.train_log import read_log
from streaming import MDSWriter

from tests.conftest import run_cli
from tests.processors.tiny_vlm import film, picture, save_processor, stored, tiny_config
from tests.rounds import LONG, in_long_rounds

from .runs import differences, steps_of, train

pytestmark = pytest.mark.timeout(800)  # for the jobs, of which each has a limit of its own
NUM_SAMPLES = 60


def chats() -> list[dict[str, Any]]:
    """Of images, of videos, and of text alone."""
    random = np.random.default_rng(0)
    videos = [film(56, 56, num_frames=frames, fps=4, seed=frames) for frames in (3, 8)]
    made = []
    for number in range(NUM_SAMPLES):
        content: list[Any] = ["What do you see? "]
        if number % 3 == 0:
            sides = random.integers(30, 120, (int(random.integers(1, 3)), 2)).tolist()
            content += [("image", picture(*side, seed=number)) for side in sides]
        elif number % 7 == 0:
            content.append(("video", videos[number % 2]))
        made.append(stored(("user", content), ("assistant", f"The answer is {number}, no more " * (number % 5 + 1))))
    return made


def write_vision_run(folder: Path) -> Path:
    """The config of a run on chats with media, all of which lies in a folder."""
    save_processor(folder / "processor", "qwen2_5_vl")
    columns = {"messages": "str", "media": "bytes"}
    with MDSWriter(columns=columns, out=str(folder / "chats"), hashes=["xxh3_64"], size_limit=1 << 16) as writer:
        for chat in chats():
            writer.write(chat)
    options = ["--processor", "vision", "--tokenizer", str(folder / "processor")]
    indexed = run_cli("index", str(folder / "chats"), *options)
    assert indexed.returncode == 0, indexed.stderr
    settings = {
        "dataset": {
            "remote": str(folder / "chats"),
            "processor": {"type": "vision", "path": str(folder / "processor")},
            "packing_length": 256,
            "overlong": "drop",
            "num_canonical_nodes": 4,
        },
        "model": {"config": tiny_config("qwen2_5_vl", folder / "processor").to_dict()},
        "train": {
            "output_dir": str(folder / "default"),
            "global_batch": 4,
            "learning_rate": 1e-3,
            "groups": {"model.visual.*": {"lr": 1e-4}},
            "lr_scheduler_type": "constant",
            "max_steps": 5,
            "num_workers": 1,
            "timeout_s": 60,
            "log_sample_ids": True,
        },
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def whole(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run on two ranks leaves that nothing interrupts."""
    output = tmp_path_factory.mktemp("whole") / "run"
    said = train(config, output, "train.save_steps=2")
    assert "attention: sdpa_varlen" in said
    first, *_ = read_log(output)
    assert first["perf/tflops_per_device"] > 0
    return output


def test_a_run_with_media_resumes_to_the_same_losses_and_on_other_numbers_of_ranks_to_the_same_samples(
    config: Path, whole: Path, tmp_path: Path
) -> None:
    again, elastic = tmp_path / "again", tmp_path / "elastic"
    for output in (again, elastic):
        shutil.copytree(whole / "checkpoints" / "step-00000002", output / "checkpoints" / "step-00000002")
    train(config, again, "train.num_workers=2", "train.max_steps=4")
    if LONG:  # in short rounds from two to one
        train(config, elastic, "train.max_steps=3", nproc=4)
    train(config, elastic, "train.num_workers=0", nproc=1)
    for output, last, tolerance in ((again, 4, 0.0), (elastic, 5, 1e-3)):
        assert steps_of(output) == [*range(3, last + 1)]
        assert differences(whole, output, first_step=3, last_step=last, tolerance=tolerance) == []


@in_long_rounds
def test_lanes_train_on_the_same_packs_of_media_and_resume_on_more_ranks(
    config: Path, whole: Path, tmp_path: Path
) -> None:
    output = tmp_path / "lanes"
    train(config, output, "dataset.packing_mode=lanes", "train.max_steps=2")
    train(config, output, "dataset.packing_mode=lanes", nproc=4)
    assert steps_of(output) == [1, 2, 3, 4, 5]
    assert differences(whole, output, tolerance=1e-3) == []
