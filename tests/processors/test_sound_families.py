"""Families that read sound: what is measured is what is made, and both are what transformers' own processors make."""

from __future__ import annotations

import importlib.util
import json
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from lmms_stream.errors import ConfigError, DataError
from lmms_stream.processors import ProcessorConfig
from lmms_stream.processors.base import Measured
from lmms_stream.processors.multimodal import MultimodalProcessor
from lmms_stream.versions.transformers import CUTS_SOUNDS_OF_QWEN3_OMNI
from numpy.typing import NDArray

from tests.processors.tiny_sound import SECONDS, SOUND_FAMILIES, clip, save_sound_processor, sounding_film
from tests.processors.tiny_vlm import picture, stored
from tests.rounds import rounds

OMNIS = SOUND_FAMILIES[1:]


class Made:
    """transformers' processor of a family, and the folder that it is saved in."""

    def __init__(self, family: str, folder: Path):
        self.theirs: Any = save_sound_processor(folder, family)
        self.folder = folder

    def ours(self, **settings: Any) -> MultimodalProcessor:
        return MultimodalProcessor.from_pretrained(str(self.folder), **settings)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    return {family: Made(family, tmp_path_factory.mktemp(family)) for family in SOUND_FAMILIES}


def wave(data: bytes) -> NDArray[np.float32]:
    found: NDArray[np.float32] = soundfile.read(BytesIO(data), dtype="float32")[0]
    return found


def theirs_of(made: Made, turns: list[tuple[str, list[Any]]], **options: Any) -> dict[str, NDArray[Any]]:
    """What transformers' processor makes of a conversation with sounds and images, tensors as NumPy's."""
    from PIL import Image

    messages = [
        {
            "role": role,
            "content": [{"type": "text", "text": p} if isinstance(p, str) else {"type": p[0]} for p in parts],
        }
        for role, parts in turns
    ]
    text = made.theirs.tokenizer.apply_chat_template(messages, tokenize=False, chat_template=made.theirs.chat_template)
    parts = [part for _, each in turns for part in each if not isinstance(part, str)]
    sounds = [wave(data) for kind, data in parts if kind == "audio"]
    images = [Image.open(BytesIO(data)).convert("RGB") for kind, data in parts if kind == "image"]
    given = {**({"audio": sounds} if sounds else {}), **({"images": images} if images else {}), **options}
    if sounds:
        given["sampling_rate"] = 16000
    found = made.theirs(text=[text], **given)
    return {name: np.asarray(value) for name, value in found.items()}


@pytest.mark.parametrize("family", SOUND_FAMILIES)
def test_what_is_measured_of_sounds_is_made_and_is_what_transformers_makes(family: str, made: dict[str, Made]) -> None:
    ours = made[family].ours()
    rng = np.random.default_rng(len(family))
    for number in range(rounds(5, 300)):
        # Qwen3-Omni's own counts depend on the other clips of a call, so it is asked for one at a time.
        num_clips = 1 if family == "qwen3_omni" else int(rng.integers(1, 4))
        lengths = rng.integers(1000, (SECONDS + 1) * 16000, num_clips)
        clips = [clip(int(length), seed=number) for length in lengths]
        turns: list[tuple[str, list[Any]]] = [
            ("user", [part for each in clips for part in (("audio", each), "what?")]),
            ("assistant", ["a tone"]),
        ]
        sample = stored(*turns)
        processed, expected = ours.process(sample), theirs_of(made[family], turns)
        assert processed["input_ids"].tolist() == expected["input_ids"][0].tolist()
        (measured,) = ours.measure_media([sample])
        assert isinstance(measured, Measured)
        assert measured.tokens == ours.measure(sample) == len(processed["input_ids"])
        assert measured.audio_tokens == int((processed["input_ids"] == ours.family.audio_token_id).sum())  # type: ignore[attr-defined]
        features, mask = expected["input_features"], expected["feature_attention_mask"]
        media = processed["media"]
        if family == "qwen2_audio":
            assert measured.patches == mask.size
            np.testing.assert_array_equal(media["feature_attention_mask"], mask)
            np.testing.assert_allclose(media["input_features"], features, rtol=0, atol=1e-5)
        else:
            frames = np.concatenate([each.T[on.astype(bool)] for each, on in zip(features, mask, strict=True)])
            assert measured.patches == len(media["audio_frames"]) == media["audio_lengths"].sum()
            assert media["audio_lengths"].tolist() == mask.sum(axis=1).tolist()
            np.testing.assert_allclose(media["audio_frames"], frames, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", SOUND_FAMILIES)
def test_clips_are_cut_where_the_family_or_the_setting_cuts_them(family: str, made: dict[str, Made]) -> None:
    whole, longer = (stored(("user", [("audio", clip(n))]), ("assistant", "x")) for n in (SECONDS * 16000, 100000))
    ours, cut = made[family].ours(), made[family].ours(audio_max_length=0.5)
    cuts = family != "qwen3_omni" or CUTS_SOUNDS_OF_QWEN3_OMNI
    assert ours.measure(longer) == len(ours.process(longer)["input_ids"])
    assert (ours.measure(longer) == ours.measure(whole)) == cuts
    half = stored(("user", [("audio", clip(8000))]), ("assistant", "x"))
    assert cut.measure(longer) == ours.measure(half) < ours.measure(whole)
    assert cut.description != ours.description
    assert [each.num_cut for each in ours.measure_media([whole, longer]) if isinstance(each, Measured)] == [0, cuts]
    assert cut.process(longer)["input_ids"].tolist() == ours.process(half)["input_ids"].tolist()


@pytest.mark.parametrize("family", SOUND_FAMILIES)
def test_sounds_of_other_rates_and_channels_are_measured_as_they_are_made(family: str, made: dict[str, Made]) -> None:
    ours = made[family].ours()
    rng = np.random.default_rng(3)
    for rate in (8000, 22050, 44100, 48000):
        for format in ("WAV", "FLAC", "OGG"):
            data = clip(int(rng.integers(4000, 90000)), rate=rate, channels=2, format=format)
            sample = stored(("user", [("audio", data), "?"]), ("assistant", "x"))
            assert ours.measure(sample) == len(ours.process(sample)["input_ids"])


@pytest.mark.parametrize("family", SOUND_FAMILIES)
def test_sounds_that_become_no_token_are_refused(family: str, made: dict[str, Made]) -> None:
    with pytest.raises(DataError, match=r"a sound of 100 samples at 16000 Hz .* lengthen or remove it"):
        made[family].ours().measure(stored(("user", [("audio", clip(100))]), ("assistant", "x")))


@pytest.mark.parametrize("family", SOUND_FAMILIES)
def test_sounds_are_seen_as_waveforms(family: str, made: dict[str, Made]) -> None:
    ours = made[family].ours()
    sample = stored(("user", ["a", ("audio", clip(9000)), "b", ("audio", clip(20000))]), ("assistant", "x"))
    ids = ours.process(sample)["input_ids"]
    for seen in ours.see_media(sample):
        assert (seen.kind, seen.pixels.shape) == ("audio", (1, 96, 512, 3))
        ((start, stop),) = seen.spans
        assert set(ids[start:stop].tolist()) == {ours.family.audio_token_id}  # type: ignore[attr-defined]


def test_settings_of_sound_are_refused_where_they_mean_nothing(tmp_path: Path, made: dict[str, Made]) -> None:
    from tests.processors.tiny_vlm import save_processor

    save_processor(tmp_path)
    with pytest.raises(
        ConfigError, match=r"audio_max_length is for processors of audio, and .* reads image and video: l"
    ):
        MultimodalProcessor.from_pretrained(str(tmp_path), audio_max_length=3)
    with pytest.raises(
        ConfigError, match=r"use_audio_in_video is for processors of audio and video, and .* reads audio"
    ):
        made["qwen2_audio"].ours(use_audio_in_video=True)
    with pytest.raises(ConfigError, match="audio_max_length must be seconds of a sound, above 0, got -1"):
        made["qwen2_audio"].ours(audio_max_length=-1)
    for name in ("vision", "audio", "omni"):
        built = ProcessorConfig(type=name, path=str(made["qwen2_audio"].folder), audio_max_length=1).build()
        assert built.description == made["qwen2_audio"].ours(audio_max_length=1.0).description


@pytest.mark.parametrize("family", OMNIS)
def test_the_sound_of_videos_stands_among_their_frames_as_transformers_writes_it(
    family: str, made: dict[str, Made]
) -> None:
    ours = made[family].ours(use_audio_in_video=True, video_max_pixels=16 * 1024)
    theirs, rng = made[family].theirs, np.random.default_rng(4)
    for num_frames, fps, samples in ((20, 5, 64000), (60, 10, 30000), (7, 11, 9000), (30, 3, 100000), (12, 4, 0)):
        video = sounding_film(num_frames=num_frames, fps=fps, samples=samples)
        alone = ("audio", clip(int(rng.integers(4000, 30000))))
        sample = stored(("user", [alone, "a", ("video", video), "b"]), ("assistant", "x"))
        processed = ours.process(sample)
        (measured,) = ours.measure_media([sample])
        assert isinstance(measured, Measured)
        media = processed["media"]
        assert ours.measure(sample) == measured.tokens == len(processed["input_ids"])
        assert measured.patches == len(media["pixel_values_videos"]) + len(media["audio_frames"])
        assert len(media["audio_lengths"]) == (2 if samples else 1)
        if not samples:
            continue
        layouts = ours._tokenized(sample).filled.layouts
        counts = [ours.family.num_tokens(int(frames)) for frames in media["audio_lengths"]]  # type: ignore[attr-defined]
        seconds = [ours.family.seconds_of_pair(layouts[1])]  # type: ignore[attr-defined]
        rate = ours.family.positions_per_second  # type: ignore[attr-defined]
        messages = [
            {"role": "user", "content": [
                {"type": "audio"}, {"type": "text", "text": "a"}, {"type": "video"}, {"type": "text", "text": "b"},
            ]},
            {"role": "assistant", "content": [{"type": "text", "text": "x"}]},
        ]  # fmt: skip
        text = theirs.tokenizer.apply_chat_template(messages, tokenize=False, chat_template=theirs.chat_template)
        how = {"position_id_per_seconds": rate, "seconds_per_chunk": 2.0}
        if hasattr(theirs, "replace_video_with_audio_token"):  # since 5.18
            of_video = {"video_grid_thw": media["video_grid_thw"], "video_second_per_grid": seconds}
            heard = theirs.replace_video_with_audio_token(of_video, 0, {"num_audio_tokens": counts}, 1, **how)
            expanded = text.replace(theirs.audio_token, theirs.audio_token * counts[0])
            expanded = expanded.replace(theirs.video_token, heard)
        else:
            (expanded,) = theirs.replace_multimodal_special_tokens(
                [text], iter(counts), iter([]), iter(media["video_grid_thw"]), video_second_per_grid=iter(seconds),
                use_audio_in_video=True, **how,
            )  # fmt: skip
        assert processed["input_ids"].tolist() == theirs.tokenizer(expanded)["input_ids"]


@pytest.mark.parametrize("family", OMNIS)
def test_the_sound_of_a_part_of_a_video_is_that_of_the_part(family: str, made: dict[str, Made]) -> None:
    ours = made[family].ours(use_audio_in_video=True, video_max_pixels=16 * 1024)
    data = sounding_film(num_frames=40, fps=10, samples=24000)
    sample = stored(("user", [("video", data)]), ("assistant", "x"))
    messages = json.loads(sample["messages"])

    def clips_of(start: float, end: float) -> list[int]:
        messages[0]["content"][0] |= {"video_start": start, "video_end": end}
        cut = {**sample, "messages": json.dumps(messages)}
        processed = ours.process(cut)
        assert ours.measure(cut) == len(processed["input_ids"])
        return processed["media"].get("audio_lengths", np.zeros(0)).tolist()  # type: ignore[no-any-return]

    assert clips_of(0.5, 1.0) == [50]
    assert clips_of(3.0, 4.0) == []  # its sound ends early


SOUNDS_OF_THE_TEST = '''
"""Images as strips of 10 pixels, and sounds as a token for each tenth of a second; by docs/families.md alone."""
from dataclasses import dataclass

import numpy as np
from lmms_stream.errors import DataError
from lmms_stream.processors.families.family import Layout
from lmms_stream.processors.media.sound import read_sound, resampled_length

RATE = 8000

@dataclass(frozen=True)
class Heard:
    model_types = ("heard",)
    processor_classes = ("HeardProcessor",)
    num_axes = 0
    towers = {"image": "visual", "audio": "ear"}
    token_inputs = ()
    attentions = ("sdpa",)
    placeholders = {"image": "<|IMAGE|>", "audio": "<|AUDIO|>"}
    surroundings = ("<|vision_bos|>", "<|vision_eos|>")
    media_tokens = ("<|IMAGE|>", "<|AUDIO|>")

    @staticmethod
    def of(files, settings, token_ids):
        return Heard()

    @property
    def description(self):
        return {"family": "heard"}

    def layout(self, kind, facts, interval=None):
        if kind == "image":
            count = -(-facts.width // 10)
        else:
            count = resampled_length(facts.samples, facts.rate, RATE) // (RATE // 10)
            if not count:
                raise DataError(f"a sound of {facts.samples} samples is too short: remove it")
        return Layout(kind, (count,), count, "", facts)

    def frames(self, layout):
        return ()

    def tensors(self, layouts, media, memory):
        found = {"image": [], "audio": []}
        for layout, data in zip(layouts, media):
            if layout.kind == "audio":
                samples = read_sound(data, layout.shape, rate=RATE, num_samples=layout.patches * (RATE // 10))
                found["audio"].append(samples.reshape(layout.patches, -1))
            else:
                found["image"].append(np.zeros((layout.patches, 3), np.float32))
        return {name: np.concatenate(rows) for name, rows in found.items() if rows}
'''


def test_a_family_of_images_and_sounds_lives_in_a_file_outside_of_the_house(
    made: dict[str, Made], tmp_path: Path
) -> None:
    (tmp_path / "heard.py").write_text(SOUNDS_OF_THE_TEST)
    spec = importlib.util.spec_from_file_location("heard_of_a_test", tmp_path / "heard.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["heard_of_a_test"] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        folder = str(made["qwen2_5_omni"].folder)
        processor = MultimodalProcessor.from_pretrained(folder, family=module.Heard)
        sample = stored(
            ("user", [("image", picture(55, 20)), "and", ("audio", clip(22050, rate=22050))]), ("assistant", "c")
        )
        processed = processor.process(sample)
        assert {name: each.shape for name, each in processed["media"].items()} == {"image": (6, 3), "audio": (10, 800)}
        assert processor.measure_media([sample]) == [
            Measured(len(processed["input_ids"]), 16, image_tokens=6, audio_tokens=10)
        ]
        assert processor.measure({"messages": sample["messages"]}) == len(processed["input_ids"])
        film = ("video", sounding_film(num_frames=4, fps=4, samples=0))
        for parts, message in (
            ([film], "a message holds media of type video, and .* reads image and audio"),
            ([("audio", clip(9))], "a sound of 9 samples is too short: remove it"),
        ):
            with pytest.raises(DataError, match=message):
                processor.measure(stored(("user", parts), ("assistant", "x")))
    finally:
        sys.modules.pop("heard_of_a_test")
