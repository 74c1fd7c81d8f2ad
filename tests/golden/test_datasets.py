"""Datasets that 67b50f60 wrote: samples, lengths, fingerprints and batches are read as it read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .datasets import PROCESSORS, facts_of, mosaic_facts
from .digests import STORED, differing, file_sums, read_json

FACTS: dict[str, Any] = read_json(STORED / "datasets.json")


def test_the_files_are_those_that_the_first_commit_wrote() -> None:
    assert differing(read_json(STORED / "sums.json"), file_sums(STORED)) == []


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_stored_dataset_gives_the_same_samples_lengths_and_batches(name: str, stored: Path) -> None:
    computed, expected = facts_of(name, stored), FACTS[name]
    assert computed["lengths"] == computed["measured"]
    batches, expected_batches = computed.pop("batches"), expected["batches"]
    assert differing({key: value for key, value in expected.items() if key != "batches"}, computed) == []
    assert len(batches) == len(expected_batches) > 0
    for batch, expected_batch in zip(batches, expected_batches, strict=True):
        inputs, expected_inputs = batch.pop("inputs"), expected_batch["inputs"]
        assert differing({key: value for key, value in expected_batch.items() if key != "inputs"}, batch) == []
        assert inputs.keys() == expected_inputs.keys()
        for key, values in expected_inputs.items():
            assert inputs[key] | {"close": None} == values | {"close": None}, key
            assert inputs[key].get("close") == pytest.approx(values.get("close"), abs=1e-3), key


def test_samples_of_mosaicmls_writer_are_read_by_number(stored: Path) -> None:
    assert mosaic_facts(stored) == read_json(STORED / "mosaic.json")
