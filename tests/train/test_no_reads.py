"""No operation of a step reads a value from the device: a whole step runs on tensors without values.
On the meta device item(), bool(), tolist(), cpu(), numpy(), nonzero() and masks as indices raise. Packs are on the CPU,
as the loader makes them. The towers of transformers 5 still read, and the test of images gives them the values:

get_image_features, get_video_features (modeling_qwen2_vl.py): sizes of media as a list, to split features
get_vision_position_ids (vision_utils.py): sizes of media as a list, for the length of the result
VisionAttention.forward (modeling_qwen2_vl.py): bounds of media as a list, for attentions that take no bounds
torch_compilable_check (import_utils.py): number of placeholder tokens; TRANSFORMERS_DISABLE_TORCH_CHECK=1 leaves it out
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lmms_stream.loader.collate import collate, join
from lmms_stream.plugins.tasks.dpo import DPO
from lmms_stream.plugins.tasks.flow_matching import FlowMatching
from lmms_stream.plugins.tasks.images import collate_images
from lmms_stream.plugins.tasks.kto import KTO
from lmms_stream.plugins.tasks.masked_diffusion import MaskedDiffusion, MaskedModel, collate_whole
from lmms_stream.train.run.counts import StepReading
from lmms_stream.train.run.optimizers import clip_gradients, step_if_finite
from lmms_stream.train.tasks.causal import CausalLanguageModelling
from lmms_stream.train.tasks.reference import measured_log_probs
from lmms_stream.train.tasks.steps import TaskSteps
from lmms_stream.types import Batch, Role
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.versions import IS_5

from .images import DIT, NUM_CLASSES, SIZE
from .test_attention import build
from .vision import IDS, packed_model, samples_of

META = torch.device("meta")


@pytest.fixture(autouse=True)
def _fused_without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's fused AdamW runs on meta tensors, and refuses them by a list of devices."""
    monkeypatch.setattr(sys.modules["torch.optim.adam"], "_device_dtype_check_for_fused", lambda *_, **__: None)


@pytest.fixture
def _fake_group() -> Iterator[None]:
    """A process group whose collectives do nothing, on any device."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def step(task: Any, model: Any, packs: Sequence[Batch], **options: Any) -> None:
    """Two steps of a model without values: the second has moments."""
    model = model.train().to(META)
    steps = TaskSteps(task, model, device=META, sources=[""], per_device_batch=2, num_averaged=1, **options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for number in range(2):
        steps.begin_step(number)
        losses = steps.backward(packs, steps.units(packs))
        norm = clip_gradients(model.parameters(), 1.0)
        assert step_if_finite(optimizer, norm)
        optimizer.zero_grad()
    assert losses.device == norm.device == META
    with pytest.raises(NotImplementedError, match="meta"):
        _ = StepReading(norm, losses).values  # the only read of a step, of a copy that is queued before its update


def texts(number: int, *, collate: Any = collate) -> Any:
    rng = np.random.default_rng(number)
    every = [rng.integers(5, 100, length) for length in (9, 20, 14)[: 3 - number]]
    samples = [{"input_ids": ids, "labels": np.where(rng.random(len(ids)) < 0.7, ids, -100)} for ids in every]
    return collate(samples, range(len(samples)), micro_batch=number, pad_to=64)


@pytest.mark.parametrize(
    ("model_type", "attention", "logits_way"),
    [("llama", "sdpa_varlen", "chunks"), ("qwen3", "sdpa", "kept"), ("gemma3_text", "sdpa_varlen", "whole")],
)
def test_a_step_on_texts_reads_nothing(model_type: str, attention: Any, logits_way: Any) -> None:
    model = build(model_type, attention=attention, head_dim=8)
    model.logits_way = logits_way
    step(CausalLanguageModelling(z_loss=0.1), model, [texts(0), texts(1), texts(2)])
    model.gives_bounds = True  # as for kernels of recurrent layers
    assert model._inputs(texts(0).to(META))["seq_idx"].shape == (1, 64)


@pytest.mark.usefixtures("_fake_group")
@pytest.mark.parametrize("task", [DPO(), DPO(loss_type="ipo"), KTO()])
def test_a_step_on_answers_reads_nothing(task: Any) -> None:
    sequences = [[5, Role.CHOSEN], [4, Role.REJECTED]] if task.name == "dpo" else [[9, Role.CHOSEN]]
    ids = np.arange(5, 14)
    sample = {"input_ids": ids, "labels": np.where(ids % 5 < 2, -100, ids), "sequences": np.array(sequences)}
    packs = [task.collate([sample] * (2 + number), range(2 + number), micro_batch=number) for number in range(3)]
    model = build("llama", attention="sdpa")
    step(task, model, packs, reference=SimpleNamespace(log_probs=partial(measured_log_probs, model)))


def test_a_step_of_masked_diffusion_reads_nothing() -> None:
    model = MaskedModel(build("llama", attention="sdpa").model, mask_token_id=3)
    step(MaskedDiffusion(), model, [texts(0, collate=collate_whole), texts(1, collate=collate_whole)])


def test_a_step_of_flow_matching_reads_nothing() -> None:
    from diffusers import DiTTransformer2DModel

    task, zero = FlowMatching(), np.zeros(1, np.int64)
    media = {"pixel_values": np.zeros((1, 3, SIZE, SIZE), np.uint8), "class_labels": np.array([NUM_CLASSES - 1])}
    packs = [collate_images([{"input_ids": zero, "labels": zero, "media": media}] * 2, [0, 1]) for _ in range(3)]
    step(task, task.wrap(DiTTransformer2DModel.from_config(DIT)), packs)


@pytest.mark.skipif(not IS_5, reason="transformers 4 reads sizes of images in other functions")
@pytest.mark.parametrize(("attention", "counts_axes"), [("sdpa_varlen", False), ("sdpa", True)])
def test_a_step_on_images_reads_only_sizes(attention: Any, counts_axes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen2_vl import modeling_qwen2_vl as of_transformers

    def with_grids(get_features: Any, *args: Any, **named: Any) -> Any:
        given = signature(get_features).bind(*args, **named)
        patches, sizes, *_ = given.arguments
        given.arguments[sizes] = grids[len(given.arguments[patches])]
        return get_features(*given.args, **given.kwargs)

    monkeypatch.setenv("TRANSFORMERS_DISABLE_TORCH_CHECK", "1")
    packed = packed_model("qwen2_vl", attention=attention)
    samples = samples_of(packed.model, "images")
    packs = [collate(samples, range(2)), collate(samples[:1], [2])]
    if counts_axes:
        family: Any = packed.family
        family.num_axes, family.token_inputs = 0, ("mm_token_type_ids",)
        types = [{"mm_token_type_ids": 1 * (each["input_ids"] == IDS["image"])} for each in samples]
        samples = [{**one, "position_ids": (), "token_inputs": two} for one, two in zip(samples, types, strict=True)]
        expected, packs = packs[0].position_ids, [collate(samples, range(2)), collate(samples[:1], [2])]
        assert torch.equal(packed.with_axes(packs[0]).position_ids, expected)
    inputs = join(packs).inputs
    grids = {len(inputs["pixel_values"]): inputs["image_grid_thw"], 4: torch.tensor([[1, 2, 2]])}  # by patches
    for name in ("get_image_features", "get_video_features"):
        monkeypatch.setattr(packed.media_model, name, partial(with_grids, getattr(packed.media_model, name)))
    find = of_transformers.get_vision_position_ids
    monkeypatch.setattr(of_transformers, "get_vision_position_ids", lambda *a, **b: find(*a, **b).to(META))
    step(CausalLanguageModelling(), packed, packs)
