"""What `lmms-stream demo --kind vision` makes, and the whole of it in long rounds."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import transformers
from lmms_stream.converters.convert import convert
from lmms_stream.errors import DataError
from lmms_stream.mds.core import PackedDataset
from lmms_stream.mds.streams import StreamConfig
from lmms_stream.processors.multimodal import MultimodalProcessor
from lmms_stream.tools.demo.vision import model_fields, save_processor, write_charts, write_pictures, write_videos

from ..conftest import last_words, run_command
from ..rounds import LONG


def test_charts_pictures_and_videos_become_samples_of_which_the_answers_are_learnt(tmp_path: Path) -> None:
    charts = write_charts(tmp_path / "charts", num_charts=6)
    pictures, num_pictures = write_pictures(tmp_path / "pictures")
    videos = write_videos(tmp_path / "videos", num_videos=3)
    sources = [charts, pictures, videos]
    folder = save_processor(tmp_path / "processor", texts=[path.read_text() for path in sources])
    processor = MultimodalProcessor.from_pretrained(str(folder), image_max_pixels=64 * 28 * 28)
    fields = model_fields(folder, positions=512)
    processor.family.check_model(transformers.AutoConfig.for_model(**fields).to_dict())
    convert(sources, str(tmp_path / "data"), processor=processor)
    dataset = PackedDataset([StreamConfig(local=tmp_path / "data")], processor=processor)
    lengths = dataset.length_index().lengths
    rows = [json.loads(line) for path in sources for line in path.read_text().splitlines()]
    assert len(lengths) == len(rows) == 6 + num_pictures + 3
    kinds = []
    for sample, length, row in zip(dataset.read(range(len(rows))), lengths, rows, strict=True):
        made = processor.process(sample)
        assert len(made["input_ids"]) == length
        learnt = made["input_ids"][made["labels"] >= 0]
        assert processor.tokenizer.decode(learnt.tolist()) == row["messages"][1]["content"] + "<|im_end|>"
        kinds.append(tuple(sorted(made["media"])))
    assert set(kinds) == {("image_grid_thw", "pixel_values"), ("pixel_values_videos", "video_grid_thw")}
    assert kinds.count(("pixel_values_videos", "video_grid_thw")) == 3


def test_a_machine_without_pictures_is_told_what_ships_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmms_stream.tools.demo.vision.PACKAGES", ("no_such_package",))
    with pytest.raises(DataError, match="none of no_such_package has pictures on this machine: pip install"):
        write_pictures(tmp_path)


if LONG:  # it takes two minutes of two cores

    @pytest.mark.timeout(900)
    def test_the_demo_with_images_and_videos_ends_with_equal_runs(tmp_path: Path) -> None:
        command = (sys.executable, "-m", "lmms_stream", "demo", "--kind", "vision", "--output", str(tmp_path / "demo"))
        result = run_command(*command, timeout_s=840)
        assert result.returncode == 0, last_words(result.stdout) + last_words(result.stderr)
        assert "EQUAL: sample ids and losses of steps" in result.stdout
        assert "DIFFERENT" not in result.stdout
