"""What `lmms-stream inspect` shows of the media that a model sees."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import numpy as np
import pytest
from lmms_stream.processors.multimodal import MultimodalProcessor
from lmms_stream.tools.inspect.page import render_page
from lmms_stream.tools.inspect.summary import Inspection, inspect_dataset
from PIL import Image
from streaming import MDSWriter

from ..processors.tiny_sound import clip, save_sound_processor, sounding_film
from ..processors.tiny_vlm import film, picture, save_processor, stored


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def inspection(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Inspection:
    """A sample with a picture that is turned, and a video."""
    root = tmp_path_factory.mktemp("seen")
    save_processor(root / "processor", request.param)
    sample = stored(
        (
            "user",
            [("image", picture(90, 60, format="JPEG", orientation=6)), "and", ("video", film(64, 48, num_frames=20))],
        ),
        ("assistant", "Waves, twice."),
    )
    with MDSWriter(columns={"messages": "str", "media": "bytes"}, out=str(root / "data")) as writer:
        writer.write(sample)
    processor = MultimodalProcessor.from_pretrained(str(root / "processor"), fps=4)
    return inspect_dataset(str(root / "data"), processor=processor)


def test_media_tokens_are_shown_as_what_the_model_sees(inspection: Inspection) -> None:
    (sample,) = inspection.samples
    assert sample.note == ""
    assert sample.tokens is not None
    image, video = sample.seen
    assert re.fullmatch(r"image of \d+ x \d+, \d+ tokens", image.label)
    assert re.fullmatch(r"video of 8 frames of \d+ x \d+, \d+ tokens: frames 0, \d+, .*, 1\d", video.label)
    with Image.open(io.BytesIO(image.picture)) as shown:
        assert shown.height > shown.width  # it lies on its side in the file
        assert image.label.startswith(f"image of {shown.width} x {shown.height},")
        assert np.asarray(shown).std() > 10
    for number, medium in enumerate(sample.seen):
        runs = [run for run in sample.tokens.runs if run.seen == number]
        assert len(runs) == len(medium.spans)
        assert not any(run.trained for run in runs)
    trained = "".join(run.text for run in sample.tokens.runs if run.trained)
    assert trained == "Waves, twice.<|im_end|>"
    others = "".join(run.text for run in sample.tokens.runs if run.seen is None)
    assert "_pad|>" not in others
    assert ("seconds>" in others) == (len(video.spans) > 1)


def test_sounds_are_shown_as_waveforms_with_what_is_read_of_them(tmp_path: Path) -> None:
    save_sound_processor(tmp_path / "processor", "qwen2_5_omni")
    processor = MultimodalProcessor.from_pretrained(str(tmp_path / "processor"), use_audio_in_video=True)
    clips = [("audio", clip(66150, rate=22050, channels=2)), ("audio", clip(80000))]
    film = ("video", sounding_film(num_frames=20, fps=5, samples=40000))
    with MDSWriter(columns={"messages": "str", "media": "bytes"}, out=str(tmp_path / "data")) as writer:
        writer.write(stored(("user", [*clips, film]), ("assistant", "Tones.")))
    inspection = inspect_dataset(str(tmp_path / "data"), processor=processor)
    (sample,) = inspection.samples
    short, long, video = sample.seen
    assert short.label == "audio of 3.00 s at 16,000 Hz (from 22,050 Hz) in 300 mel frames, 75 tokens"
    assert long.label == "audio of 3.00 s of 5.00 s, whose rest is cut off, at 16,000 Hz in 300 mel frames, 75 tokens"
    assert re.fullmatch(
        r"video of 8 frames of \d+ x \d+, \d+ tokens: frames 0, .*; sound: 2\.56 s at 16,000 Hz in 256 mel frames",
        video.label,
    )
    page = render_page(inspection)
    for medium in sample.seen:
        assert medium.label in page
        assert base64.b64encode(medium.picture).decode() in page
    with Image.open(io.BytesIO(long.picture)) as shown:
        assert shown.size == (512, 96)
        assert np.asarray(shown).std() > 10


def test_the_page_has_a_picture_of_each_medium_where_its_tokens_are(inspection: Inspection) -> None:
    (sample,) = inspection.samples
    page = render_page(inspection)
    tokens = page[page.index('<div class="tokens">') :]
    pictures = [base64.b64decode(each) for each in re.findall(r'src="data:image/png;base64,([^"]+)"', tokens)]
    assert pictures == [medium.picture for medium in sample.seen]
    assert tokens.index("image of ") < tokens.index("and&lt;") < tokens.index("video of ")
