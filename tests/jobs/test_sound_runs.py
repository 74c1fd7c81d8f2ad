"""Jobs on the CPU: runs on rows of LMMS Engine's with sounds, images and videos, killed and resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from lmms_stream.train.report.train_log import read_log

from tests.processors.tiny_sound import clip, save_sound_processor, sound_config
from tests.processors.tiny_vlm import film, picture
from tests.rounds import in_long_rounds

from .launcher import start_job
from .runs import MODULE, differences, steps_of, train, wait_until

pytestmark = pytest.mark.timeout(800)  # for the jobs, of which each has a limit of its own
NUM_ROWS = 40
STEPS = 6
# dataset_type, family, processor_type
TYPES = [
    ("qwen_omni", "qwen2_5_omni", "Qwen2_5OmniProcessor"),
    ("vision_audio", "qwen2_audio", "qwen2_audio"),
    ("qwen_omni", "qwen3_omni", "Qwen3OmniMoeProcessor"),
]


def write_rows(folder: Path, family: str) -> Path:
    """Rows with other media each, and some of text alone, so that ranks hold other kinds in a step."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(NUM_ROWS):
        content: list[dict[str, Any]] = [{"type": "text", "text": f"What of {number}?"}]
        if number % 2 == 0:
            name = f"{number}.wav"
            (folder / name).write_bytes(clip(int(rng.integers(2000, 60000)), seed=number))
            content.insert(0, {"type": "audio_url", "audio_url": {"url": name}})
        if number % 5 == 0 and family != "qwen2_audio":
            name = f"{number}.png"
            (folder / name).write_bytes(picture(*rng.integers(30, 90, 2).tolist(), seed=number))
            content.append({"type": "image_url", "image_url": {"url": name}})
        elif number % 7 == 0 and family == "qwen2_5_omni":
            (folder / "film.mp4").write_bytes(film(56, 56, num_frames=8, fps=4))
            content.append({"type": "video_url", "video_url": {"url": "film.mp4"}})
        answer = {"role": "assistant", "content": [{"type": "text", "text": f"It is {number}. " * (1 + number % 4)}]}
        rows.append({"messages": [{"role": "user", "content": content}, answer]})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_config(folder: Path, dataset_type: str, family: str, processor_type: str) -> Path:
    save_sound_processor(folder / "processor", family)
    settings = {
        "dataset": {
            "dataset_type": dataset_type,
            "dataset_format": "jsonl",
            "dataset_path": str(write_rows(folder, family)),
            "processor_config": {"processor_name": str(folder / "processor"), "processor_type": processor_type},
            "video_max_pixels": 16 * 28 * 28,
            "cache_dir": str(folder / "cache"),
            "packing": True,
            "packing_length": 256,
            "num_canonical_nodes": 2,
        },
        "model": {"config": sound_config(family, folder / "processor")},
        "train": {
            "output_dir": str(folder / "default"),
            "global_batch": 4,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "max_steps": STEPS,
            "save_steps": 1,
            "num_workers": 1,
            "timeout_s": 60,
            "log_sample_ids": True,
        },
    }
    if processor_type == "qwen2_audio":
        del settings["dataset"]["video_max_pixels"]  # type: ignore[attr-defined]
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@in_long_rounds
@pytest.mark.parametrize(("dataset_type", "family", "processor_type"), TYPES)
def test_a_killed_run_on_sound_resumes_to_the_same_losses_and_on_one_rank_to_the_same_samples(
    dataset_type: str, family: str, processor_type: str, tmp_path: Path
) -> None:
    config = write_config(tmp_path, dataset_type, family, processor_type)
    whole, killed, one = tmp_path / "whole", tmp_path / "killed", tmp_path / "one"
    said = train(config, whole)
    assert f"attention: {'sdpa' if family == 'qwen2_audio' else 'sdpa_varlen'}" in said
    with start_job(2, MODULE, str(config), f"train.output_dir={killed}") as job:
        wait_until(lambda: any((killed / "checkpoints").glob("step-*")), job)  # then all of it is killed
    shutil.copytree(killed, one)
    train(config, killed)
    assert steps_of(killed) == [*range(1, STEPS + 1)]
    assert differences(whole, killed) == []
    train(config, one, nproc=1)
    assert differences(whole, one, tolerance=1e-3) == []
    assert all(record["loss"] > 0 for record in read_log(whole))
