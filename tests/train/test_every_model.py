"""Every model of transformers trains on packs as docs/families.md says, or is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers

from ..rounds import in_long_rounds
from .every_model import TRAINED, table

PAGE = (Path(__file__).parents[2] / "docs" / "families.md").read_text(encoding="utf-8")


@in_long_rounds
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")  # of models with random weights
def test_the_page_says_how_each_model_trains_on_packs() -> None:
    if f"transformers {transformers.__version__.removesuffix('.0')}, small models" not in PAGE:
        pytest.skip("the page is of another version of transformers")
    assert table().strip() in PAGE


def test_the_page_measures_each_causal_model_with_layers_run_by_sample() -> None:
    listed = next(line for line in PAGE.splitlines() if line.startswith(f"| {TRAINED[1]} |"))
    measured = PAGE.split("| model | layers run by sample |")[1]
    assert re.findall(r"^\| `(.+?)` \|", measured, re.MULTILINE) == re.findall("`(.+?)`", listed)
