"""The contract of the families that read media: their packs train as their samples do in plain transformers.

The families are Qwen-VL, those that read tiles, and those that read sound. test_vision.py, test_tile_runs.py and
test_sound.py hold what one family promises; test_any.py the models that the installed processor describes.
"""

from __future__ import annotations

import logging
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lmms_stream.errors import ConfigError
from lmms_stream.loader.collate import collate, join
from lmms_stream.processors.multimodal import MultimodalProcessor
from lmms_stream.train.checkpoint.checkpoint import Checkpointer
from lmms_stream.train.checkpoint.export import export_checkpoint, model_files
from lmms_stream.train.model.build import ModelConfig
from lmms_stream.train.model.choice import prove_compiled, prove_packing
from lmms_stream.train.model.flops import model_flops
from lmms_stream.train.model.media_flops import SoundFlops
from lmms_stream.train.model.model import PackedModel
from lmms_stream.train.model.sharding import freeze
from lmms_stream.train.run.distributed import init_distributed
from lmms_stream.types import Processed
from transformers import AutoProcessor

from tests.rounds import LONG
from tests.versions import IS_5

from . import families, vision
from .families import EXACT, FROZEN, MIXING, NAMES, SOUNDING, TILED
from .one_by_one import check_pack
from .vision import plain_inputs

CPU = torch.device("cpu")
# What ranks gather together: blocks, and what joins a tower to the text.
BLOCKS = re.compile(r"((^|\.)(layers?|blocks|\w*merger_list)\.\d+|(^|\.)(\w*merger|\w*projector|connector))$")
UNUSED = re.compile(r"audio_bos_eos_token\.weight|(vision_model\.)?(head|post_layernorm)\..*")  # in no logits


# In short rounds these are tried in each attention, the others in the first.
TRIED = NAMES if LONG else ("qwen2_5_vl", "internvl", "gemma3", "llama4", "qwen2_audio", "qwen3_omni")
ATTENTIONS = [(name, each) for name in NAMES for each in (EXACT[name] if name in TRIED else EXACT[name][:1])]


@pytest.mark.parametrize(("name", "attention"), ATTENTIONS)
def test_a_pack_gives_what_its_samples_give_one_by_one(name: str, attention: str) -> None:
    """Logits, losses and gradients. With attentions but the first, short rounds try the pack of most kinds."""
    packed, plain = families.packed_of(name, attention), families.plain_of(name, attention)
    packs = families.packs_of(name)
    is_first = attention == EXACT[name][0] and name not in TILED
    for samples in packs.values() if is_first or LONG else [*packs.values()][-1:]:
        length = sum(len(each["input_ids"]) for each in samples) + 20
        zeros = check_pack(packed, plain, samples, pad_to=length, **families.tolerances_of(name))
        assert all("visual" in each for each in zeros) or name not in vision.MODEL_TYPES
    assert packed.logits_ways[-1] == "whole"


@pytest.mark.parametrize("name", NAMES)
def test_packs_in_one_forward_pass_are_the_sums_of_each(name: str) -> None:
    """But one that mixes kinds; Qwen3-Omni reads no images and videos in one forward pass."""
    packed, packs = families.packed_of(name, EXACT[name][0]), families.packs_of(name)
    kinds = ["sounds", "images"] if name == "qwen3_omni" else [kind for kind in packs if kind not in ("mixed", "both")]
    each_alone = [collate(packs[kind], range(len(packs[kind]))) for kind in kinds]
    together = packed(join([*each_alone, collate([], [])])).tokens.sum()
    torch.testing.assert_close(together, torch.stack([packed(pack).tokens.sum() for pack in each_alone]).sum())


def calls_of(packed: PackedModel, samples: list[Processed]) -> list[str]:
    """Blocks by name in the order of their calls, forward and backward."""
    calls: list[str] = []

    def note(name: str, output: Any) -> None:
        calls.append(name)
        tensor = output if isinstance(output, torch.Tensor) else output[0]
        if tensor.requires_grad:
            tensor.register_hook(lambda _: calls.append(f"{name} backward"))

    hooks = [
        module.register_forward_hook(lambda *call, name=name: note(name, call[-1]))
        for name, module in packed.model.named_modules()
        if BLOCKS.search(name)
    ]
    losses = packed(collate(samples, range(len(samples)))).tokens
    if torch.is_grad_enabled():
        losses.sum().backward()
    for hook in hooks:
        hook.remove()
    return calls


@pytest.mark.parametrize("name", NAMES)
def test_every_pack_calls_the_blocks_of_all_towers_in_one_order_whatever_it_holds(name: str) -> None:
    """Ranks gather the parameters of their blocks together; what a pack does not need has gradients of zeros."""
    packed = families.packed_of(name, EXACT[name][0])
    packs: list[list[Processed]] = [[], *map(list, families.packs_of(name).values())]
    towers = {id(tower): tower for tower in packed.towers.values()}.values()
    packed.train()
    found = []
    for samples in packs:
        packed.model.zero_grad()
        found.append(calls_of(packed, samples))
        gradients = {key: each.grad for tower in towers for key, each in tower.named_parameters() if each.requires_grad}
        assert [key for key, gradient in gradients.items() if gradient is None and not UNUSED.fullmatch(key)] == []
        if not any(each.get("media") for each in samples):
            assert not any(gradient.any() for gradient in gradients.values() if gradient is not None)
    assert all(calls == found[0] for calls in found)
    assert any(call.endswith("backward") for call in found[0])
    blocks = [module for tower in towers for key, module in tower.named_modules() if BLOCKS.search(key)]
    assert blocks
    if name in vision.MODEL_TYPES:
        assert found[0].count("model.visual.blocks.0") == 2  # images and video
    packed.eval()
    with torch.no_grad():
        found = [calls_of(packed, samples) for samples in packs]
    assert all(calls == found[0] for calls in found)


@pytest.mark.parametrize(
    ("name", "attention"),
    [(name, each) for name in NAMES for each in ("auto", *(EXACT[name][1:] if LONG or name == "qwen2_5_vl" else ()))],
)
def test_samples_with_media_are_proven_to_be_kept_apart(
    name: str, attention: str, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = EXACT[name][0] if attention == "auto" else attention
    packed = families.packed_of(name, attention).train()
    with caplog.at_level(logging.INFO, logger="lmms_stream"):
        prove_packing(packed, device=CPU)
    assert packed.model.config._attn_implementation == chosen
    assert f"attention: {chosen}" in caplog.text
    if name in vision.MODEL_TYPES and attention == "auto":
        prove_compiled(packed, device=CPU)


@pytest.mark.parametrize(("name", "attention"), [(name, each) for name in MIXING for each in MIXING[name]])
def test_attentions_that_a_family_is_not_exact_in_are_refused(name: str, attention: str) -> None:
    packed = families.packed_of(name, EXACT[name][0])
    packed.model.config._attn_implementation = attention
    message = f"attention {attention} is none that keeps samples with media apart in .*: set model.attention to "
    with pytest.raises(ConfigError, match=message):
        prove_packing(packed, device=CPU)


@pytest.mark.parametrize(
    ("name", "frozen"),
    [(name, each) for name in NAMES for each in (FROZEN[name] if LONG or name == "internvl" else FROZEN[name][:1])]
    + [(name, each) for name in ("qwen2_vl", "qwen3_vl", "qwen2_5_omni") if not LONG for each in FROZEN[name][1:]],
)
def test_the_flops_of_a_step_with_media_are_what_torch_counts(name: str, frozen: list[str]) -> None:
    """Torch counts a masked pack as if all its tokens saw each other, so here each sample runs alone; in eager
    attention, as it counts the backward pass of others with a product that is computed again."""
    from torch.utils.flop_counter import FlopCounterMode

    packed, samples, changed = families.counted_of(name)
    names = [key for key, _ in packed.model.named_parameters()]
    freeze(packed.model, [each for each in frozen if any(fnmatch(key, each) for key in names)])
    flops = model_flops(packed.model, towers=packed.towers)
    assert flops is not None
    found, counted = 0.0, 0
    for sample in samples:
        batch = collate([sample], [0])
        lengths = np.array([batch.num_tokens])
        of_sample = changed(flops).of(lengths, num_loss_tokens=batch.num_tokens, inputs=[batch.inputs])
        with FlopCounterMode(display=False) as counter:
            inputs = plain_inputs(sample, model=packed.media_model, family=packed.family)
            packed.model(**inputs).logits.sum().backward()
        if name not in vision.MODEL_TYPES:
            assert of_sample == pytest.approx(counter.get_total_flops(), rel=0.02), batch.inputs.keys()
        found, counted = found + of_sample, counted + counter.get_total_flops()
    assert found == pytest.approx(counted, rel=0.02)
    if name in SOUNDING:
        counts = {key.rpartition(".")[2]: sum(each.values()) for key, each in counter.get_flop_counts().items()}
        of_sound = next(each for each in flops.towers if isinstance(each, SoundFlops))
        of_tower = counts["audio_tower"] + counts.get("multi_modal_projector", 0)
        assert of_sound.of(batch.inputs) == pytest.approx(of_tower, rel=0.02)


EXPORTED = NAMES if LONG else (*vision.MODEL_TYPES, "llama4", *SOUNDING)


@pytest.mark.parametrize("name", EXPORTED)
def test_an_export_is_loaded_by_the_classes_of_its_model_and_processor(name: str, tmp_path: Path) -> None:
    init_distributed(60)
    folder, (built, chat) = families.folder_of(name), families.installed(name)
    optimizer = torch.optim.AdamW(built.parameters())
    with Checkpointer(str(tmp_path / "saved"), staging=tmp_path / "staging") as checkpointer:
        checkpointer.save(built, optimizer, step=1, state={}, documents=model_files(built, str(folder)))
    out = export_checkpoint(tmp_path / "saved" / "step-00000001", tmp_path / "model")
    names = {path.name for path in out.iterdir()}
    settings = "processor_config.json" if IS_5 else "preprocessor_config.json"
    assert {settings, "chat_template.jinja", "config.json", "model.safetensors"} <= names
    theirs = [type(AutoProcessor.from_pretrained(each)) for each in (out, folder)]
    assert theirs[0] is theirs[1]
    ours = [MultimodalProcessor.from_pretrained(str(each)) for each in (out, folder)]
    assert ours[0].description == ours[1].description
    again, sample = (processor.process(chat) for processor in ours)
    assert again.keys() == sample.keys()
    assert all(np.array_equal(again["media"][key], value) for key, value in sample["media"].items())
    assert np.array_equal(again["input_ids"], sample["input_ids"])
    family, state = ours[1].family, built.state_dict()
    with torch.no_grad():
        expected = built(**plain_inputs(sample, model=built, family=family)).logits
        by_class = type(built).from_pretrained(out).eval()
        by_us = ModelConfig(pretrained=str(out), attention="sdpa").build().eval()
        for loaded in (by_class, by_us):
            assert loaded.state_dict().keys() == state.keys()
            assert all(torch.equal(each, state[key]) for key, each in loaded.state_dict().items())
            assert torch.equal(loaded(**plain_inputs(sample, model=loaded, family=family)).logits, expected)
