"""Models that have no file among the families: a pack gives what its samples give one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from lmms_stream.errors import ConfigError
from lmms_stream.loader.collate import collate
from lmms_stream.processors.multimodal import MultimodalProcessor
from lmms_stream.train.model.build import ModelConfig
from lmms_stream.train.model.choice import prove_packing
from lmms_stream.train.model.model import PackedModel
from lmms_stream.train.model.towers import family_of

from tests.processors.any_vlm import ANY, any_config, save_any
from tests.processors.tiny_sound import clip
from tests.processors.tiny_vlm import film, picture, stored
from tests.rounds import in_long_rounds
from tests.versions import IS_5

from .one_by_one import check_pack, is_noise_of_keys

# Until 5.0 the processor of LFM2-VL reads several images of a sample otherwise than each alone, and ours refuses them;
# and GLM-4V takes no positions that tell samples apart beside those of its axes, so that its packs are refused.
OF_5 = () if IS_5 else ("lfm2_vl", "glm4v")
NAMES = [name for name, tiny in ANY.items() if hasattr(transformers, tiny.processor) and name not in OF_5]

LONG = (
    "gemma4", "glm46v", "exaone4_5", "kimi_k25", "glm4v_moe", "glm_ocr", "mistral4", "mistral_large4", "vipllava",
    "video_llama_3", "cohere_compass",
)  # fmt: skip
MEDIA: dict[str, list[bytes]] = {
    "image": [picture(60, 40), picture(100, 90), picture(30, 80)],
    "video": [film(64, 48, num_frames=4), film(96, 64, num_frames=6), film(64, 64, num_frames=2)],
    "audio": [clip(9000), clip(20000), clip(30000)],
}


def processor_and_model(name: str, folder: Path) -> tuple[MultimodalProcessor, Any]:
    """Of the same folder, which is one of a model."""
    save_any(folder, name)
    processor = MultimodalProcessor.from_pretrained(str(folder))
    model = ModelConfig(config=any_config(name, processor.family)).build().eval()
    if model.config.model_type not in processor.family.model_types:
        with pytest.raises(ConfigError, match="take the model's own processor"):
            family_of([processor], model.config)
        model.config.save_pretrained(folder)  # a folder of a model says its type
        processor = MultimodalProcessor.from_pretrained(str(folder))
    return processor, model


def run_in_float64(packed: PackedModel, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose roundings are no matter."""
    if "audio" in packed.towers:  # Gemma 4's is run in float32 always
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    for model in (packed.model, plain):
        model.double()
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # the others have no float64
    smallest: Any
    for smallest in packed.dummies.values():
        smallest.update({key: each.double() for key, each in smallest.items() if each.is_floating_point()})


def sample_of(processor: MultimodalProcessor, content: Any) -> Any:
    sample = processor.process(stored(("user", content), ("assistant", "it is so")))
    media = {key: each.astype(float) if each.dtype.kind == "f" else each for key, each in sample["media"].items()}
    return {**sample, "media": media}


@pytest.mark.parametrize("name", [pytest.param(each, marks=in_long_rounds) if each in LONG else each for each in NAMES])
def test_a_pack_of_any_model_gives_what_its_samples_give_one_by_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor, model = processor_and_model(name, tmp_path)
    plain = ModelConfig(config=any_config(name, processor.family)).build().eval()
    packed = PackedModel(model, family_of([processor], model.config)).eval()
    prove_packing(packed, device=torch.device("cpu"))
    run_in_float64(packed, plain, monkeypatch)
    for kind in processor.family.placeholders:
        first, second, third = ((kind, each) for each in MEDIA[kind])
        samples = [sample_of(processor, each) for each in ([first, "what"], ["nothing"], [second, "and", third])]
        check_pack(packed, plain, samples, pad_to=0, is_noise=is_noise_of_keys)
    other, same = (sample_of(processor, [("image", picture(60, 40, seed=seed)), "what"]) for seed in (5, 0))
    assert not torch.allclose(packed(collate([other], [0])).tokens, packed(collate([same], [0])).tokens)


@pytest.mark.skipif(not IS_5, reason="until 5.0 its processor takes tokenizers of one class")
def test_a_model_whose_towers_are_not_found_is_refused_with_the_recipe(tmp_path: Path) -> None:
    save_any(tmp_path, "phi4_multimodal")
    processor = MultimodalProcessor.from_pretrained(str(tmp_path))
    model = ModelConfig(config=any_config("phi4_multimodal", processor.family)).build()
    with pytest.raises(ConfigError, match=r"name for reading images, found .*: write a family \(docs/families\.md\)"):
        PackedModel(model, family_of([processor], model.config))


@in_long_rounds
@pytest.mark.skipif(not hasattr(transformers, "MiniCPMV4_6Processor"), reason="of transformers 5")
def test_a_model_that_reads_only_the_first_image_of_a_pack_is_refused(tmp_path: Path) -> None:
    """MiniCPM-V takes pixels of all images in one row, and its own code reads only the first row."""
    processor, model = processor_and_model("minicpmv4_6", tmp_path)
    with pytest.raises(ConfigError, match=r"MiniCPMV4_6For.* does not run on packs .*: no setting changes that"):
        prove_packing(PackedModel(model, family_of([processor], model.config)), device=torch.device("cpu"))


@in_long_rounds
@pytest.mark.skipif(not hasattr(transformers, "Ernie4_5_VLMoeProcessor"), reason="of transformers 5")
def test_a_processor_that_marks_tokens_beside_the_media_is_refused_with_the_recipe(tmp_path: Path) -> None:
    save_any(tmp_path, "ernie4_5_vl_moe")
    with pytest.raises(ConfigError, match=r"moe_mm_token_type_ids is 1 for token .*: write a family of your own"):
        MultimodalProcessor.from_pretrained(str(tmp_path))
