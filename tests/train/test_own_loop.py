"""Batches give transformers models, in a loop of one's own, the arguments that keep the samples of a pack apart."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lmms_stream import check_isolation
from lmms_stream.errors import ConfigError
from lmms_stream.loader.collate import collate
from lmms_stream.processors.base import Processor
from lmms_stream.types import Batch
from transformers import AutoConfig, AutoModelForCausalLM

from . import every_model, vision
from .test_isolation import leaky
from .test_model import TINY

GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4}


def made(model_type: str, *, attention: str = "sdpa", **fields: Any) -> Any:
    """As a user makes it, in eval mode, with transformers alone."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**TINY, "pad_token_id": 0, **fields})
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def pack(*lengths: int, vocabulary: int = 100) -> Batch:
    rng = np.random.default_rng(1)
    ids = [rng.integers(5, vocabulary, length) for length in lengths]
    return collate([{"input_ids": each, "labels": each} for each in ids], range(len(ids)))


def logits_alone(model: Any, batch: Batch) -> torch.Tensor:
    bounds = pairwise(batch.cu_seqlens.tolist())
    return torch.cat([model(input_ids=batch.input_ids[:, start:stop]).logits[0] for start, stop in bounds])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("model_type", "fields"), [("llama", {}), ("gpt2", GPT2), ("mistral", {"sliding_window": 8})])
def test_a_pack_gives_the_logits_of_its_samples_alone(model_type: str, fields: dict[str, Any], attention: str) -> None:
    model, batch = made(model_type, attention=attention, **fields), pack(7, 12, 9)
    with torch.no_grad():
        alone = logits_alone(model, batch)
        found = model(**batch.for_model(model)).logits[0]
        mixed = model(input_ids=batch.input_ids, position_ids=batch.position_ids).logits[0]
    assert (found - alone).abs().max() < 1e-5 * alone.std()
    assert (mixed - alone).abs().max() > 1e-3 * alone.std()  # what it is for


def test_a_batch_is_read_as_a_mapping_and_mixes_no_samples_in_a_model() -> None:
    model, several, one = made("llama"), pack(5, 6), pack(9)
    assert [*several] == [*several.keys()] == ["input_ids", "labels", "position_ids", "attention_mask"]
    assert several["input_ids"] is several.input_ids
    assert "labels" in several
    with pytest.raises(ConfigError, match=r"has several samples, .* would mix them: call model\(\*\*batch.for_model"):
        model(**several)
    given = {name: value.to("cpu") for name, value in one.items()}
    expected = model(**one.for_model(model)).logits
    torch.testing.assert_close(model(**given).logits, expected)
    torch.testing.assert_close(model(**one).logits, expected)


def test_the_proof_leaves_modes_gradients_and_random_numbers_as_they_were() -> None:
    model = made("llama").train()
    model.model.layers[0].eval()
    model(**pack(9).for_model(model)).logits.sum().backward()  # one sample, which needs no proof
    before = [parameter.grad.clone() for parameter in model.parameters()]
    modes, state = [module.training for module in model.modules()], torch.get_rng_state()
    names = list(model.state_dict())
    check_isolation(model, pack(5, 6))
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(grad.equal(parameter.grad) for grad, parameter in zip(before, model.parameters(), strict=True))
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("model_type", ["llama", "bloom", "mamba"])
def test_layers_that_mix_samples_run_on_each_alone(model_type: str) -> None:
    """Attention that leaks; attention without positions; recurrent layers."""
    model: Any
    if model_type == "llama":
        model = leaky(max_position_embeddings=1024).model
    else:
        model = made(model_type, num_hidden_layers=2, n_head=4, attention="eager")
    batch = pack(5, 6)
    with torch.no_grad():
        found = model.eval()(**batch.for_model(model)).logits[0]
        assert (found - logits_alone(model, batch)).abs().max() < 1e-5
        joined = model(input_ids=batch.input_ids, use_cache=False).logits[0]
        assert (found - joined).abs().max() > 1e-3
    check_isolation(model, batch)


def test_a_model_that_mixes_samples_takes_packs_of_one_as_the_error_says() -> None:
    model = made("bart", d_model=32, decoder_layers=1, decoder_attention_heads=4, attention="eager")
    with pytest.raises(
        ConfigError,
        match=r"BartForCausalLM with attention eager takes no position_ids, .*\(max_samples_per_pack=1, wi",
    ):
        pack(5, 6).for_model(model)
    batch = pack(11)
    with torch.no_grad():
        found = model.eval()(**batch.for_model(model)).logits
        assert found.equal(model(input_ids=batch.input_ids, use_cache=False).logits)


@pytest.mark.parametrize(("model_type", "attention"), [("gpt_oss", "flash_attention_2"), ("gemma2", "sdpa")])
def test_an_attention_that_leaves_something_out_is_refused_as_in_a_run(model_type: str, attention: str) -> None:
    model = every_model.build("causal", model_type, "eager")
    model.config._attn_implementation = attention  # as versions of transformers do
    with pytest.raises(
        ConfigError, match=rf"with attention {attention} leaves out the s.*: call model.set_attn_.*\(.eager.\), or make"
    ):
        pack(5, 6).for_model(model)
    model.set_attn_implementation("eager")
    check_isolation(model, pack(5, 6))


class OfImages(SimpleNamespace):
    """As much of a processor as tells the family of its media."""


def test_media_are_given_as_the_processors_family_says() -> None:
    model = vision.build("qwen2_5_vl", attention="sdpa").eval()
    processor: Processor = OfImages(family=vision.Family("qwen2_5_vl"))
    samples = vision.samples_of(model, "images")
    batch = collate(samples, range(len(samples)))
    with pytest.raises(
        ConfigError, match=r"media \(pixel_values, image_grid_thw\), .*: call batch\.for_model\(model, pr"
    ):
        batch.for_model(model)
    with torch.no_grad():
        found = model(**batch.for_model(model, processor)).logits[0]
        alone = [model(**collate([each], [0]).for_model(model, processor)).logits[0] for each in samples]  # one by one
    assert (found - torch.cat(alone)).abs().max() < 1e-4
    model.set_attn_implementation("eager")
    check_isolation(model, batch, processor)


def test_what_a_wrapper_holds_is_what_is_proven() -> None:
    model = made("llama")
    batch = pack(5, 6)
    for wrapped in (torch.nn.DataParallel(model), torch.compile(model)):
        assert batch.for_model(wrapped).keys() == batch.for_model(model).keys()
    with pytest.raises(
        ConfigError, match="a Linear is not a model of transformers: for_model cannot know its arguments"
    ):
        batch.for_model(torch.nn.Linear(2, 2))


def test_packs_that_a_model_cannot_take_are_refused_by_the_number() -> None:
    model = made("gpt2", max_position_embeddings=16, **GPT2)
    check_isolation(model, pack(5, 6))
    with pytest.raises(ConfigError, match="a sample of 17 tokens is longer than the model's 16 positions: lower"):
        pack(4, 17).for_model(model)
    with pytest.raises(ConfigError, match=r"token id \d+ in sample \d is none of the model's"):
        check_isolation(model, pack(5, 6, vocabulary=100_000))


def logits_of_rows(model: Any, arguments: dict[str, Any]) -> torch.Tensor:
    logits: torch.Tensor = model(**{name: value for name, value in arguments.items() if name != "labels"}).logits
    return logits[arguments["attention_mask"].bool()]


def test_rows_of_samples_give_their_logits_and_labels_to_models_that_cannot_take_packs() -> None:
    model, batch = made("gpt2", **GPT2), pack(7, 12, 9)
    rows = batch.for_model(model, layout="padded", labels=True)
    assert rows["input_ids"].shape == rows["labels"].shape == (3, 12)
    with torch.no_grad():
        alone = logits_alone(model, batch)
        assert (logits_of_rows(model, rows) - alone).abs().max() < 1e-5 * alone.std()
    assert torch.equal(rows["labels"][rows["attention_mask"].bool()], batch.labels[0])
    assert int((rows["labels"] != -100).sum()) == batch.num_loss_tokens
    assert "labels" not in batch.for_model(torch.nn.Linear(2, 2), layout="padded")  # any model
    with pytest.raises(ConfigError, match="layout 'rows' is not known: choose one of packed, padded"):
        batch.for_model(model, layout="rows")  # type: ignore[arg-type]
    only_padding = collate([], [], pad_to=5).for_model(model, layout="padded", labels=True)
    assert model(**only_padding, num_items_in_batch=1).loss == 0


def test_rows_hold_the_media_of_their_samples() -> None:
    model = vision.build("qwen2_5_vl", attention="sdpa").eval()
    processor: Processor = OfImages(family=vision.Family("qwen2_5_vl"))
    samples = vision.samples_of(model, "images")
    batch = collate(samples, range(len(samples)))
    with torch.no_grad():
        packed = model(**batch.for_model(model, processor)).logits[0]
        found = logits_of_rows(model, batch.for_model(model, processor, layout="padded"))
    assert (found - packed).abs().max() < 1e-4
