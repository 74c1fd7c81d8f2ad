"""The quick start of LMMS Engine's guide trains on one rank and on two, on chats and on chats about pictures."""

from __future__ import annotations

from pathlib import Path

import pytest
from lmms_stream.train.report.train_log import read_log
from transformers import LlamaConfig

from ..conftest import last_words
from ..jobs.launcher import run_job
from ..processors.tiny_vlm import save_processor, tiny_config
from ..train.habits.rows import SIZES
from .chats import write_jsonl, write_pictures


def losses_of_quick_starts(folder: Path, *arguments: str) -> list[list[float]]:
    """Of one rank with four packs a step, and of two with two each."""
    found = []
    for ranks, packs in ((1, "4"), (2, "2")):
        output = folder / str(ranks)
        done = run_job(ranks, "tests.datasets.quick_start", *arguments, str(output), packs, timeout_s=200)
        assert done.returncode == 0, last_words(done.stderr)
        assert done.stderr.count("converting the sources") == (ranks == 1), "the second run finds what the first wrote"
        found.append([record["loss"] for record in read_log(output)])
    return found


def test_the_quick_start_trains_on_chats(tokenizer: Path, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "chats.jsonl")
    LlamaConfig(**SIZES).save_pretrained(tmp_path / "model")
    one, two = losses_of_quick_starts(tmp_path, str(path), "jsonl", str(tokenizer), "qwen2", str(tmp_path / "model"))
    assert len(one) >= 4
    assert one[-1] < one[0]
    assert one == pytest.approx(two, rel=1e-4)


def test_the_quick_start_trains_on_pictures(tmp_path: Path) -> None:
    path, processor = write_pictures(tmp_path / "pictures"), tmp_path / "processor"
    save_processor(processor, "qwen2_5_vl")
    tiny_config("qwen2_5_vl", processor).save_pretrained(tmp_path / "model")
    said = (str(path), "parquet", str(processor), "qwen2_5_vl", str(tmp_path / "model"))
    one, two = losses_of_quick_starts(tmp_path, *said)
    assert one[-1] < one[0]
    assert one == pytest.approx(two, rel=1e-3)
