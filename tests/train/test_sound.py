"""Clips of sound in packs: positions, features and logits. What all families with media promise: test_families.py."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from lmms_stream.errors import ConfigError, DataError
from lmms_stream.loader.collate import collate, join
from lmms_stream.loader.media_memory import SharedBlocks
from lmms_stream.loader.wire import WireBatch, from_wire, to_wire
from lmms_stream.processors.multimodal import MultimodalProcessor
from lmms_stream.train.model.build import ModelConfig
from lmms_stream.train.model.choice import prove_packing
from lmms_stream.train.model.towers import Dummies, family_of, features_of, model_inputs
from lmms_stream.types import Batch, Processed
from lmms_stream.versions.transformers import MIXES_CLIPS_OF_QWEN3_OMNI
from torch.utils._pytree import tree_leaves

from tests.processors.tiny_sound import SOUND_FAMILIES, clip, sounding_film
from tests.processors.tiny_vlm import film, picture, stored

from .one_by_one import gradients_of
from .sounds import SETTINGS, Tiny
from .vision import plain_inputs

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tiny]:
    return {family: Tiny(family, tmp_path_factory.mktemp(family)) for family in SOUND_FAMILIES}


@pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_omni"])
def test_a_clip_is_read_the_same_whatever_lies_beside_it(family: str, tiny: dict[str, Tiny]) -> None:
    one = tiny[family]
    model = one.build("sdpa_varlen").eval()
    samples = [one.sample(("audio", clip(n, seed=n))) for n in (4000, 33333, 900, 47000)]

    def features(*chosen: Processed) -> torch.Tensor:
        media = {name: torch.from_numpy(value) for name, value in collate_media(chosen).items()}
        inputs = model_inputs(one.processor.family, model, media)
        return first_of(model.get_audio_features(**inputs))

    together, alone = features(*samples), [features(each) for each in samples]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-5)
    plain = one.build("eager").eval()
    media = {name: torch.from_numpy(value) for name, value in samples[1]["media"].items()}
    expected = first_of(plain.get_audio_features(**model_inputs(one.processor.family, plain, media)))
    torch.testing.assert_close(alone[1], expected, rtol=0, atol=1e-5)


def first_of(found: Any) -> torch.Tensor:
    first: torch.Tensor = tree_leaves(features_of(found))[0]
    return first


def collate_media(samples: tuple[Processed, ...]) -> dict[str, Any]:
    return {name: np.concatenate([each["media"][name] for each in samples]) for name in samples[0]["media"]}


@pytest.mark.skipif(not MIXES_CLIPS_OF_QWEN3_OMNI, reason="no attention mixes them")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_that_mixes_the_clips_of_qwen3_omni_is_refused(attention: str, tiny: dict[str, Tiny]) -> None:
    packed = tiny["qwen3_omni"].packed(attention)
    packed.family.attentions = ("sdpa", "eager")  # type: ignore[union-attr, misc]
    with pytest.raises(ConfigError, match=f"attention {attention} does not keep the samples of a pack apart: what one"):
        prove_packing(packed, device=CPU)
    del packed.family.attentions  # type: ignore[union-attr]


@pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_omni"])
def test_positions_are_those_of_the_models_own_code(family: str, tiny: dict[str, Tiny]) -> None:
    one = tiny[family]
    model = one.build()
    rng = np.random.default_rng(5)
    for number in range(6):
        parts: list[Any] = ["x"]
        for _ in range(int(rng.integers(1, 4))):
            kind = ["audio", "image" if number % 2 else "video"][int(rng.integers(2))]
            sides = rng.integers(40, 120, 2).tolist()
            length, num_frames, fps = (int(rng.integers(*bounds)) for bounds in ((3000, 50000), (2, 40), (3, 31)))
            if kind == "audio":
                data = clip(length)
            else:
                data = picture(*sides) if kind == "image" else film(64, 64, num_frames=num_frames, fps=fps)
            parts += [(kind, data), "and"]
        chat = stored(("user", parts), ("assistant", "done"))
        sample = one.processor.process(chat)
        inputs = plain_inputs(sample, model=model, family=one.processor.family)
        layouts = one.processor._tokenized(chat).filled.layouts
        seconds = [one.processor.family.seconds_of_pair(each) for each in layouts if each.kind == "video"]  # type: ignore[attr-defined]
        mask = inputs.get("feature_attention_mask")
        expected, _ = model.get_rope_index(
            inputs["input_ids"], inputs.get("image_grid_thw"), inputs.get("video_grid_thw"), inputs["attention_mask"],
            False, None if mask is None else mask.sum(-1), torch.tensor(seconds),
        )  # fmt: skip
        assert sample["position_ids"].dtype == (np.float32 if family == "qwen3_omni" else np.int64)
        np.testing.assert_array_equal(sample["position_ids"], expected[:, 0].numpy())


@pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_omni"])
def test_positions_of_videos_with_sound_are_those_of_the_models_own_code(family: str, tiny: dict[str, Tiny]) -> None:
    one = tiny[family]
    model = one.build()
    processor = MultimodalProcessor.from_pretrained(str(one.folder), **SETTINGS, use_audio_in_video=True)
    for num_frames, fps, samples in ((20, 5, 64000), (60, 10, 30000), (7, 11, 9000), (30, 3, 100000)):
        film = sounding_film(num_frames=num_frames, fps=fps, samples=samples)
        chat = stored(("user", [("audio", clip(9000)), "a", ("video", film), "b"]), ("assistant", "x"))
        sample = processor.process(chat)
        inputs = plain_inputs(sample, model=model, family=one.processor.family)
        layouts = processor._tokenized(chat).filled.layouts
        seconds = torch.tensor([processor.family.seconds_of_pair(layouts[1])])  # type: ignore[attr-defined]
        expected, _ = model.get_rope_index(
            inputs["input_ids"], None, inputs["video_grid_thw"], inputs["attention_mask"], True,
            inputs["feature_attention_mask"].sum(-1), seconds,
        )  # fmt: skip
        np.testing.assert_array_equal(sample["position_ids"], expected[:, 0].numpy())


def test_positions_with_a_fraction_come_through_packs_wires_and_joins(tiny: dict[str, Tiny]) -> None:
    one = tiny["qwen3_omni"]
    sample = one.sample(("video", film(64, 64, num_frames=7, fps=11)))
    assert (sample["position_ids"] % 1 != 0).any()
    batch = collate([sample, one.sample("text")], [0, 1], pad_to=80)
    assert batch.position_ids.dtype == torch.float32
    wire = to_wire(batch, SharedBlocks())
    assert isinstance(wire, WireBatch)
    assert torch.equal(from_wire(pickle.loads(pickle.dumps(wire))).position_ids, batch.position_ids)
    text = Batch(**{**vars_of(collate([{"input_ids": np.arange(4), "labels": np.arange(4)}], [0]))})
    joined = join([text, batch])
    assert torch.equal(joined.position_ids[:, :, 4:], batch.position_ids)
    assert joined.position_ids[:, 0, :4].tolist() == [[0.0, 1.0, 2.0, 3.0]] * 4


def vars_of(batch: Batch) -> dict[str, Any]:
    from dataclasses import fields

    return {each.name: getattr(batch, each.name) for each in fields(batch)}


def test_images_and_videos_in_one_row_of_qwen3_omni_are_refused(tiny: dict[str, Tiny]) -> None:
    one = tiny["qwen3_omni"]
    image, video = ("image", picture(90, 60)), ("video", film(64, 64, num_frames=9))
    chat = stored(("user", [image, video]), ("assistant", "x"))
    for read in (one.processor.measure, one.processor.process):
        with pytest.raises(
            DataError, match="holds images and videos, and transformers' Qwen3-Omni cannot read both in"
        ):
            read(chat)
    pack = collate([one.sample(image), one.sample(video)], [0, 1])
    with pytest.raises(
        ConfigError, match=r"a pack holds images and videos, .* in datasets of their own, and per_device"
    ):
        one.packed("sdpa_varlen")(pack)


def test_a_model_with_several_towers_and_no_method_for_one_is_named(tiny: dict[str, Tiny]) -> None:
    class Without(torch.nn.Module):
        """Of a user's own."""

    dummies = Dummies(tiny["qwen2_5_omni"].processor.family)
    with (
        pytest.raises(
            ConfigError, match="Without has no get_image_features, and a model with several towers, or with train"
        ),
        dummies.run_first(Without(), {}, torch.zeros(1, 1, dtype=torch.int64)),
    ):
        pass


@pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_omni"])
def test_what_is_read_of_a_clip_does_not_depend_on_longer_ones_beside_it(family: str, tiny: dict[str, Tiny]) -> None:
    one = tiny[family]
    packed, plain = one.packed("sdpa_varlen"), one.plain()
    beside: Any = packed.model
    for model in (beside, plain):
        for name, parameter in model.named_parameters():
            if "audio_tower.conv" in name and name.endswith("bias"):  # which transformers begins with zeros
                torch.nn.init.uniform_(parameter, 0.2, 0.4, generator=torch.Generator().manual_seed(len(name)))
    short, long = (one.sample(("audio", clip(samples, seed=samples))) for samples in (4000, 41234))
    read = {}
    for name, model, samples in (("alone", plain, [short]), ("beside", beside, [long, short])):
        inputs = model_inputs(one.processor.family, model, collate(samples, range(len(samples))).inputs)
        with torch.no_grad():
            read[name] = first_of(model.get_audio_features(**inputs))
    assert 0 < len(read["alone"]) < len(read["beside"])
    found = read["beside"][-len(read["alone"]) :]
    assert (found - read["alone"]).abs().max() < 1e-5 * read["alone"].abs().max()


@pytest.mark.parametrize("family", SOUND_FAMILIES)
def test_logits_are_made_some_at_a_time_with_the_losses_and_gradients_of_all_at_once(
    family: str, tiny: dict[str, Tiny]
) -> None:
    one = tiny[family]
    packed = one.packed().train()
    prove_packing(packed, device=CPU)
    assert packed.logits_way == "chunks"
    sizes: list[int] = []  # of logits
    packed.model.get_output_embeddings().register_forward_hook(lambda _, __, made: sizes.append(made.numel()))
    for samples in one.kinds().values():
        batch, found = collate(samples, range(len(samples))), {}
        for way in ("whole", "chunks"):
            packed.logits_way = way
            packed.zero_grad()
            sizes.clear()
            losses = packed(batch).tokens
            losses.sum().backward()
            found[way] = losses.detach(), gradients_of(packed)
        assert max(sizes) <= batch.num_loss_tokens * packed.vocab_size < batch.num_tokens * packed.vocab_size
        torch.testing.assert_close(found["chunks"][0], found["whole"][0], rtol=1e-5, atol=1e-5)
        for name, gradient in found["whole"][1].items():
            torch.testing.assert_close(found["chunks"][1][name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_a_model_of_another_processor_is_refused(tiny: dict[str, Tiny]) -> None:
    one = tiny["qwen2_audio"]
    config = {**one.config, "audio_config": {**one.config["audio_config"], "num_mel_bins": 80}}
    built = ModelConfig(config=config).build()
    with pytest.raises(
        ConfigError, match=r"audio_config.num_mel_bins 80, and its processor 16: take the model's own pr"
    ):
        family_of([one.processor], built.config)
