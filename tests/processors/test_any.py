"""Processors of models that have no file here: what is measured is made, as the installed one makes it."""

from __future__ import annotations

import json
import pickle
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import transformers
from lmms_stream.errors import ConfigError, DataError
from lmms_stream.processes.pool import _NEEDS_SLOW
from lmms_stream.processors import ProcessorConfig
from lmms_stream.processors.base import Measured, processor_fingerprint
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.processors.multimodal import MultimodalProcessor
from PIL import Image

from tests.processors.any_vlm import ANY, save_any, template_of
from tests.processors.test_multimodal import bytes_of, learnt_text, loaded, parts_of
from tests.processors.tiny_sound import clip
from tests.processors.tiny_vlm import change_settings, film, picture, save_tokenizer, stored
from tests.rounds import rounds
from tests.versions import IS_5

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # of tensors, in transformers
NAMES = [name for name, tiny in ANY.items() if hasattr(transformers, tiny.processor)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in NAMES}
    for name, folder in made.items():
        save_any(folder, name)
    return made


@pytest.fixture(scope="module")
def processors(folders: dict[str, Path]) -> dict[str, MultimodalProcessor]:
    """No type is said."""
    built = {name: ProcessorConfig(path=str(folder)).build() for name, folder in folders.items()}
    return {name: each for name, each in built.items() if isinstance(each, MultimodalProcessor)}


def theirs(processor: MultimodalProcessor, sample: dict[str, Any]) -> dict[str, Any]:
    """What transformers' processor makes of a chat with images, or with a sound."""
    whole = loaded(str(processor.tokenizer.name))
    template = processor.tokenizer.chat_templates["default"]
    text = whole.tokenizer.apply_chat_template(json.loads(sample["messages"]), tokenize=False, chat_template=template)
    images = [Image.open(BytesIO(bytes_of(sample, part))).convert("RGB") for part in parts_of(sample, "image")]
    sounds = [soundfile.read(BytesIO(bytes_of(sample, part)), dtype="float32")[0] for part in parts_of(sample, "audio")]
    given = {**({"images": [images]} if images else {}), **({"audio": sounds} if sounds else {})}
    made = whole(text=[text], **given, return_tensors="pt")
    return {name: value for name, value in made.items() if hasattr(value, "numpy")}


@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_tensors_of_any_processor_are_its_own(name: str, processors: dict[str, MultimodalProcessor]) -> None:
    random, processor = np.random.default_rng(1), processors[name]
    for number in range(rounds(3, 30)):
        is_alone = processor.family.ours.kinds["image"].is_alone  # type: ignore[attr-defined]
        assert is_alone == (name == "lfm2_vl" and not IS_5)
        sides = [random.integers(32, 260, 2).tolist() for _ in range(1 if is_alone else 1 + number % 3)]
        media: list[Any] = [("image", picture(*each, seed=each[0])) for each in sides]
        content = ["a\n", *[part for each in media for part in (each, "\nand", "then ")]]
        sample = stored(("user", content), ("assistant", "so"))
        ours, expected = processor.process(sample), theirs(processor, sample)
        assert np.array_equal(ours["input_ids"], expected["input_ids"][0]), number
        given = {key: torch.from_numpy(np.array(each)) for key, each in ours["media"].items()}
        tensors = processor.family.model_inputs(None, given)  # type: ignore[attr-defined]
        assert tensors.keys() <= expected.keys()
        assert any(each.is_floating_point() for each in tensors.values())
        for key, values in tensors.items():
            wanted = expected[key].to(values.dtype)
            assert values.numel() == wanted.numel(), (key, values.shape, wanted.shape)
            assert torch.equal(values.flatten(), wanted.flatten()), (number, key)
        for key, of_tokens in ours.get("token_inputs", {}).items():
            assert np.array_equal(of_tokens, expected[key][0])
        assert learnt_text(processor, sample) == "so<|im_end|>"
        if is_alone:
            with pytest.raises(
                DataError, match=r"it has 2 images, and the processor of .* reads several together differently"
            ):
                processor.measure(stored(("user", media * 2), ("assistant", "so")))


def test_a_server_of_workers_imports_transformers_for_processors_of_transformers_alone(
    processors: dict[str, MultimodalProcessor], chat_processor: ChatProcessor
) -> None:
    assert all(_NEEDS_SLOW in pickle.dumps(processor) for processor in processors.values())
    assert _NEEDS_SLOW not in pickle.dumps(chat_processor)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_measured_of_any_processor_is_made(name: str, processors: dict[str, MultimodalProcessor]) -> None:
    random, processor = np.random.default_rng(2), processors[name]
    kinds = [*processor.family.placeholders]
    assert set(kinds) == set(ANY[name].written)
    again = pickle.loads(pickle.dumps(processor))
    for number in range(rounds(2, 60)):
        width, height = random.integers(32, 400, 2).tolist()
        media = {
            "image": picture(width, height), "audio": clip(int(random.integers(8000, 40000))),
            "video": film(32 + 2 * (width // 4), 32 + 2 * (height // 4), num_frames=int(random.integers(8, 40))),
        }  # fmt: skip
        chosen = (kinds, kinds[::-1])[number % 2]
        if clashing := processor.family.never_together:  # type: ignore[attr-defined]
            both = stored(("user", [(kind, media[kind]) for kind in clashing]), ("assistant", "yes"))
            with pytest.raises(DataError, match=r"it holds images and videos, and .* has one token for both"):
                processor.measure(both)
            chosen = [clashing[number % 2]]
        content = [part for kind in chosen for part in ((kind, media[kind]), " with")]
        sample = stored(("user", content), ("assistant", "yes"))
        made = processor.process(sample)
        for each in (processor, again):
            (measured,) = each.measure_media([{"messages": sample["messages"]}])
            assert isinstance(measured, Measured)
            assert measured.tokens == len(made["input_ids"])
            of_media = measured.image_tokens + measured.video_tokens + measured.audio_tokens
            assert of_media == np.isin(made["input_ids"], processor._placeholder_ids).sum()


def test_tokens_of_a_sound_are_those_of_its_processor(processors: dict[str, MultimodalProcessor]) -> None:
    if "gemma4" not in processors:
        pytest.skip("transformers of today alone has a processor of sounds that has no file here")
    processor = processors["gemma4"]
    sample = stored(("user", [("audio", clip(30000)), "what?"]), ("assistant", "so"))
    made, expected = processor.process(sample), theirs(processor, sample)
    assert np.array_equal(made["input_ids"], expected["input_ids"][0])
    assert np.array_equal(made["media"]["input_features"], expected["input_features"].flatten())


def test_frames_of_any_processor_follow_the_settings(folders: dict[str, Path]) -> None:
    name = "glm4v"
    video = stored(("user", [("video", film(64, 48, num_frames=40, fps=8))]), ("assistant", "so"))

    def frames(**settings: Any) -> list[int]:
        (seen,) = MultimodalProcessor.from_pretrained(str(folders[name]), **settings).see_media(video)
        return [*seen.frames]

    assert 1 <= len(frames(fps=1)) < len(frames(fps=4))
    assert set(frames(fps=4, video_start=1, video_end=3)) <= set(range(8, 24))
    with pytest.raises(
        ConfigError, match=r"processor.image_max_pixels 5000 is not supported for Glm4v.*: leave it out"
    ):
        MultimodalProcessor.from_pretrained(str(folders[name]), image_max_pixels=5000)


def test_settings_of_a_folder_name_the_lengths_of_any_processor(tmp_path: Path) -> None:
    save_any(tmp_path, "llava")
    before = MultimodalProcessor.from_pretrained(str(tmp_path))
    change_settings(tmp_path, "image", image_mean=[0.1, 0.2, 0.3])
    assert processor_fingerprint(MultimodalProcessor.from_pretrained(str(tmp_path))) != processor_fingerprint(before)


def test_a_folder_of_a_model_of_text_gives_chats_where_no_type_is_said(tmp_path: Path) -> None:
    save_tokenizer(tmp_path).save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template_of({}))
    assert isinstance(ProcessorConfig(path=str(tmp_path)).build(), ChatProcessor)
    (tmp_path / "config.json").write_text('{"model_type": "llava", "vision_config": {}}')
    with pytest.raises(ConfigError, match=r"holds no preprocessor_config\.json: name the folder or hub id"):
        ProcessorConfig(path=str(tmp_path)).build()


@pytest.mark.skipif(not IS_5, reason="until 5.0 its processor takes tokenizers of one class")
def test_a_processor_that_writes_prompts_is_refused_with_the_recipe(tmp_path: Path) -> None:
    save_any(tmp_path, "paligemma")
    with pytest.raises(
        ConfigError, match=r"\(PaliGemmaProcessor\) did not show .* \(image: .*\): write a family of your own"
    ):
        ProcessorConfig(path=str(tmp_path)).build()


def test_a_processor_that_cannot_be_asked_is_refused_with_the_recipe(tmp_path: Path) -> None:
    save_any(tmp_path, "llava")
    for file in ("chat_template.jinja", "chat_template.json"):
        (tmp_path / file).unlink(missing_ok=True)
    with pytest.raises(
        ConfigError,
        match=r"processor .* \(LlavaProcessor\) did not show the tokens and tensors of media in a test \(image: .*\): "
        r"write a family of your own \(docs/families\.md\) and give it to MultimodalProcessor\.from_pretrained",
    ):
        ProcessorConfig(path=str(tmp_path)).build()
