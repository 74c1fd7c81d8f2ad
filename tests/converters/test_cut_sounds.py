"""Sounds that are longer than the processor reads are cut, and counted wherever lengths are."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from lmms_stream.converters.convert import Progress, convert
from lmms_stream.converters.stored.merge import merge_datasets
from lmms_stream.mds.lengths import lengths_names
from lmms_stream.mds.measuring import index_dataset
from lmms_stream.processors.base import processor_fingerprint
from lmms_stream.processors.multimodal import MultimodalProcessor

from ..conftest import run_cli
from ..processors.tiny_sound import SECONDS, clip, save_sound_processor

SAID = "2 sounds are longer than the processor reads: it leaves out what comes later"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A processor, and rows with five sounds, two of which are longer than it reads."""
    folder = tmp_path_factory.mktemp("sounds")
    save_sound_processor(folder / "processor", "qwen2_audio")
    lengths = [8000, SECONDS * 16000, SECONDS * 16000 + 1, 4000, 2 * SECONDS * 16000]
    rows = [
        {"question": "What?", "answer": "That.", "audio": base64.b64encode(clip(each)).decode()} for each in lengths
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def num_cut(dataset: Path, processor: MultimodalProcessor) -> int:
    _, description = lengths_names(processor_fingerprint(processor))
    found: int = json.loads((dataset / description).read_text()).get("num_cut", 0)
    return found


def test_a_conversion_an_index_and_a_merge_count_them(folder: Path) -> None:
    processor = MultimodalProcessor.from_pretrained(str(folder / "processor"))
    for name in ("a", "b"):
        said: list[str] = []
        out = folder / "all" / name
        convert(
            [folder / "rows.jsonl"], str(out), processor=processor, num_workers=1, progress=Progress(say=said.append)
        )
        assert SAID in said
        assert num_cut(out, processor) == 2
    merge_datasets(str(folder / "all"), [str(folder / "all" / name) for name in ("a", "b")])
    assert num_cut(folder / "all", processor) == 4
    shorter = MultimodalProcessor.from_pretrained(str(folder / "processor"), audio_max_length=0.3)
    assert index_dataset(str(folder / "all"), shorter, num_workers=1).num_cut == 8
    assert num_cut(folder / "all", shorter) == 8


def test_commands_tell_of_them(folder: Path) -> None:
    out, processor = str(folder / "told"), ("--processor", "audio", "--tokenizer", str(folder / "processor"))
    assert run_cli("convert", str(folder / "rows.jsonl"), out).returncode == 0
    told = run_cli("index", out, *processor)
    assert told.returncode == 0, told.stderr
    assert SAID in told.stdout
    plan = run_cli("plan", out, *processor, "--packing-length", "512", "--json")
    assert plan.returncode == 0, plan.stderr
    assert json.loads(plan.stdout)["kinds"][0]["num_cut"] == 2
