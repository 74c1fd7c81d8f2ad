"""Every model of transformers trains on packs as docs/families.md says, or is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from lmms_stream.train.model.flops import model_flops
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.auto import modeling_auto

from ..rounds import LONG, in_long_rounds
from ..versions import IS_5
from .every_model import KINDS, TRAINED, UNBUILT, build, table

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


TYPES = {
    each
    for how in TRAINED
    for line in PAGE.split(f"| {how} |")[1:2]
    for each in re.findall("`(.+?)`", line.split("\n")[0])
}
FEW = ("dots3_note_text", "gpt_oss", "granitemoe", "mixtral", "mvp", "zamba2")
UNTRIED = ("deepseek_v3", "jamba")  # in transformers 4: their small models do not run on this machine


@pytest.mark.parametrize("model_type", sorted(TYPES & {*getattr(modeling_auto, KINDS["causal"][0])}) if LONG else FEW)
@pytest.mark.filterwarnings("ignore")  # of models with random weights
def test_the_flops_of_each_causal_model_are_what_torch_counts_or_are_not_told(model_type: str) -> None:
    """Within 8 %: small models have large norms and biases, which torch does not count; eager attention ignores
    windows."""
    try:
        model = build("causal", model_type, "eager").train()
    except (*UNBUILT, StopIteration) as error:
        pytest.skip(f"{type(error).__name__}: {error}")
    text = model.config.get_text_config()
    if model_type.startswith("llama4"):
        text.num_experts_per_tok = text.num_local_experts  # transformers runs all
    flops = model_flops(model)
    if flops is None or (model_type in UNTRIED and not IS_5):
        return
    if IS_5:
        model.set_experts_implementation("eager")  # torch does not count products of groups
    flops = replace(flops, per_pair={None: sum(flops.per_pair.values())})
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(64)[None], use_cache=False).logits.sum().backward()
    assert flops.of(np.array([64]), num_loss_tokens=64) == pytest.approx(counter.get_total_flops(), rel=0.08)
