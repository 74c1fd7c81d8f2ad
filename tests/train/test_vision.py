"""Packs with images and video give what plain transformers gives for their samples one by one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lmms_stream.errors import ConfigError
from lmms_stream.loader.collate import collate, join
from lmms_stream.train.checkpoint.checkpoint import Checkpointer
from lmms_stream.train.checkpoint.export import export_checkpoint, model_files
from lmms_stream.train.model.choice import prove_compiled, prove_packing
from lmms_stream.train.model.flops import model_flops
from lmms_stream.train.model.model import PackedModel
from lmms_stream.train.model.sharding import blocks_to_shard, checkpoint_blocks, freeze
from lmms_stream.train.model.towers import family_of
from lmms_stream.train.run.distributed import init_distributed
from lmms_stream.types import Batch
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.processors.tiny_vlm import FAMILIES, save_processor, tiny_config
from tests.versions import IS_5

from .one_by_one import check_pack, gradients_of, unequal
from .test_attention import fault_of
from .test_fast_attention import varlen_on_cpu
from .vision import KINDS, MODEL_TYPES, Family, build, plain_logits, samples_of

CPU = torch.device("cpu")


def packed_model(model_type: str, *, attention: Any = "auto") -> PackedModel:
    family: Any = Family(model_type)
    return PackedModel(build(model_type, attention=attention), family)


@pytest.mark.parametrize("attention", ["sdpa_varlen", "sdpa", "eager"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_pack_gives_what_its_samples_give_one_by_one(kind: str, model_type: str, attention: Any) -> None:
    packed, plain = packed_model(model_type, attention=attention), build(model_type)
    more = check_pack(packed, plain, samples_of(plain, kind), pad_to=140)
    assert all("visual" in name for name in more)
    assert packed.logits_ways[-1] == "whole"


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_packs_of_media_and_of_text_in_one_forward_pass_are_the_sums_of_each(model_type: str) -> None:
    packed = packed_model(model_type)
    packs = [collate(samples_of(packed.model, kind), range(3)) for kind in ("images", "text", "video", "media")]
    together = packed(join([*packs, collate([], [])])).tokens.sum()
    torch.testing.assert_close(together, torch.stack([packed(pack).tokens.sum() for pack in packs]).sum())


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_tower_takes_no_bounds_of_text_for_those_of_media(model_type: str) -> None:
    packed = packed_model(model_type, attention="sdpa_varlen")
    media = samples_of(packed.model, "images")[0]["media"]
    inputs = [torch.from_numpy(media[name]) for name in ("pixel_values", "image_grid_thw")]
    bounds = torch.tensor([0, 7, 11], dtype=torch.int32)
    for tower in packed.towers.values():
        torch.testing.assert_close(tower(*inputs, cu_seq_lens_q=bounds), tower(*inputs), rtol=0, atol=0)


@contextmanager
def tower_calls(model: Any) -> Iterator[Counter[str]]:
    """How often each block of the tower, and each merger, ran inside."""
    calls: Counter[str] = Counter()
    tower = model.model.visual
    names = [name for name, _ in tower.named_modules() if name.startswith(("blocks.", "merger", "deepstack"))]
    hooks = [
        tower.get_submodule(name).register_forward_hook(lambda *_, name=name: calls.update([name])) for name in names
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_pack_calls_the_tower_as_often_whatever_it_holds(model_type: str, training: bool) -> None:
    packed = packed_model(model_type).train(training)
    counted = []
    for kind in (*KINDS, ""):
        samples = samples_of(packed.model, kind) if kind else []
        with tower_calls(packed.model) as calls, torch.set_grad_enabled(training):
            packed(collate(samples, range(len(samples))))
        counted.append(dict(calls))
    assert all(calls == counted[0] for calls in counted)
    assert {calls for name, calls in counted[0].items() if name.count(".") == 1} == {2}  # images and video


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_towers_that_a_pack_does_not_need_have_gradients_of_zeros(model_type: str) -> None:
    packed = packed_model(model_type).train()
    for samples in (samples_of(packed.model, "text"), []):
        packed.model.zero_grad()
        packed(collate(samples, range(len(samples)))).tokens.sum().backward()
        of_tower = [each.grad for each in packed.model.model.visual.parameters()]
        assert all(each is not None and not each.any() for each in of_tower)


@pytest.mark.parametrize(("attention", "chosen"), [("auto", "sdpa_varlen"), ("sdpa", "sdpa"), ("eager", "eager")])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_samples_with_media_are_proven_to_be_kept_apart(model_type: str, attention: Any, chosen: str) -> None:
    model = packed_model(model_type, attention=attention).train()
    prove_packing(model, device=CPU)
    assert model.model.config._attn_implementation == chosen
    prove_compiled(model, device=CPU)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_kernel_for_packs_runs_once_for_each_layer_of_a_tower(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all images and windows together; transformers 4 knows no kernel by that name, and runs image by image."""
    of_towers: list[int] = []

    @wraps(varlen_on_cpu)
    def kernel(*args: Any, window_size: tuple[int, int], **others: Any) -> torch.Tensor:
        of_towers.append(window_size == (-1, -1))
        return varlen_on_cpu(*args, window_size=window_size, **others)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    packed, plain = packed_model(model_type), build(model_type)
    packed.model.attention_choices[:] = ["varlen", "sdpa"]
    prove_packing(packed, device=CPU)
    assert packed.model.config._attn_implementation == "varlen"
    samples = samples_of(plain, "images")
    of_towers.clear()
    packed(collate(samples, range(len(samples))))
    layers = len(packed.model.model.visual.blocks)
    assert sum(of_towers) == (2 * layers if IS_5 else 0)  # images, and the smallest video
    check_pack(packed, plain, samples, pad_to=140)
    packed.model.set_attn_implementation("sdpa")
    towers: list[Any] = [*packed.towers.values()]
    assert {tower.config._attn_implementation for tower in towers} == {"sdpa"}


class Positions(PackedModel):
    """Runs packs with some of the axes of positions."""

    def __init__(self, model: Any, family: Any, axes: slice | int):
        super().__init__(model, family)
        self._axes = axes

    def _inputs(self, batch: Batch) -> dict[str, Any]:
        inputs = super()._inputs(batch)
        return inputs | {"position_ids": inputs["position_ids"][self._axes]}


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl"])
def test_positions_of_two_dimensions_which_mix_samples_under_mrope_are_refused(model_type: str) -> None:
    model = Positions(build(model_type, attention="sdpa"), Family(model_type), 0)
    with pytest.raises(ConfigError, match="with attention sdpa does not keep the samples of a pack apart"):
        prove_packing(model, device=CPU)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_positions_of_three_axes_without_those_of_the_text_are_refused(model_type: str) -> None:
    """In Qwen3-VL they keep samples of text apart, and cut each sample where its media are."""
    model = Positions(build(model_type, attention="sdpa"), Family(model_type), slice(1, None))
    message = {
        "qwen3_vl": r"predicts another thing for a sample in a pack than for the sample alone \(samples with media\)"
        "|does not keep the samples of a pack apart"
    }.get(model_type, "does not keep the samples of a pack apart")
    assert re.match(message, fault_of(model) or "")


def test_media_of_one_sample_that_are_seen_in_another_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = packed_model("qwen2_5_vl", attention="sdpa")

    def mix(_: Any, inputs: Any) -> Any:
        hidden, *others = inputs
        return (hidden + 1e-3 * hidden.mean(dim=0), *others)  # of all media of the pack

    model.model.model.visual.blocks[0].register_forward_pre_hook(mix)
    with pytest.raises(
        ConfigError, match=r"what one holds changes what is predicted in another \(samples with media\)"
    ):
        prove_packing(model, device=CPU)


def test_the_family_says_which_attentions_there_are_to_choose_from() -> None:
    family: Any = Family("qwen2_vl")
    family.attentions = ("eager",)
    model = PackedModel(build("qwen2_vl"), family)
    prove_packing(model, device=CPU)
    assert model.model.config._attn_implementation == "eager"
    model = PackedModel(build("qwen2_vl", attention="sdpa"), family)
    with pytest.raises(
        ConfigError, match="attention sdpa is none that keeps samples with media apart in Qwen2VLForCon"
    ):
        prove_packing(model, device=CPU)


def test_processors_of_a_run_are_of_one_family_and_that_of_its_model() -> None:
    class Reads:
        family: Any = Family("qwen2_vl")

    class Other(Family):
        pass

    class ReadsOther:
        family = Other("qwen3_vl")

    assert family_of([None, object()], None) is None
    config = build("qwen2_vl").config
    assert family_of([object(), Reads(), Reads()], config) is Reads.family
    with pytest.raises(ConfigError, match="makes inputs of qwen2_vl, and the model is qwen3_vl: take the model's own"):
        family_of([Reads()], build("qwen3_vl").config)
    with pytest.raises(ConfigError, match="processors are of families Family and Other: use processors of a"):
        family_of([Reads(), ReadsOther()], config)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_blocks_of_towers_are_sharded_and_run_again(model_type: str) -> None:
    packed = packed_model(model_type).train()
    blocks = blocks_to_shard(packed.model)
    visual: Any = packed.model.model.visual
    assert set(visual.blocks) < set(blocks)
    assert len(blocks) == len(visual.blocks) + 2
    samples = samples_of(packed.model, "mixed")
    batch = collate(samples, range(len(samples)))
    packed(batch).tokens.sum().backward()
    expected = gradients_of(packed.model)
    checkpoint_blocks(packed.model)
    packed.model.zero_grad()
    with tower_calls(packed.model) as calls:
        packed(batch).tokens.sum().backward()
    assert calls["blocks.0.norm1"] == 4  # images and video, forward and again
    found = gradients_of(packed.model)
    assert found.keys() == expected.keys()
    assert unequal(found, expected) == []


@pytest.mark.parametrize("frozen", [[], ["model.visual.*"], ["model.visual.patch_embed.*", "model.visual.blocks.*"]])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_flops_of_a_step_with_media_are_what_torch_counts(model_type: str, frozen: list[str]) -> None:
    """Torch counts a masked pack as if all its tokens saw each other, so here each sample runs alone; in eager
    attention, as it counts the backward pass of others with a product that is computed again."""
    from torch.utils.flop_counter import FlopCounterMode

    packed = packed_model(model_type, attention="eager").train()
    freeze(packed.model, frozen)
    flops = model_flops(packed.model, towers=packed.towers)
    assert flops is not None
    samples = samples_of(packed.model, "media")
    found, counted = 0.0, 0
    for sample in samples:
        batch = collate([sample], [0])
        lengths = batch.cu_seqlens.diff().long().numpy()
        found += flops.of(lengths, num_loss_tokens=len(sample["input_ids"]), inputs=[batch.inputs])
        with FlopCounterMode(display=False) as counter:
            plain_logits(packed.model, sample).sum().backward()
        counted += counter.get_total_flops()
    assert abs(found / counted - 1) <= 0.02


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_is_loaded_by_the_auto_classes_of_model_and_processor(family: str, tmp_path: Path) -> None:
    original = save_processor(tmp_path / "processor", family)
    init_distributed(60)
    built: Any = AutoModelForImageTextToText.from_config(tiny_config(family, tmp_path / "processor")).eval()
    optimizer = torch.optim.AdamW(built.parameters())
    with Checkpointer(str(tmp_path / "saved"), staging=tmp_path / "staging") as checkpointer:
        documents = model_files(built, str(tmp_path / "processor"))
        checkpointer.save(built, optimizer, step=1, state={}, documents=documents)
    out = export_checkpoint(tmp_path / "saved" / "step-00000001", tmp_path / "model")
    names = {path.name for path in out.iterdir()}
    settings = {"processor_config.json"} if IS_5 else {"preprocessor_config.json", "video_preprocessor_config.json"}
    assert {*settings, "chat_template.jinja"} < names
    loaded = AutoModelForImageTextToText.from_pretrained(out).eval()
    processor = AutoProcessor.from_pretrained(out)
    assert type(processor) is type(original)
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    image = np.random.default_rng(0).integers(0, 255, (60, 90, 3), np.uint8)
    made, expected = (
        each(text=each.apply_chat_template(asked), images=[image], return_tensors="pt")
        for each in (processor, original)
    )
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[name], expected[name]) for name in made)
    with torch.no_grad():
        assert torch.equal(loaded(**made).logits, built(**made).logits)
