"""Attention by torch's kernel for packs, and the choice of the fastest among those that pass the proof."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from lmms_stream.errors import ConfigError
from lmms_stream.loader.collate import collate
from lmms_stream.train.model.attention import VARLEN
from lmms_stream.train.model.build import ModelConfig
from lmms_stream.train.model.choice import prove_packing, step_seconds
from lmms_stream.train.model.model import PackedModel
from lmms_stream.train.tasks.task import in_thread, on_device

from ..versions import declared
from .test_model import TINY

CPU = torch.device("cpu")


def build(model_type: str, **fields: Any) -> PackedModel:
    return PackedModel(
        ModelConfig(config=declared({"model_type": model_type, **TINY, "pad_token_id": 0, **fields})).build()
    )


def varlen_on_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor,
    max_q: int, max_k: int, *, scale: float, window_size: tuple[int, int], enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """What torch.nn.attention.varlen documents of varlen_attn, which runs on GPUs alone: float[T, heads, d]."""
    assert cu_seq_q is cu_seq_k
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert max_q == max_k == int(cu_seq_q.diff().max())
    made, (left, right) = [], window_size
    for start, stop in pairwise(cu_seq_q.tolist()):
        q, k, v = (each[start:stop].transpose(0, 1) for each in (query, key, value))
        seen = torch.ones(stop - start, stop - start, dtype=torch.bool)
        seen = seen if right < 0 else seen.tril(right)
        seen = seen if left < 0 else seen.triu(-left)
        made.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=enable_gqa))
    return torch.cat(made, dim=1).transpose(0, 1)


def varlen_of_torch_2_11(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor,
    max_q: int, max_k: int, *, scale: float, window_size: tuple[int, int],
) -> torch.Tensor:  # fmt: skip
    """Groups of heads without a flag: on an H200 results and gradients were equal to those of repeated heads."""
    is_grouped = query.shape[1] != key.shape[1]
    return varlen_on_cpu(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size, enable_gqa=is_grouped
    )


@pytest.mark.parametrize(
    ("model_type", "fields", "kernel"),
    [
        ("llama", {"num_key_value_heads": 2}, varlen_on_cpu),
        ("llama", {"num_key_value_heads": 2}, varlen_of_torch_2_11),
        ("mistral", {"sliding_window": 4}, varlen_on_cpu),
    ],
)
def test_torchs_kernel_for_packs_is_given_what_it_documents(
    model_type: str, fields: dict[str, Any], kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses and gradients are those of a mask; the kernel itself is stood in for by its documentation."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    model = build(model_type, attention_dropout=0.0, **fields)
    rng = np.random.default_rng(3)
    samples = [{"input_ids": (ids := rng.integers(5, 60, length)), "labels": ids} for length in (5, 23, 1, 9)]
    batch, of = collate(samples, range(4), pad_to=48), {}
    for attention in (VARLEN, "eager"):
        model.model.set_attn_implementation(attention)
        model.zero_grad()
        losses = model(batch).tokens
        losses.sum().backward()
        grads = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
        of[attention] = torch.cat([losses.detach(), *grads])
    assert (of[VARLEN] - of["eager"]).norm() <= 1e-5 * of["eager"].norm()


def test_torchs_kernel_for_packs_needs_a_gpu() -> None:
    with pytest.raises(ConfigError, match="attention varlen needs CUDA: choose sdpa_varlen, sdpa, eager or auto"):
        ModelConfig(config={"model_type": "llama", **TINY}, attention="varlen").build()


@pytest.mark.parametrize(("fastest", "slow"), [("sdpa", "sdpa_varlen"), ("sdpa_varlen", "sdpa")])
def test_of_those_that_pass_the_proof_the_fastest_is_taken_where_they_are_timed(
    fastest: str, slow: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a GPU. On the CPU none is timed, so that a run goes on with the attention that it began with."""
    model = build("llama")
    with caplog.at_level(logging.INFO, "lmms_stream"):
        prove_packing(model, device=CPU, trial=lambda it, _: 1.0 + (it.model.config._attn_implementation == slow))
    assert model.model.config._attn_implementation == fastest
    assert f"attention: {fastest}; not " in caplog.text
    assert f"not {slow}, which takes 2.00 times as long" in caplog.text
    other = build("llama")
    prove_packing(other, device=CPU)
    assert other.model.config._attn_implementation == "sdpa_varlen"


def test_a_trial_runs_a_step_and_leaves_no_gradient() -> None:
    model = build("llama", max_position_embeddings=64)
    assert 0 < step_seconds(model, CPU) < float("inf")
    assert all(parameter.grad is None for parameter in model.parameters())


def test_batches_are_copied_in_their_order_and_on_a_cpu_when_they_are_asked_for() -> None:
    taken: list[int] = []

    def batches() -> Any:
        for number in range(3):
            taken.append(number)
            yield collate([{"input_ids": [number + 1], "labels": [1]}], [number])

    copied = on_device(batches(), CPU)
    assert next(copied).input_ids.tolist() == [[1]]
    assert taken == [0]
    assert [batch.input_ids.tolist() for batch in copied] == [[[2]], [[3]]]


def test_batches_are_made_in_a_thread_two_ahead_and_an_error_comes_in_its_turn() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for number in range(6):
            taken.append(number)
            yield number

    def make(number: int) -> tuple[int, str]:
        if number == 4:
            raise ValueError("the fifth")
        return number, threading.current_thread().name

    with ThreadPoolExecutor(1, "copies") as thread:
        made, found = in_thread(make, items(), thread=thread), []
        for each in range(4):
            found.append(next(made))
            assert taken == list(range(min(each + 3, 6)))
        with pytest.raises(ValueError, match="the fifth"):
            next(made)
    assert found == [(number, "copies_0") for number in range(4)]
