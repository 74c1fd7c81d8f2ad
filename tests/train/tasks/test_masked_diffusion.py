"""Masked diffusion: a pack gives the published loss of each sample, whose masks follow from seed, step and id."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from lmms_stream.config import load_config
from lmms_stream.errors import ConfigError
from lmms_stream.loader.collate import join
from lmms_stream.plugins.tasks.masked_diffusion import MaskedDiffusion, MaskedModel, collate_whole
from lmms_stream.processors.text import DocumentsProcessor, TextProcessor
from lmms_stream.train.model.build import ModelConfig
from lmms_stream.train.model.choice import prove_packing
from lmms_stream.train.report.train_log import read_log
from lmms_stream.train.run_config import RunConfig
from lmms_stream.train.tasks.registry import build_task
from lmms_stream.train.tasks.task import Draw
from lmms_stream.types import Batch, Processed
from torch.nn.functional import cross_entropy

from ...conftest import write_tokens
from ...processors.tiny_vlm import save_tokenizer
from ..runs import MODEL, trainer_of, write_run
from ..test_model import samples

CPU = torch.device("cpu")
MASK = 500
DRAW = Draw(seed=3, step=7)


def masked_model(**fields: Any) -> MaskedModel:
    model = ModelConfig(config=MODEL | fields, attention="sdpa_varlen").build()
    return MaskedModel(model, mask_token_id=MASK)


def documents() -> list[Processed]:
    """Samples of which all tokens are learnt, and of several documents."""
    rng = np.random.default_rng(1)
    made: list[Processed] = []
    for lengths in ((40,), (13, 50), (1,)):
        ids = rng.integers(0, 128, sum(lengths))
        row = {"input_ids": ids, "loss_spans": [(0, len(ids))], "document_starts": np.cumsum([0, *lengths[:-1]])}
        made.append(DocumentsProcessor().process(row))
    return made


@pytest.mark.parametrize("made", [samples(), documents()])
def test_packs_give_the_published_loss_and_its_gradients_sequence_by_sequence(made: list[Processed]) -> None:
    task, model = MaskedDiffusion(), masked_model()
    plain = ModelConfig(config=MODEL, attention="sdpa").build()
    plain.load_state_dict(model.model.state_dict())
    packs = [collate_whole(made[:2], [0, 1], pad_to=120), collate_whole(made[2:], range(2, len(made)), pad_to=70)]
    expected = torch.zeros(())
    for pack in packs:
        masked = task.mask(pack, DRAW, token_id=MASK)
        weights = np.zeros(pack.num_tokens, np.float32)
        weights[masked.pack.labels[0] != -100] = masked.weights
        bounds = pack.cu_seqlens.tolist()
        for start, stop in pairwise(bounds[: pack.num_segments + 1]):
            ids = masked.pack.input_ids[:, start:stop]
            sees_all = torch.zeros(1, 1, stop - start, stop - start)
            logits = plain(input_ids=ids, attention_mask=sees_all).logits[0]
            losses = cross_entropy(logits, masked.pack.labels[0, start:stop], reduction="none", ignore_index=-100)
            expected = expected + (losses * torch.from_numpy(weights[start:stop])).sum()
    expected.backward()
    found = task.losses(model, join(packs), packs, DRAW)["tokens"]
    found.total.backward()
    torch.testing.assert_close(found.total, expected, rtol=1e-5, atol=0)
    assert float(found.of_packs.sum()) == pytest.approx(expected.item(), rel=1e-5)
    for (name, one), two in zip(model.model.named_parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert two.grad is not None
        assert (one.grad - two.grad).norm() <= 1e-5 * two.grad.norm(), name


def masks(pack: Batch, draw: Draw = DRAW) -> list[tuple[list[int], float]]:
    """Of each sample of a pack of samples() its masked tokens and its 1 / p."""
    masked = MaskedDiffusion().mask(pack, draw, token_id=MASK)
    weights = np.zeros(pack.num_tokens)
    weights[masked.pack.labels[0] != -100] = masked.weights
    of_samples = [weights[start:stop] for start, stop in pack.sample_bounds]
    return [(np.flatnonzero(each).tolist(), float(each.max())) for each in of_samples]


def test_masks_of_a_sample_are_the_same_in_any_pack_and_others_in_each_step() -> None:
    made = samples()
    together = masks(collate_whole(made, range(4)))
    turned = masks(collate_whole(made[::-1], [3, 2, 1, 0], pad_to=99))[::-1]
    alone = [masks(collate_whole([each], [number]))[0] for number, each in enumerate(made)]
    assert together == turned == alone
    pack = collate_whole(made, range(4))
    assert masks(pack, replace(DRAW, step=8)) != together
    assert masks(pack, replace(DRAW, seed=4)) != together
    assert masks(replace(pack, source="other")) != together
    repeated = masks(replace(pack, repeats=[0, 1, 0, 2]))
    assert [one == other for one, other in zip(repeated, together, strict=True)] == [True, False, True, False]
    pieces = [made[2], {**made[2], "input_ids": made[2]["input_ids"][::-1].copy()}]  # of a sample that was cut
    one, two = masks(collate_whole(pieces, [2, 2]))
    assert one != two


def test_shares_of_masked_tokens_are_uniform_and_only_loss_tokens_are_masked() -> None:
    ids = np.arange(400)
    labels = np.where(ids < 300, ids, -100)
    pack = collate_whole([{"input_ids": ids, "labels": labels}] * 400, range(400))
    masked = masks(pack)
    shares = np.sort([len(where) / 300 for where, _ in masked])
    assert (
        np.abs(shares - np.linspace(0.01, 0.99, 400)).max() < 1.95 / 400**0.5
    )  # Kolmogorov: 1 seed in 1000 is further
    assert all(where[-1] < 300 and abs(len(where) / 300 - 1 / weight) < 0.12 for where, weight in masked)
    assert any(where[0] == 0 for where, _ in masked)  # the first token, too
    assert MaskedDiffusion().units(pack) == {"tokens": 300 * 400, "z": 300 * 400, "router": 400 * 400}
    # In expectation the loss of a model that knows nothing is the log of the vocabulary, whatever p is.
    assert sum(len(where) * weight for where, weight in masked) / (300 * 400) == pytest.approx(1, abs=0.02)


def test_a_pack_without_samples_has_no_loss_and_can_be_differentiated() -> None:
    model, pack = masked_model(), collate_whole([], [])
    found = MaskedDiffusion().losses(model, pack, [pack], DRAW)["tokens"]
    assert found.total.item() == 0
    found.total.backward()


def test_the_proof_holds_for_attention_in_both_directions_alone() -> None:
    model = MaskedModel(ModelConfig(config=MODEL).build(), mask_token_id=MASK)
    prove_packing(model, device=CPU)
    assert (model.model.config._attn_implementation, model.model.config.is_causal) == ("sdpa_varlen", False)
    for module in model.model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = True
    with pytest.raises(ConfigError, match="does not let tokens see those behind them"):
        prove_packing(model, device=CPU)


def test_the_mask_token_is_the_tokenizers_or_the_first_row_behind_its_tokens(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path)
    processor = TextProcessor(tokenizer)
    built = ModelConfig(config=MODEL | {"vocab_size": len(tokenizer) + 1}).build()
    model = MaskedModel(built)
    with pytest.raises(ConfigError, match=r"has no mask token, .* set mask_token_id"):
        _ = model.token_id
    model.check_processor(processor)
    assert model.token_id == built.config.mask_token_id == len(tokenizer)
    assert MaskedModel(built, mask_token_id=5).token_id == 5
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    del built.config.mask_token_id
    model = MaskedModel(built)
    model.check_processor(TextProcessor(tokenizer))
    assert model.token_id == tokenizer.mask_token_id
    small = MaskedModel(ModelConfig(config=MODEL | {"vocab_size": processor.tokenizer.num_ids}).build())
    with pytest.raises(ConfigError, match=r"would be token \d+, and the model has \d+: resize its embedding"):
        small.check_processor(processor)


def test_what_it_cannot_train_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"p_min 0 and p_max 0.99 .* 0 < p_min <= p_max <= 1: correct them"):
        build_task("masked_diffusion", {"p_min": 0})
    mistral = {"model_type": "mistral", "sliding_window": 8, "num_key_value_heads": 4}
    with pytest.raises(ConfigError, match="needs a model whose layers can see the whole sample, and"):
        masked_model(**mistral)
    with pytest.raises(ConfigError, match="learns from texts, and these samples have media"):
        MaskedDiffusion().packed_model(masked_model().model, object())
    shared = masked_model()
    shared.sequence = object()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="sequence_parallel is only for causal models"):
        MaskedDiffusion().check(shared, device=CPU, bf16=False, is_compiled=False)


def test_a_small_run_learns(tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", num_samples=60)
    run = write_run(tmp_path / "run.yaml", tmp_path / "data", max_steps=30, learning_rate=1e-2, global_batch=4)
    task = {"type": "masked_diffusion", "p_min": 0.3, "mask_token_id": 511}
    run.write_text(yaml.safe_dump(yaml.safe_load(run.read_text()) | {"task": task}))
    trainer = trainer_of(run, task=load_config(RunConfig, run).build_task())
    trainer.train()
    first, *_, last = [record["loss"] for record in read_log(tmp_path / "default") if "loss" in record]
    assert first == pytest.approx(6.24, rel=0.15)
    assert last < 0.9 * first
