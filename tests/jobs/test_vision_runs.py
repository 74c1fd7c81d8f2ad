"""Jobs on the CPU: runs on chats with images and videos, uninterrupted against stopped and resumed, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from lmms_stream.train.report.train_log import read_log
from streaming import MDSWriter

from tests.conftest import run_cli
from tests.processors.tiny_vlm import film, picture, save_processor, stored, tiny_config

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


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
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
            "num_canonical_nodes": 2,
        },
        "model": {"config": tiny_config("qwen2_5_vl", folder / "processor").to_dict()},
        "train": {
            "output_dir": str(folder / "default"),
            "global_batch": 4,
            "learning_rate": 1e-3,
            "learning_rates": {"model.visual.*": 1e-4},
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


def test_a_run_with_media_resumes_to_the_same_losses_and_on_another_number_of_ranks_to_the_same_samples(
    config: Path, tmp_path: Path
) -> None:
    said = train(config, tmp_path / "whole")
    assert "attention: sdpa_varlen" in said
    for name, nproc, workers in (("again", 2, 2), ("alone", 1, 0)):
        output = tmp_path / name
        train(config, output, "train.max_steps=2")
        train(config, output, f"train.num_workers={workers}", nproc=nproc)
        assert steps_of(output) == [1, 2, 3, 4, 5]
        tolerance = 0 if nproc == 2 else 1e-3
        assert differences(tmp_path / "whole", output, tolerance=tolerance) == []
    first, *_ = read_log(tmp_path / "whole")
    assert first["perf/tflops_per_device"] > 0
