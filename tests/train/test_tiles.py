"""Packs of the families that read tiles give what plain transformers gives for their samples one by one."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatch
from typing import Any

import numpy as np
import pytest
import torch
from lmms_stream.errors import ConfigError
from lmms_stream.loader.collate import collate, join
from lmms_stream.train.model.choice import prove_packing
from lmms_stream.train.model.flops import model_flops
from lmms_stream.train.model.sharding import freeze

from tests.processors.tile_vlm import TINY

from .one_by_one import check_pack, is_noise_of_keys
from .tiles import build, packed_model, samples_of
from .vision import plain_logits

NAMES = list(TINY)
CPU = torch.device("cpu")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", NAMES)
def test_a_pack_gives_what_its_samples_give_one_by_one(name: str, attention: Any) -> None:
    packed, plain = packed_model(name, attention=attention), build(name, attention=attention)
    samples = samples_of(name, "media")
    length = sum(len(each["input_ids"]) for each in samples) + 20
    check_pack(packed, plain, samples, pad_to=length, is_noise=is_noise_of_keys)


@pytest.mark.parametrize("name", NAMES)
def test_packs_of_media_and_of_text_in_one_forward_pass_are_the_sums_of_each(name: str) -> None:
    packed = packed_model(name)
    kinds = [kind for kind in ("images", "text", "video", "image") if samples_of(name, kind)]
    packs = [collate(samples_of(name, kind), range(1)) for kind in kinds]
    together = packed(join([*packs, collate([], [])])).tokens.sum()
    torch.testing.assert_close(together, torch.stack([packed(pack).tokens.sum() for pack in packs]).sum())


@pytest.mark.parametrize("name", NAMES)
def test_every_pack_calls_the_tower_as_often_whatever_it_holds(name: str) -> None:
    packed = packed_model(name).train()
    counted = []
    calls: list[str] = []
    for path in {id(tower): tower for tower in packed.towers.values()}.values():
        path.register_forward_hook(lambda *_: calls.append("tower"))
    for kind in ("images", "text", "video", "media", "image", ""):
        samples = samples_of(name, kind) if kind else []
        calls.clear()
        packed.model.zero_grad()
        packed(collate(samples, range(len(samples)))).tokens.sum().backward()
        counted.append(len(calls))
        if kind in ("text", ""):
            of_tower = [each.grad for tower in packed.towers.values() for each in tower.parameters()]
            assert all(each is None or not each.any() for each in of_tower)
            assert any(each is not None for each in of_tower)
    assert len(set(counted)) == 1
    assert counted[0] >= 1


@pytest.mark.parametrize("name", NAMES)
def test_samples_with_media_are_proven_to_be_kept_apart(name: str) -> None:
    model = packed_model(name, attention="auto").train()
    prove_packing(model, device=CPU)
    assert model.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("frozen", [[], ["*vision*"], ["*vision*", "*projector*", "*connector*"]])
@pytest.mark.parametrize("name", NAMES)
def test_the_flops_of_tiles_are_what_torch_counts(name: str, frozen: list[str]) -> None:
    """Of each sample alone, in eager attention, which computes what a window hides, with all experts, as transformers
    runs them; a head that pools a tile for nothing is not counted here."""
    from torch.utils.flop_counter import FlopCounterMode

    packed = packed_model(name, attention="eager").train()
    for path, module in packed.model.named_modules():
        if path.endswith("vision_model.head"):
            module.forward = lambda hidden: hidden.mean(1)
    names = [path for path, _ in packed.model.named_parameters()]
    freeze(packed.model, [each for each in frozen if any(fnmatch(path, each) for path in names)])
    text = packed.model.config.get_text_config()
    text.num_experts_per_tok = getattr(text, "num_local_experts", None)
    flops = model_flops(packed.model, towers=packed.towers)
    assert flops is not None
    flops = replace(flops, per_pair={None: sum(flops.per_pair.values())})
    for sample in samples_of(name, "media"):
        batch = collate([sample], [0])
        with FlopCounterMode(display=False) as counter:
            plain_logits(packed.model, sample).sum().backward()
        found = flops.of(np.array([batch.num_tokens]), num_loss_tokens=batch.num_tokens, inputs=[batch.inputs])
        assert found == pytest.approx(counter.get_total_flops(), rel=0.02), batch.inputs.keys()


@pytest.mark.parametrize("name", [name for name in NAMES if TINY[name].mixes])
def test_attentions_that_a_family_is_not_exact_in_are_refused(name: str) -> None:
    model = packed_model(name)
    for attention in TINY[name].mixes:
        model.model.config._attn_implementation = attention
        with pytest.raises(
            ConfigError, match=f"attention {attention} is none that keeps samples with media apart in .*: set model.att"
        ):
            prove_packing(model, device=CPU)
