"""The proof of packing measures the noise of a model, and finds a leak of one token beneath it."""

from __future__ import annotations

import json
import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lmms_stream.errors import ConfigError
from lmms_stream.train.model import isolation
from lmms_stream.train.model.choice import prove_compiled, prove_packing
from lmms_stream.train.model.isolation import segments_of
from lmms_stream.train.model.model import PackedModel
from lmms_stream.train.model.verdict import prove_packing_once
from lmms_stream.train.report.train_log import read_log
from lmms_stream.types import Batch
from torch.distributed.fsdp import FSDPModule
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..conftest import write_tokens
from ..rounds import in_long_rounds, rounds
from .runs import trainer_of, write_run
from .test_attention import CPU, build, fault_of

LONG = {"max_position_embeddings": 1024}
# Of so large weights, each layer amplifies what rounding changed before it.
AMPLIFIES = {**LONG, "hidden_size": 64, "initializer_range": 0.2}
DEPTH = rounds(30, 80)  # roundings grow to 15 and 20 times what shallow models show; with experts to 4 and 6 times
DEEP = {**AMPLIFIES, "num_hidden_layers": DEPTH}
EXPERTS = {**AMPLIFIES, "num_hidden_layers": rounds(14, 24), "num_local_experts": 8}
LEAKS = "leaks_one_token"


def leaking(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:
    """One token, the first of the second sample, sees one that it must not see: the last of the first sample."""
    if attention_mask is not None:
        mask = attention_mask[0, 0]
        starts = torch.nonzero(~mask.diagonal(-1))[:, 0] + 1
        if len(starts):
            attention_mask = attention_mask.clone()
            attention_mask[..., starts[0], starts[0] - 1] = True
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


def leaky(**fields: Any) -> PackedModel:
    AttentionInterface.register(LEAKS, leaking)
    AttentionMaskInterface.register(LEAKS, sdpa_mask)
    model = build("llama", attention="sdpa", **fields)
    model.model.set_attn_implementation(LEAKS)
    return model


@pytest.mark.parametrize(
    "attention", ["sdpa", *(pytest.param(name, marks=in_long_rounds) for name in ("sdpa_varlen", "eager"))]
)
@pytest.mark.parametrize(
    "fields",
    [{"model_type": "llama", **DEEP}, pytest.param({"model_type": "mixtral", **EXPERTS}, marks=in_long_rounds)],
)
def test_a_model_that_amplifies_roundings_is_proven_in_bfloat16(fields: dict[str, Any], attention: str) -> None:
    prove_packing(build(**fields, attention=attention, dtype="bfloat16"), device=CPU)


class RoundedInPacks(PackedModel):
    """A model whose packs are rounded otherwise than samples alone, as by another kernel."""

    def logits(self, batch: Batch) -> torch.Tensor:
        with isolation._rounded_embeddings(self) if len(batch.cu_seqlens) > 2 else nullcontext():
            return super().logits(batch)


@in_long_rounds
def test_roundings_that_a_deep_model_amplifies_are_no_fault() -> None:
    model = RoundedInPacks(build("llama", attention="sdpa", dtype="bfloat16", **DEEP).model)
    prove_packing(model, device=CPU)
    tolerances = isolation.tolerances_of(model, bf16=False)
    with torch.no_grad():
        proof = isolation._Proof(model.eval(), tolerances, CPU)
        difference = (proof._packed - torch.cat(proof._alone)).square().mean(dim=-1).sqrt().max()
    assert difference > 2 * tolerances.alone * proof._spread  # more than shallow models show


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("fields", "depth"),
    [(LONG, 1), (AMPLIFIES, 1), (AMPLIFIES, DEPTH), pytest.param(LONG, DEPTH, marks=in_long_rounds)],
)
def test_one_token_that_leaks_is_found_whatever_the_depth(fields: dict[str, Any], depth: int, dtype: Any) -> None:
    fault = fault_of(leaky(dtype=dtype, **fields, num_hidden_layers=depth))
    assert fault == "does not keep the samples of a pack apart: what one holds changes what is predicted in another"


def test_positions_that_a_pack_gets_wrong_are_found_in_a_deep_model(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = PackedModel._inputs

    def shifted(self: PackedModel, batch: Any) -> dict[str, Any]:
        positions = batch.position_ids * (2 if len(batch.cu_seqlens) > 2 else 1)
        return inputs(self, batch) | {"position_ids": positions}

    monkeypatch.setattr(PackedModel, "_inputs", shifted)
    model = build("llama", attention="sdpa_varlen", dtype="bfloat16", **DEEP)
    assert fault_of(model) == "predicts another thing for a sample in a pack than for the sample alone"


def test_the_proof_runs_more_tokens_than_flex_attention_has_other_kernels_for() -> None:
    assert sum(map(len, segments_of(build("llama", **LONG)))) >= 300
    assert min(map(len, segments_of(build("llama", **LONG)))) >= 128
    assert sum(map(len, segments_of(build("llama", max_position_embeddings=64)))) <= 64


def test_one_line_says_which_attention_was_chosen_and_why_not_those_before(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lmms_stream")
    model = build("gemma2", head_dim=8)
    prove_packing(model, device=CPU)
    (line,) = caplog.messages
    assert line.startswith("attention: eager; ")
    assert "not flash_attention_2, which needs CUDA and pip install flash-attn" in line
    assert "not sdpa_varlen, which leaves out the softcap of attention scores" in line
    caplog.clear()
    prove_packing(build("llama", attention="eager"), device=CPU)
    assert caplog.messages == ["attention: eager"]


def test_an_attention_that_cannot_be_set_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lmms_stream")
    model = build("llama")
    set_attention = model.model.set_attn_implementation

    def failing(attention: str) -> None:
        if attention == "sdpa_varlen":
            raise ValueError("no kernel image is available")
        set_attention(attention)

    monkeypatch.setattr(model.model, "set_attn_implementation", failing)
    prove_packing(model, device=CPU)
    assert model.model.config._attn_implementation == "sdpa"
    assert "not sdpa_varlen, which cannot be set (no kernel image is available)" in caplog.messages[0]
    monkeypatch.setattr(model.model, "attention_choices", ["sdpa_varlen"])
    with pytest.raises(ConfigError, match=r"attention sdpa_varlen cannot be set \(no kernel image is available\):"):
        prove_packing(model, device=CPU)


@pytest.fixture
def proofs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The attentions of the packs that were run for a proof, with an empty cache folder."""
    found: list[str] = []
    logits = PackedModel.logits

    def counted(self: PackedModel, batch: Batch) -> torch.Tensor:
        found.append(self.model.config._attn_implementation)
        return logits(self, batch)

    monkeypatch.setattr(PackedModel, "logits", counted)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return found


def test_a_restart_does_not_pay_for_the_proof(
    proofs: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tokens(tmp_path / "data", num_samples=50)
    losses = []
    for start in ("first", "second"):
        (tmp_path / start).mkdir()
        run = write_run(tmp_path / start / "run.yaml", tmp_path / "data", max_steps=2, global_batch=2)
        caplog.clear()
        with caplog.at_level(logging.INFO, "lmms_stream"):
            trainer_of(run).train()
        (line,) = (each for each in caplog.messages if each.startswith("attention: "))
        losses.append([record["loss"] for record in read_log(tmp_path / start / "default") if "loss" in record])
        assert bool(proofs) == (start == "first")
        proofs.clear()
    assert line == "attention: sdpa_varlen, by an earlier start's proof of the same model, versions and device"
    assert losses[0] == losses[1]


def test_a_kept_verdict_is_of_the_same_model_device_numbers_and_versions_only(
    proofs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_proven(model: PackedModel, **options: Any) -> bool:
        proofs.clear()
        prove_packing_once(model, device=CPU, **options)
        return bool(proofs)

    assert is_proven(build("llama"))
    assert not is_proven(build("llama"))
    assert is_proven(build("llama", attention="sdpa"))
    assert is_proven(build("llama"), bf16=True)
    assert is_proven(build("llama", dtype="bfloat16"))
    assert is_proven(build("llama", num_hidden_layers=3))
    assert is_proven(build("qwen2"))
    monkeypatch.setattr("lmms_stream.processors.base.version", lambda package: "7.0.0")
    assert is_proven(build("llama"))
    assert not is_proven(build("llama"))


def test_code_of_other_packages_is_proven_at_each_start(proofs: list[str], tmp_path: Path) -> None:
    def hooked() -> PackedModel:
        model = build("llama")
        model.model.model.norm.register_forward_hook(lambda *_: None)
        return model

    for make in (lambda: RoundedInPacks(build("llama").model), hooked):
        for _ in range(2):
            proofs.clear()
            prove_packing_once(make(), device=CPU)
            assert proofs
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"described": {}, "result": {}}', b"\x80\x04N.", '{"result": {"attention": "eager"}}']
)
def test_a_damaged_or_foreign_file_of_a_verdict_is_written_again(
    content: str | bytes, proofs: list[str], tmp_path: Path
) -> None:
    prove_packing_once(build("llama"), device=CPU)
    (file,) = (tmp_path / "cache").rglob("*.json")
    good = file.read_text()
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    proofs.clear()
    prove_packing_once(build("llama"), device=CPU)
    assert proofs
    assert file.read_text() == good


def test_a_verdict_that_cannot_be_set_is_not_taken(proofs: list[str], tmp_path: Path) -> None:
    prove_packing_once(build("llama"), device=CPU)
    (file,) = (tmp_path / "cache").rglob("*.json")
    good = file.read_text()
    for name, other in (("attention", "no_such_attention"), ("logits_way", "no_such_way")):
        kept = json.loads(good)
        file.write_text(json.dumps({**kept, "result": {**kept["result"], name: other}}))
        proofs.clear()
        prove_packing_once(build("llama"), device=CPU)
        assert proofs
        assert file.read_text() == good


def leak_between_tokens(model: PackedModel) -> None:
    """Each block is given, for each token, some of the token before it, as a compiler's mistake could do."""

    def mix(_: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *others = inputs
        return (hidden + 0.1 * hidden.roll(1, dims=1), *others)

    for layer in model.model.model.layers:
        layer.register_forward_pre_hook(mix)


def test_what_was_compiled_is_proven_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    prove_packing(model, device=CPU)
    prove_compiled(model, device=CPU)
    write_tokens(tmp_path / "data", num_samples=50)
    run = write_run(tmp_path / "run.yaml", tmp_path / "data", max_steps=1, torch_compile=True)
    compiled: list[PackedModel] = []

    def wrongly(model: PackedModel) -> None:
        assert isinstance(model, FSDPModule)
        compiled.append(model)
        leak_between_tokens(model)

    monkeypatch.setattr("lmms_stream.train.parts.compile_blocks", wrongly)
    with pytest.raises(ConfigError, match="with attention sdpa_varlen, compiled, does not keep the samples of a pac"):
        trainer_of(run).build()
    assert compiled
