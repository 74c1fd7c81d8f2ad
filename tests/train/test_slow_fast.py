"""LLaVA-OneVision with slow and fast frames: tokens and features by the published rule, packs as samples one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lmms_stream.errors import ConfigError
from lmms_stream.processors.multimodal import MultimodalProcessor
from lmms_stream.train.model.build import ModelConfig
from lmms_stream.train.model.choice import prove_packing
from lmms_stream.train.model.model import PackedModel
from lmms_stream.types import Processed
from torch.nn.functional import interpolate
from transformers import AutoModelForImageTextToText

from tests.processors.tile_vlm import save_tile_processor, tile_config
from tests.processors.tiny_vlm import film, picture, stored

from .one_by_one import check_pack, is_noise_of_keys

SLOW_EVERY, NUM_FRAMES = 2, 5
SETTINGS: dict[str, Any] = {"slow_every": SLOW_EVERY, "frame_num": NUM_FRAMES, "frame_times": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain LLaVA-OneVision with its processor."""
    folder = tmp_path_factory.mktemp("llava")
    save_tile_processor(folder, "llava_onevision")
    ModelConfig(config=tile_config("llava_onevision", folder).to_dict()).build().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def processor(folder: Path) -> MultimodalProcessor:
    return MultimodalProcessor.from_pretrained(str(folder), **SETTINGS)


def slow_model(folder: Path) -> Any:
    return ModelConfig(pretrained=str(folder), slow_every=SLOW_EVERY, attention="sdpa").build()


def samples(processor: MultimodalProcessor) -> list[Processed]:
    one, two = (("video", film(40, 40, num_frames=count, fps=4, seed=count)) for count in (12, 3))
    asked = [
        stored(("user", [one, "What?"]), ("assistant", "A film.")),
        stored(("user", "No film."), ("assistant", "Yes.")),
        stored(("user", [("image", picture(30, 50)), two, "And this?"]), ("assistant", "A short one.")),
    ]
    made = [processor.process(each) for each in asked]
    assert [processor.measure(each) for each in asked] == [len(each["input_ids"]) for each in made]
    return made


def test_features_are_those_of_the_published_rule(folder: Path, processor: MultimodalProcessor) -> None:
    model = slow_model(folder)
    (sample, *_) = samples(processor)
    pixels = torch.from_numpy(sample["media"]["pixel_values_videos"])
    assert pixels.shape[:2] == (1, NUM_FRAMES)
    layer = model.config.vision_feature_layer
    with torch.no_grad():
        seen = model.model.vision_tower(pixels[0], output_hidden_states=True).hidden_states[layer]
        frames = model.model.multi_modal_projector(seen)
        side = int(frames.shape[1] ** 0.5)
        expected = []
        for number, frame in enumerate(frames.unflatten(1, (side, side))):
            to = -(-side // (2 if number % SLOW_EVERY == 0 else 4))
            pooled = interpolate(frame.permute(2, 0, 1)[None], (to, to), mode="bilinear")[0]
            expected += [*pooled.flatten(1).T, model.model.faster_token]
        found = PackedModel(model, processor.family)._dummies  # the way of a batch without a video, too
        assert found is not None
        of_video = processor.family.features(  # type: ignore[attr-defined]
            model.model, "video", {"pixel_values_videos": pixels}
        )
    made = getattr(of_video, "pooler_output", of_video)
    made = made[0] if made.ndim == 3 else made
    torch.testing.assert_close(made, torch.stack([*expected, model.model.image_newline]))
    token_id = processor.family.video_token_id  # type: ignore[attr-defined]
    assert int((sample["input_ids"] == token_id).sum()) == len(made)


def test_a_pack_gives_what_its_samples_give_one_by_one(folder: Path, processor: MultimodalProcessor) -> None:
    packed, plain = PackedModel(slow_model(folder), processor.family), slow_model(folder)
    plain.load_state_dict(packed.model.state_dict())
    made = samples(processor)
    check_pack(packed, plain, made, pad_to=sum(len(each["input_ids"]) for each in made) + 9, is_noise=is_noise_of_keys)
    assert packed.model.get_parameter("model.faster_token").grad is not None
    prove_packing(packed.train(), device=torch.device("cpu"))


def test_the_text_tells_when_frames_are_shown(processor: MultimodalProcessor) -> None:
    (sample, *_) = samples(processor)
    said = processor.tokenizer.decode(sample["input_ids"].tolist())
    assert "The video lasts for 3.00 seconds, and 5 frames are uniformly sampled from it." in said
    assert "located at 0.00s,0.50s,1.25s,2.00s,2.75s. Please" in said  # frames 0, 2, 5, 8 and 11 of 12
    assert processor.description["media"]["slow_every"] == SLOW_EVERY


def test_its_weights_are_llavas_and_one_more_that_is_saved_and_loaded(folder: Path, tmp_path: Path) -> None:
    plain, model = ModelConfig(pretrained=str(folder)).build(), slow_model(folder)
    of_plain, of_slow = plain.state_dict(), model.state_dict()
    assert {*of_slow} - {*of_plain} == {"model.faster_token"}
    assert all(torch.equal(of_slow[name], each) for name, each in of_plain.items())
    assert of_slow["model.faster_token"].std() == pytest.approx(32**-0.5, rel=0.5)
    assert torch.equal(slow_model(folder).model.faster_token, model.model.faster_token)  # by the seed of the config
    model.save_pretrained(tmp_path / "saved")
    again = ModelConfig(pretrained=str(tmp_path / "saved")).build()  # its config says how videos are read
    assert all(torch.equal(again.state_dict()[name], each) for name, each in of_slow.items())
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(theirs.state_dict()[name], each) for name, each in of_plain.items())
    unread = ModelConfig(pretrained=str(tmp_path / "saved")).build_unread()
    assert {*unread.state_dict()} == {*of_slow}


def test_what_does_not_go_together_is_refused_by_name(folder: Path, processor: MultimodalProcessor) -> None:
    from lmms_stream.train.model.towers import family_of

    with pytest.raises(ConfigError, match=r"videos have slow_every None, and its processor's 2: set processor.slow"):
        family_of([processor], tile_config("llava_onevision", folder))
    with pytest.raises(ConfigError, match=r"model.slow_every 2 is of LLaVA-OneVision's videos, and the model is llama"):
        ModelConfig(config={"model_type": "llama", "vocab_size": 8}, slow_every=2).build()
    with pytest.raises(ConfigError, match=r"model.slow_every must be at least 1, .* got 0"):
        ModelConfig(pretrained=str(folder), slow_every=0)
