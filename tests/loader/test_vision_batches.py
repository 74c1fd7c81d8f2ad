"""Chats with images and videos, from a converted dataset to the batches of workers."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lmms_stream.converters.convert import convert
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors.multimodal import MultimodalProcessor

from ..processors.tiny_vlm import FAMILIES, film, picture, save_processor
from .reporting import WithoutModels


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats: text alone, one and two pictures in JPEG and PNG, a video, a picture and a video."""
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    with file.open("w") as lines:
        for number in range(20):
            images = [
                picture(40 + 9 * number, 70, seed=number, format=form, orientation=6)
                for form in ("JPEG", "PNG")[: (0, 1, 2, 0, 1)[number % 5]]
            ]
            videos = [film(64, 48, num_frames=5 + number)] if number % 5 > 2 else []
            text = "<image>" * len(images) + "<video>" * len(videos) + f"What is number {number}?"
            row: dict[str, Any] = {
                "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": f"It is {number}."}]
            }
            for name, media in (("images", images), ("videos", videos)):
                row[name] = [base64.b64encode(each).decode() for each in media]
            lines.write(json.dumps(row) + "\n")
    return file


@pytest.mark.parametrize("name", FAMILIES)
def test_batches_of_workers_hold_what_the_processor_makes(name: str, rows: Path, tmp_path: Path) -> None:
    save_processor(tmp_path / "processor", name)
    made = MultimodalProcessor.from_pretrained(str(tmp_path / "processor"))
    convert([rows], str(tmp_path / "data"), processor=made, num_workers=1)
    in_a_worker = name == "qwen3_vl"
    processor = WithoutModels(made.tokenizer, made.family) if in_a_worker else made
    packing = PackingConfig(packing_length=512, overlong="error")
    dataset = PackedStreamingDataset(str(tmp_path / "data"), processor=processor, packing=packing)
    seen: list[int] = []
    loader = PackedLoader(dataset, global_batch=2, num_workers=int(in_a_worker), start_method="spawn")
    for batch in loader:
        ids = batch.sample_ids.tolist()
        alone = [made.process(dataset[sample_id]) for sample_id in ids]
        seen += ids
        num_tokens = sum(len(each["input_ids"]) for each in alone)
        assert batch.input_ids[0, :num_tokens].tolist() == np.concatenate([e["input_ids"] for e in alone]).tolist()
        own = np.concatenate([each["position_ids"] for each in alone], axis=1)
        assert np.array_equal(batch.position_ids[1:, 0, :num_tokens].numpy(), own)
        names = {key for each in alone for key in each["media"]}
        assert batch.inputs.keys() == names
        for key in names:
            expected = np.concatenate([each["media"][key] for each in alone if key in each["media"]])
            assert torch.equal(batch.inputs[key], torch.from_numpy(expected)), key
    assert sorted(seen) == list(range(20))
