"""What a run computes in: bfloat16 and TF32 by default where a GPU has them, and what CPUs do as ever."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lmms_stream.train.run.precision import set_deterministic, set_tf32, uses_tf32, with_precision
from lmms_stream.train.run.settings import TrainConfig

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def config(**settings: Any) -> TrainConfig:
    return TrainConfig(output_dir="out", global_batch=1, max_steps=1, **settings)


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before, fills = torch.get_float32_matmul_precision(), torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    torch.set_float32_matmul_precision(before)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


@pytest.mark.parametrize(("said", "has_gpu", "has_bf16", "computed"), [
    (None, True, True, True), (None, True, False, False), (None, False, True, False),
    (False, True, True, False), (True, False, False, True),
])  # fmt: skip
def test_bfloat16_is_computed_in_where_a_gpu_has_it_unless_the_run_says_otherwise(
    said: bool | None, has_gpu: bool, has_bf16: bool, computed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: has_bf16)
    assert with_precision(config(bf16=said)).bf16 is computed


@pytest.mark.parametrize(("settings", "before", "after"), [
    ({"bf16": True}, "highest", "high"), ({"bf16": False}, "highest", "highest"), ({"bf16": False}, "high", "high"),
    ({"bf16": False, "tf32": True}, "highest", "high"), ({"bf16": True, "tf32": False}, "high", "highest"),
])  # fmt: skip
def test_products_of_float32_are_in_tf32_beside_bfloat16_or_where_a_run_asks_for_it_and_the_log_says_so(
    settings: dict[str, bool], before: Any, after: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.set_float32_matmul_precision(before)
    with caplog.at_level(logging.INFO, "lmms_stream"):
        set_tf32(config(**settings), GPU)
    assert torch.get_float32_matmul_precision() == after
    assert uses_tf32(GPU) is (after == "high")
    computed = "bfloat16" if settings["bf16"] else "the format of the parameters"
    said = f"numbers: computed in {computed}; products of float32 numbers in TF32: {'yes' if after == 'high' else 'no'}"
    assert [record.getMessage() for record in caplog.records] == [said]


def test_a_deterministic_run_has_only_deterministic_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    set_deterministic(config())
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    set_deterministic(config(deterministic=True))
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.ones(2))


def test_on_a_cpu_nothing_is_set_or_said(caplog: pytest.LogCaptureFixture) -> None:
    torch.set_float32_matmul_precision("highest")
    with caplog.at_level(logging.INFO, "lmms_stream"):
        set_tf32(config(bf16=True, tf32=True), CPU)
    assert torch.get_float32_matmul_precision() == "highest"
    assert not uses_tf32(CPU)
    assert not caplog.records
