"""What the families that read tiles make is what transformers' own processors make of the same chats."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lmms_stream.errors import ConfigError, DataError
from lmms_stream.processors.base import IGNORED_LABEL, Measured, processor_fingerprint
from lmms_stream.processors.multimodal import MultimodalProcessor
from PIL import Image

from tests.processors.test_multimodal import learnt_text, loaded, media_of, random_chat
from tests.processors.tile_vlm import TINY, save_tile_processor, tile_config
from tests.processors.tiny_vlm import change_settings, film, picture, stored
from tests.rounds import rounds
from tests.versions import by_pillow

NAMES = list(TINY)
OF_OURS = [name for name, tiny in TINY.items() if not tiny.is_asked]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in NAMES}
    for name, folder in made.items():
        save_tile_processor(folder, name)
    return made


@pytest.fixture(scope="module")
def processors(folders: dict[str, Path]) -> dict[str, MultimodalProcessor]:
    return {name: MultimodalProcessor.from_pretrained(str(folder)) for name, folder in folders.items()}


def theirs(name: str, folder: Path, processor: MultimodalProcessor, sample: dict[str, Any]) -> dict[str, Any]:
    """What transformers' processor makes of a sample, given the frames of videos that ours chooses.

    Its image processor is the one that resizes by Pillow, where there is one.
    """
    whole = loaded(str(folder))
    if (slow := TINY[name].slow) is not None and not TINY[name].is_asked:
        whole.image_processor = slow(folder)
    messages = json.loads(sample["messages"])
    text = whole.apply_chat_template(messages, tokenize=False, chat_template=whole.chat_template)
    images, videos, metadata = media_of(processor, sample)
    given: dict[str, Any] = {"images": [images]} if images else {}
    if videos:
        given |= {"videos": [videos] if name == "smolvlm" else videos, "do_sample_frames": False}
        given |= {"video_metadata": [metadata] if name == "smolvlm" else metadata}
    made = whole(text=[text], **given, return_tensors="pt", **TINY[name].call)
    tensors = {key: value for key, value in made.items() if hasattr(value, "numpy")}
    return {key: (value.float() if value.is_floating_point() else value).numpy() for key, value in tensors.items()}


@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept context")  # transformers sums tensors by NumPy
@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_tensors_are_those_of_transformers_processor(
    name: str, folders: dict[str, Path], processors: dict[str, MultimodalProcessor]
) -> None:
    random = np.random.default_rng(3)
    processor, tiny, num_compared = processors[name], TINY[name], 0
    for number in range(rounds(4, 40)):
        kinds = [["image"], ["video"]][number % 2] if tiny.video else ["image"]
        sample = random_chat(random, kinds, forms=["PNG", "WEBP"])
        if len({len(each.frames) for each in processor.see_media(sample) if each.kind == "video"}) > 1:
            continue  # theirs makes one array of all videos of a chat, and fails where their numbers of frames differ
        num_compared += 1
        ours, expected = processor.process(sample), theirs(name, folders[name], processor, sample)
        assert np.array_equal(ours["input_ids"], expected["input_ids"][0]), number
        # No tile has padding of its own: masks of pixels hold ones alone, which models take where there are none.
        assert all(mask.all() for key, mask in expected.items() if key == "pixel_attention_mask")
        tensors = expected.keys() - {"input_ids", "attention_mask", "token_type_ids", "pixel_attention_mask"}
        assert ours["media"].keys() == tensors, number
        for key, values in ours.get("token_inputs", {}).items():
            assert np.array_equal(values, expected[key][0]), number
        for key in tensors:
            found, wanted = tiny.alike(key, ours["media"][key]), tiny.alike(key, expected[key])
            assert found.shape == wanted.shape, key
            if tiny.is_asked or (kinds == ["image"] and tiny.slow is not None):
                assert np.array_equal(found, wanted), key
                continue
            difference = np.abs(found - wanted)
            # Theirs resamples by torchvision and ours as Pillow: now and then a value differs by one or two of 255.
            assert difference.max() <= 2.01 / 255 / 0.26, key
            assert difference.mean() <= 0.005, key
    assert num_compared >= rounds(3, 25)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_of_media_in_the_text_of_a_message_are_refused(
    name: str, processors: dict[str, MultimodalProcessor]
) -> None:
    processor = processors[name]
    for token in {*processor.family.placeholders.values(), *processor.family.repeated_tokens}:
        sample = stored(("user", [("image", picture(60, 60)), f"a {token}"]), ("assistant", "b"))
        for made in (processor.measure, processor.process):
            with pytest.raises(DataError, match=f"its text has {re.escape(token)}"):
                made(sample)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_measured_is_what_is_processed(name: str, processors: dict[str, MultimodalProcessor]) -> None:
    random = np.random.default_rng(5)
    processor, kinds = processors[name], [*processors[name].family.placeholders]
    for _ in range(rounds(5, 300)):
        sample = random_chat(random, kinds)
        processed = processor.process(sample)
        (measured,) = processor.measure_media([{"messages": sample["messages"]}])
        assert isinstance(measured, Measured)
        assert measured.tokens == processor.measure(sample) == len(processed["input_ids"])
        assert "position_ids" not in processed
        num_placeholders = np.isin(processed["input_ids"], processor._placeholder_ids).sum()
        assert measured.image_tokens + measured.video_tokens == num_placeholders
        pixels = [each for key, each in processed["media"].items() if key.startswith("pixel_values")]
        if TINY[name].is_asked:
            num_patches = sum(each.size for each in pixels) / (3 * 14**2)  # each medium's are cut to a whole number
            assert 0 <= num_patches - measured.patches < max(1, len(json.loads(sample["messages"])) * 4)
        else:
            assert measured.patches == sum(TINY[name].rows(each) for each in pixels)
        learnt = processed["labels"][processed["labels"] != IGNORED_LABEL]
        assert not np.isin(learnt, processor._never_learnt).any()
        assert pickle.loads(pickle.dumps(processor)).measure(sample) == measured.tokens


@pytest.mark.parametrize("name", OF_OURS)
def test_what_a_family_sees_is_the_tiles_that_its_tower_is_given(
    name: str, processors: dict[str, MultimodalProcessor]
) -> None:
    processor = processors[name]
    media = {"image": picture(190, 60), "video": film(64, 48, num_frames=12)}
    kinds = [*processor.family.placeholders]
    sample = stored(("user", [part for kind in kinds for part in ((kind, media[kind]), "!")]), ("assistant", "so"))
    processed, seen = processor.process(sample), processor.see_media(sample)
    assert [each.kind for each in seen] == kinds
    for each in seen:
        assert each.pixels.dtype == np.uint8
        ids = np.concatenate([processed["input_ids"][start:stop] for start, stop in each.spans])
        assert np.isin(ids, processor._placeholder_ids).all()
        assert (len(each.frames) == len(each.pixels)) == (each.kind == "video")
    assert learnt_text(processor, sample) == "so<|im_end|>"


@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_other_settings_than_its_processor_is_refused(
    name: str, folders: dict[str, Path], processors: dict[str, MultimodalProcessor]
) -> None:
    config = tile_config(name, folders[name])
    family = processors[name].family
    assert config.model_type in family.model_types
    family.check_model(config.to_dict())
    for key in TINY[name].checked:
        changed = config.to_dict()
        part, _, field = key.rpartition(".")
        (changed[part] if part else changed)[field] = 3
        with pytest.raises(ConfigError, match=rf"the model has {key} 3, and its processor .*: take the model's own"):
            family.check_model(changed)


@pytest.mark.parametrize("name", OF_OURS)
def test_limits_on_pixels_that_tiles_cannot_follow_are_refused(name: str, folders: dict[str, Path]) -> None:
    for setting in TINY[name].refused:
        with pytest.raises(
            ConfigError, match=rf"processor\.{setting} 5000 is not supported: .* reads tiles of a fixed size, .*: leave"
        ):
            MultimodalProcessor.from_pretrained(str(folders[name]), **{setting: 5000})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", OF_OURS)
def test_settings_of_a_folder_that_are_not_followed_are_refused(name: str, tmp_path: Path) -> None:
    for number, (key, value, message) in enumerate(
        (
            ("do_rescale", False, "has do_rescale False, but only True is supported: save the processor again"),
            (
                "resample",
                0,
                r"has resample 0, and only 1, 2, 3 \(Lanczos, bilinear, bicubic\) are followed here: save it",
            ),
            *TINY[name].unfollowed,
        )
    ):
        folder = tmp_path / str(number)
        save_tile_processor(folder, name)
        change_settings(folder, "image", **{key: value})
        with pytest.raises(ConfigError, match=message):
            MultimodalProcessor.from_pretrained(str(folder))


def test_seconds_and_frames_of_videos_follow_the_settings(folders: dict[str, Path]) -> None:
    def frames(**settings: Any) -> Sequence[int]:
        processor = MultimodalProcessor.from_pretrained(str(folders["internvl"]), **settings)
        sample = stored(("user", [("video", film(64, 48, num_frames=40))]), ("assistant", "yes"))
        (seen,) = processor.see_media(sample)
        return seen.frames

    assert frames() == (2, 7, 12, 17, 22, 27, 32, 37)
    assert frames(frame_num=4) == (5, 15, 25, 35)
    assert frames(fps=1) == (5, 15, 25, 35)
    assert frames(fps=10, video_max_frames=2, video_start=1, video_end=2) == (12, 17)
    assert len(frames(frame_num=100)) == 40
    with pytest.raises(DataError, match="has none from second 9 to its end: change video_start and video_end"):
        frames(video_start=9)


def test_images_of_gemma_have_the_crops_that_transformers_pan_and_scan_makes(tmp_path: Path) -> None:
    whole: Any = save_tile_processor(tmp_path, "gemma3")
    crops: dict[str, Any] = {"pan_and_scan_min_crop_size": 30, "pan_and_scan_max_num_crops": 4}
    crops |= {"pan_and_scan_min_ratio_to_activate": 1.2, "do_pan_and_scan": True}
    change_settings(tmp_path, "image", **crops)
    processor = MultimodalProcessor.from_pretrained(str(tmp_path))
    random = np.random.default_rng(0)
    found = set()
    for _ in range(rounds(8, 100)):
        images = [picture(*random.integers(20, 200, 2).tolist()) for _ in range(2)]
        sample = stored(("user", [("image", images[0]), "and", ("image", images[1])]), ("assistant", "yes"))
        text = whole.apply_chat_template(json.loads(sample["messages"]), tokenize=False)
        whole.image_processor = by_pillow("Gemma3ImageProcessor").from_pretrained(tmp_path)
        opened = [[Image.open(BytesIO(each)) for each in images]]
        expected = whole(text=[text], images=opened, return_tensors="np", **crops)
        ours = processor.process(sample)
        assert np.array_equal(ours["input_ids"], expected["input_ids"][0])
        assert np.array_equal(ours["media"]["pixel_values"], expected["pixel_values"])
        assert processor.measure(sample) == len(ours["input_ids"])
        found.add(len(expected["pixel_values"]))
    assert len(found) >= 3


def test_images_of_internvl_have_as_many_tiles_as_their_limits_allow(folders: dict[str, Path]) -> None:
    def tiles(**settings: Any) -> int:
        processor = MultimodalProcessor.from_pretrained(str(folders["internvl"]), **settings)
        (measured,) = processor.measure_media([stored(("user", [("image", picture(90, 60))]), ("assistant", "yes"))])
        assert isinstance(measured, Measured)
        return measured.patches

    assert (tiles(), tiles(image_max_pixels=2 * 28**2), tiles(image_max_pixels=5)) == (7, 3, 1)
    assert tiles(image_min_pixels=20 * 28**2) == 21
    prints = {
        processor_fingerprint(MultimodalProcessor.from_pretrained(str(folders["internvl"]), image_max_pixels=each))
        for each in (None, 28**2, 2 * 28**2)
    }
    assert len(prints) == 3
