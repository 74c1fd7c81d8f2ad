"""Checkpoints that 67b50f60 saved: runs resume from them, and their ledgers tell the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lmms_stream.train.checkpoint import export, export_adapter
from lmms_stream.train.checkpoint.export import export_checkpoint

from .digests import STORED, changed_values, read_json
from .run_cases import RUNS, SAVED, ledgers, train

FACTS: dict[str, Any] = read_json(STORED / "runs.json")


@pytest.mark.parametrize("name", RUNS)
def test_a_run_resumes_from_a_stored_checkpoint_with_the_same_samples_and_losses(
    name: str, stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(stored)
    assert [path.name for path in Path(f"runs/{name}/checkpoints").glob("step-*")] == [f"step-{SAVED:08}"]
    log, expected = train(name, "train.save_steps=no", "train.resume=auto"), FACTS[name]["log"]
    assert [(each["step"], each["sample_ids"]) for each in log] == [
        (each["step"], each["sample_ids"]) for each in expected
    ]
    assert [each["loss"] for each in log] == pytest.approx([each["loss"] for each in expected], abs=1e-5)


@pytest.mark.parametrize("name", RUNS)
def test_the_ledgers_of_a_stored_run_are_the_same(name: str, stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(stored)
    computed, expected = ledgers(name), FACTS[name]["ledgers"]
    for kind in ("checkpoint", "config") if name != "window" else ("checkpoint",):  # a new run has other packs
        assert changed_values(expected[kind], computed[kind]) == [], kind


@pytest.mark.parametrize("name", ["deal", "lora"])
def test_the_checkpoint_of_a_stored_run_is_exported_and_proved(
    name: str, stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(stored)
    checkpoint = Path(f"runs/{name}/checkpoints/step-{SAVED:08}").absolute()
    proved: list[Path] = []
    for module in (export, export_adapter):
        prove = module.prove_written

        def proof(*args: Any, prove: Any = prove) -> None:
            prove(*args)
            proved.append(args[0])

        monkeypatch.setattr(module, "prove_written", proof)
    folder = export_checkpoint(checkpoint, tmp_path / "out")
    assert len(proved) == 1
    assert {*folder.glob("*.safetensors")}


def test_every_stored_run_has_a_case() -> None:
    assert [*FACTS] == [*RUNS]
