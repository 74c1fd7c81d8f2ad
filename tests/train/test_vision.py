"""Packs of Qwen-VL: towers, kernels and positions. What all families with media promise: test_families.py."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import pytest
import torch
from lmms_stream.errors import ConfigError
from lmms_stream.loader.collate import collate
from lmms_stream.train.model.choice import prove_packing
from lmms_stream.train.model.model import PackedModel
from lmms_stream.train.model.sharding import blocks_to_shard, checkpoint_blocks
from lmms_stream.train.model.towers import family_of
from lmms_stream.types import Batch

from tests.versions import IS_5

from .one_by_one import check_pack, gradients_of, unequal
from .test_attention import fault_of
from .test_fast_attention import varlen_on_cpu
from .vision import MODEL_TYPES, Family, build, packed_model, samples_of

CPU = torch.device("cpu")


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
