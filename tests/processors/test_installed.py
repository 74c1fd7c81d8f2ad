"""Media are read as the installed transformers reads them, also where that is another way than ours."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import transformers
from lmms_stream.errors import ConfigError, DataError
from lmms_stream.processors.agreement import _tone
from lmms_stream.processors.base import Measured, processor_fingerprint
from lmms_stream.processors.multimodal import MultimodalProcessor
from lmms_stream.versions.transformers import by_torchvision
from transformers import (
    AutoImageProcessor,
    AutoProcessor,
    AutoVideoProcessor,
    InternVLVideoProcessor,
    LlavaOnevisionVideoProcessor,
    PretrainedConfig,
    Qwen3VLVideoProcessor,
    WhisperFeatureExtractor,
)
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

from tests.processors.test_multimodal import theirs
from tests.processors.tile_vlm import TINY, save_tile_processor
from tests.processors.tiny_sound import SOUND_FAMILIES, clip, save_sound_processor, sounding_film
from tests.processors.tiny_vlm import FAMILIES, change_settings, film, picture, save_processor, stored

OF_OURS = [name for name, tiny in TINY.items() if not tiny.is_asked]


class ConfigOfTheTest(PretrainedConfig):
    model_type = "later"


def later(name: str, **settings: Any) -> type:
    """The image processor of a name as a later transformers may have it: it has these settings, whatever it is told."""
    kind = by_torchvision(name)

    def begin(self: Any, **said: Any) -> None:
        kind.__init__(self, **{**said, **settings})

    return type("LaterImageProcessor", (kind,), {"__init__": begin})


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of each test's own; what a test registers is forgotten."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    yield folder / "lmms_stream" / "processors"
    for auto in (AutoImageProcessor, AutoVideoProcessor):
        forget(auto)


def forget(auto: Any) -> None:
    module = __import__(auto.__module__, fromlist=["x"])
    for name in ("IMAGE_PROCESSOR_MAPPING", "VIDEO_PROCESSOR_MAPPING"):
        if hasattr(module, name):
            getattr(module, name)._extra_content.pop(ConfigOfTheTest, None)


def install(folder: Path, made: type) -> None:
    """Have a folder name an image processor that is registered as users register theirs."""
    AutoImageProcessor.register(ConfigOfTheTest, slow_image_processor_class=None, fast_image_processor_class=made)
    change_settings(folder, "image", image_processor_type=made.__name__)


def save(folder: Path, family: str) -> None:
    if family in TINY:
        save_tile_processor(folder, family)
    elif family in SOUND_FAMILIES:
        save_sound_processor(folder, family)
    else:
        save_processor(folder, family)


@pytest.mark.parametrize("family", [*FAMILIES, *OF_OURS, *SOUND_FAMILIES])
def test_the_installed_transformers_reads_media_as_they_are_read_here(
    family: str, tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, family)
    with caplog.at_level(logging.WARNING, logger="lmms_stream"):
        built = MultimodalProcessor.from_pretrained(str(tmp_path))
    assert not caplog.records
    assert "read by" not in built.description["media"]
    assert [json.loads(file.read_text())["result"] for file in cache.iterdir()] == [{}]


LATER: dict[str, tuple[str, dict[str, Any]]] = {  # families -> what a later version reads otherwise
    "qwen2_5_vl": ("Qwen2VLImageProcessor", {"size": {"shortest_edge": 4 * 28**2, "longest_edge": 9 * 28**2}}),
    "internvl": ("GotOcr2ImageProcessor", {"max_patches": 2}),
    "gemma3": ("Gemma3ImageProcessor", {"image_mean": [0.4, 0.5, 0.6]}),
    "llava_onevision": ("LlavaOnevisionImageProcessor", {"image_grid_pinpoints": [[28, 56], [56, 28]]}),
}


@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept context")  # transformers sums tensors by NumPy
@pytest.mark.parametrize("family", LATER)
def test_images_are_read_by_the_installed_processor_where_it_reads_them_otherwise(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, family)
    before = MultimodalProcessor.from_pretrained(str(tmp_path))
    install(tmp_path, later(LATER[family][0], **LATER[family][1]))
    with caplog.at_level(logging.WARNING, logger="lmms_stream"):
        built = MultimodalProcessor.from_pretrained(str(tmp_path))
    (line,) = caplog.messages
    assert f"transformers {transformers.__version__} makes something else than lmms_stream" in line
    assert "they are read by it, which is slower" in line
    sample = stored(("user", ["What", ("image", picture(190, 60)), "is it?"]), ("assistant", "a"))
    again = pickle.loads(pickle.dumps(built))
    made, expected = again.process(sample), theirs(tmp_path, built, sample)
    assert np.array_equal(made["input_ids"], expected["input_ids"][0])
    for name, values in made["media"].items():
        assert np.array_equal(values.ravel(), expected[name].ravel()), name
        assert values.ndim == before.process(sample)["media"][name].ndim
    (measured,) = built.measure_media([{"messages": sample["messages"]}])
    assert isinstance(measured, Measured)
    assert measured.tokens == len(made["input_ids"])
    assert measured.patches == len(made["media"]["pixel_values"])
    assert built.description["media"]["read by"] == {"image": f"transformers {transformers.__version__}"}
    assert processor_fingerprint(built) != processor_fingerprint(before)


def test_limits_of_the_user_are_kept_where_images_are_read_by_the_installed_processor(tmp_path: Path) -> None:
    save(tmp_path, "qwen2_5_vl")
    install(tmp_path, later("Qwen2VLImageProcessor", image_mean=[0.2] * 3))
    sample = stored(("user", [("image", picture(200, 90)), ("image", picture(90, 90))]), ("assistant", "a"))
    chosen: list[dict[str, Any]] = [{}, {"image_max_pixels": 6 * 28**2}, {"image_min_pixels": 50 * 28**2}]
    for limits in chosen:
        plain = MultimodalProcessor.from_pretrained(str(tmp_path), **limits)
        by_ours = MultimodalProcessor(plain.tokenizer, plain.family.ours)  # type: ignore[attr-defined]
        made, ours = plain.process(sample), by_ours.process(sample)
        assert made.keys() == ours.keys()
        for name in ("input_ids", "labels", "position_ids"):
            assert np.array_equal(made[name], ours[name])
        assert np.array_equal(made["media"]["image_grid_thw"], ours["media"]["image_grid_thw"])
        assert made["media"]["pixel_values"].mean() > ours["media"]["pixel_values"].mean() + 0.2


def later_of_videos(kind: type, **settings: Any) -> type:
    def begin(self: Any, **said: Any) -> None:
        kind.__init__(self, **{**said, **settings})  # type: ignore[misc]

    return type("LaterVideoProcessor", (kind,), {"__init__": begin})


LATER_VIDEOS: dict[str, tuple[type, dict[str, Any]]] = {
    "qwen2_vl": (Qwen2VLVideoProcessor, {"size": {"shortest_edge": 28**2, "longest_edge": 2 * 28**2}}),
    "qwen3_vl": (Qwen3VLVideoProcessor, {"size": {"shortest_edge": 32**2, "longest_edge": 16 * 32**2}}),
    "internvl": (InternVLVideoProcessor, {"image_mean": [0.1, 0.2, 0.3]}),
    "llava_onevision": (LlavaOnevisionVideoProcessor, {"image_mean": [0.1, 0.2, 0.3]}),
}


@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept context")
@pytest.mark.parametrize("family", LATER_VIDEOS)
def test_videos_are_read_by_the_installed_processor_where_it_reads_them_otherwise(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, family)
    kind, settings = LATER_VIDEOS[family]
    AutoVideoProcessor.register(ConfigOfTheTest, later_of_videos(kind, **settings))
    change_settings(tmp_path, "video", video_processor_type="LaterVideoProcessor")
    built = MultimodalProcessor.from_pretrained(str(tmp_path))
    assert [line.split(" of ")[0] for line in caplog.messages] == ["videos"]
    image, video = ("image", picture(90, 60)), ("video", film(160, 120, num_frames=9))
    sample = stored(("user", ["What", video, "is", image, "it?"]), ("assistant", "a"))
    made, expected = built.process(sample), theirs(tmp_path, built, sample)
    assert np.array_equal(made["input_ids"], expected["input_ids"][0])
    by_ours = MultimodalProcessor(built.tokenizer, built.family.ours).process(sample)  # type: ignore[attr-defined]
    assert made["media"].keys() == by_ours["media"].keys()
    for name, values in made["media"].items():
        assert values.ndim == by_ours["media"][name].ndim
        if "pixel_values_videos" in expected:  # elsewhere both kinds are in one array
            wanted = expected if "video" in name else by_ours["media"]
            assert np.array_equal(values.ravel(), wanted[name].ravel()), name
    (measured,) = built.measure_media([{"messages": sample["messages"]}])
    assert isinstance(measured, Measured)
    assert measured.tokens == len(made["input_ids"])
    if family.startswith("qwen"):
        small = MultimodalProcessor.from_pretrained(str(tmp_path), video_max_pixels=6 * 32**2)
        assert len(small.process(sample)["input_ids"]) == small.measure(sample)
        large = MultimodalProcessor.from_pretrained(str(tmp_path), video_max_pixels=30 * 32**2)
        assert small.measure(sample) < large.measure(sample) != built.measure(sample)
    if family == "qwen3_vl":
        with pytest.raises(DataError, match=r"transformers [0-9.]+ cannot read its video \(.*\): remove it"):
            built.measure(stored(("user", [("video", film(160, 120, num_frames=1))]), ("assistant", "a")))


@pytest.mark.skipif(not hasattr(Qwen3VLVideoProcessor, "cap_pixels_per_frame"), reason="a setting of later versions")
def test_a_setting_that_only_the_installed_processor_knows_is_followed(tmp_path: Path) -> None:
    save(tmp_path, "qwen3_vl")
    size = {"shortest_edge": 4 * 32**2, "longest_edge": 8192 * 32**2}
    change_settings(tmp_path, "video", cap_pixels_per_frame=True, size=size)
    built = MultimodalProcessor.from_pretrained(str(tmp_path))
    assert "read by" in built.description["media"]
    sample = stored(("user", ["What", ("video", film(1280, 720, num_frames=4))]), ("assistant", "a"))
    made = built.process(sample)
    assert np.array_equal(made["input_ids"], theirs(tmp_path, built, sample)["input_ids"][0])
    by_ours = MultimodalProcessor(built.tokenizer, built.family.ours)  # type: ignore[attr-defined]
    assert len(made["input_ids"]) == built.measure(sample) < by_ours.measure(sample)


def test_several_images_that_are_read_otherwise_because_they_are_several_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "llava_onevision")
    install(tmp_path, later("LlavaOnevisionImageProcessor", image_mean=[0.1] * 3))
    built = MultimodalProcessor.from_pretrained(str(tmp_path))
    images = [("image", picture(60, 60)), ("image", picture(90, 60))]
    built.measure(stored(("user", images[:1]), ("assistant", "a")))
    with pytest.raises(ConfigError, match=r"several images of a sample cannot be read as .* install a version"):
        built.measure(stored(("user", images), ("assistant", "a")))


def test_what_was_compared_is_not_compared_again(tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, "internvl")
    install(tmp_path, later("GotOcr2ImageProcessor", max_patches=2))
    first = MultimodalProcessor.from_pretrained(str(tmp_path))
    forget(AutoImageProcessor)  # so that theirs cannot be loaded any more
    assert MultimodalProcessor.from_pretrained(str(tmp_path)).description == first.description
    (kept,) = cache.iterdir()
    kept.write_text("{")  # broken, and so not there
    with caplog.at_level(logging.INFO, logger="lmms_stream"):
        alone = MultimodalProcessor.from_pretrained(str(tmp_path))
    assert "could not be compared" in caplog.text
    assert "read by" not in alone.description["media"]
    assert kept.read_text() == "{"


def test_processors_are_built_where_nothing_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, "internvl")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    MultimodalProcessor.from_pretrained(str(tmp_path))
    assert not caplog.records


@pytest.mark.parametrize("family", SOUND_FAMILIES)
def test_sounds_are_read_by_the_installed_processor_where_it_reads_them_otherwise(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, family)
    before = MultimodalProcessor.from_pretrained(str(tmp_path))
    begin = WhisperFeatureExtractor.__init__
    monkeypatch.setattr(  # as a later transformers may read sounds
        WhisperFeatureExtractor, "__init__", lambda self, **said: begin(self, **{**said, "hop_length": 320})
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "later"))
    built = MultimodalProcessor.from_pretrained(str(tmp_path))
    assert "sounds of Qwen" in caplog.text
    assert "they are read by it, which is slower" in caplog.text
    data = clip(20000)
    sample = stored(("user", [("audio", data), "what?"]), ("assistant", "a"))
    made = built.process(sample)
    whole: Any = AutoProcessor.from_pretrained(tmp_path)
    text = whole.tokenizer.apply_chat_template(json.loads(sample["messages"]), tokenize=False)
    expected = whole(text=[text], audio=[soundfile.read(BytesIO(data), dtype="float32")[0]], sampling_rate=16000)
    assert made["input_ids"].tolist() == np.asarray(expected["input_ids"])[0].tolist()
    assert built.measure({"messages": sample["messages"]}) == len(made["input_ids"]) < before.measure(sample)
    features, mask = (np.asarray(expected[name]) for name in ("input_features", "feature_attention_mask"))
    if family == "qwen2_audio":
        assert np.array_equal(made["media"]["input_features"], features)
    else:
        assert np.array_equal(made["media"]["audio_frames"], features[0].T[mask[0].astype(bool)])
        heard = MultimodalProcessor.from_pretrained(str(tmp_path), use_audio_in_video=True)
        video = ("video", sounding_film(num_frames=8, fps=4, samples=30000))
        with pytest.raises(ConfigError, match=r"videos cannot be read as the processor of .* reads sounds \(one of"):
            heard.measure(stored(("user", [video]), ("assistant", "a")))


def test_sounds_that_are_compared_differ_by_their_seed() -> None:
    assert (_tone(100, 16000, 1) != _tone(100, 16000, 2)).any()
