"""Configs of runs on tiny rows of each dataset_type, with a tiny model of each family that reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from lmms_stream.doors.lmms_engine.datasets.names import TYPES as TYPES_OF_ENGINE

from tests.processors.tile_vlm import TINY, save_tile_processor, tile_config
from tests.processors.tiny_sound import clip, save_sound_processor, sound_config
from tests.processors.tiny_vlm import film, picture, qwen3_5_fields, save_processor, tiny_config
from tests.train import bagel, images
from tests.train.runs import MODEL, train_settings

STEPS = 6
NUM_ROWS = 60
QWEN_VL = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
SOUND = {"qwen2_audio": "qwen2_audio", "qwen2_5_omni": "Qwen2_5OmniProcessor", "qwen3_omni": "Qwen3OmniMoeProcessor"}
# dataset_type without _iterable -> the families whose rows it may hold; none where it means the model
TYPES: Mapping[str, tuple[str, ...]] = {
    "vision": ("qwen2_vl", "qwen2_5_vl", *(name for name in TINY if name != "llava_onevision")),
    "qwen3_vl": ("qwen3_vl",),
    "qwen3_5": ("qwen3_5",),
    "llava_video": ("llava_onevision",),
    "vision_audio": ("qwen2_audio",),
    "qwen_omni": ("qwen2_5_omni", "qwen3_omni"),
    "fineweb_edu": ("", "masked_diffusion"),
    "sit": ("",),
    "rae": ("",),
    "bagel": ("",),
}


def write_run(folder: Path, dataset_type: str, family: str) -> Path:
    """The config of a run of STEPS steps with a checkpoint of each; what it reads lies beside it."""
    kind = dataset_type.removesuffix("_iterable")
    if kind in ("sit", "rae"):
        return images.write_typed_run(folder, dataset_type)
    write = {"bagel": _bagel, "fineweb_edu": _documents}.get(kind, _chats)
    settings = write(folder, dataset_type, family)
    settings["dataset"] |= {"packing": True, "num_canonical_nodes": 4}
    if not TYPES_OF_ENGINE[dataset_type].is_iterable:
        settings["dataset"]["cache_dir"] = str(folder / "cache")
    path = folder / "run.yaml"
    settings["train"] = train_settings(path, global_batch=4) | {
        "max_steps": STEPS, "save_steps": 1, "num_workers": 1, "lr_scheduler_type": "constant",
    }  # fmt: skip
    path.write_text(yaml.safe_dump(json.loads(json.dumps(settings))))
    return path


def _bagel(folder: Path, dataset_type: str, _: str) -> dict[str, Any]:
    bagel.save_words(folder / "words")
    bagel.write_rows(folder / "rows", 100)
    return {"dataset": bagel.dataset_of(folder, dataset_type)}


def _documents(folder: Path, dataset_type: str, task: str) -> dict[str, Any]:
    bagel.save_words(folder / "words")
    texts = [" ".join(f"word {number} {at}" for at in range(1 + number * 13 % 40)) for number in range(120)]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    processor = {"processor_name": str(folder / "words"), "processor_type": "qwen2"}
    dataset = _rows_of(folder, dataset_type) | {"processor_config": processor}
    return {"dataset": dataset, "model": {"config": MODEL}} | ({"task": {"type": task}} if task else {})


def _chats(folder: Path, dataset_type: str, family: str) -> dict[str, Any]:
    """Chats about media of each kind that a family reads."""
    processor, dataset = folder / "processor", _rows_of(folder, dataset_type)
    name = SOUND.get(family, family)
    if family in SOUND:
        save_sound_processor(processor, family)
        model: Any = sound_config(family, processor)
    elif family == "qwen3_5":
        save_processor(processor, "qwen3_vl")
        model = qwen3_5_fields(processor)
    elif family in QWEN_VL:
        save_processor(processor, family)
        model = tiny_config(family, processor).to_dict()
    else:
        name = "llava" if dataset_type.startswith("llava") else ""
        save_tile_processor(processor, family)
        model = tile_config(family, processor).to_dict()
    if name:
        dataset["processor_config"] = {"processor_name": str(processor), "processor_type": name}
    else:  # LMMS Engine has no type for it
        frames = {"frame_num": 2} if TINY[family].video else {}
        dataset["processor"] = {"type": "vision", "path": str(processor), **frames}
    if name == "llava":
        dataset |= {"frame_num": 2, "video_sampling_strategy": "frame_num"}
        if dataset_type.endswith("_iterable"):  # slow and fast frames
            dataset["extra_kwargs"] = {"frames_upbound": 3, "force_sample": True, "faster_token_stride": 2,
                                       "add_time_instruction": True}  # fmt: skip
            model["faster_token_stride"] = 2
    elif name and family not in ("qwen3_vl", "qwen3_5", "qwen2_audio"):
        dataset["video_max_pixels"] = 16 * 28 * 28
    write_chats(folder, family)
    return {"dataset": dataset | {"packing_length": 384 if family in TINY else 256}, "model": {"config": model}}


def _rows_of(folder: Path, dataset_type: str) -> dict[str, Any]:
    return {
        "dataset_type": dataset_type, "dataset_format": "jsonl", "dataset_path": str(folder / "rows.jsonl"),
        "packing_length": 128,
    }  # fmt: skip


def write_chats(folder: Path, family: str) -> None:
    """Rows with other media each, and some of text alone, so that ranks hold other kinds in a step."""
    rng = np.random.default_rng(0)
    # Packs of Qwen3-Omni hold images or videos, not both.
    reads_video = TINY[family].video != "" if family in TINY else family not in ("qwen2_audio", "qwen3_omni")
    (folder / "film.mp4").write_bytes(film(56, 56, num_frames=8, fps=4))
    rows = []
    for number in range(NUM_ROWS):
        content: list[dict[str, Any]] = [{"type": "text", "text": f"What of {number}?"}]
        if family in SOUND and number % 2 == 0:
            (folder / f"{number}.wav").write_bytes(clip(int(rng.integers(2000, 60000)), seed=number))
            content.insert(0, {"type": "audio_url", "audio_url": {"url": f"{number}.wav"}})
        if family != "qwen2_audio" and number % (5 if family in SOUND else 3) == 0:
            (folder / f"{number}.png").write_bytes(picture(*rng.integers(30, 90, 2).tolist(), seed=number))
            content.append({"type": "image_url", "image_url": {"url": f"{number}.png"}})
        elif reads_video and number % 7 == 0:
            content.append({"type": "video_url", "video_url": {"url": "film.mp4"}})
        answer = {"role": "assistant", "content": [{"type": "text", "text": f"It is {number}. " * (1 + number % 4)}]}
        rows.append({"messages": [{"role": "user", "content": content}, answer]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
