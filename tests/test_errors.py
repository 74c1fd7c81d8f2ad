"""The remedy for an unknown name: only names that could have been meant are suggested."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from lmms_stream.errors import did_you_mean
from lmms_stream.train.run.settings import TrainConfig

KNOWN = ("torch_dtype", "attention", "image_min_pixels", "image_max_pixels", "loss_scale")


@pytest.mark.parametrize(
    ("name", "known", "remedy"),
    [
        ("torch_dtyp", KNOWN, "did you mean 'torch_dtype'?"),
        ("atention", KNOWN, "did you mean 'attention'?"),
        ("image_max_pixel", KNOWN, "did you mean 'image_max_pixels'?"),
        ("max_pixels", KNOWN, "did you mean 'image_max_pixels'?"),
        ("image_max_size", KNOWN, f"choose one of {', '.join(KNOWN)}"),
        ("pixels", KNOWN, "did you mean 'image_min_pixels' or 'image_max_pixels'?"),
        ("model_type", KNOWN, f"choose one of {', '.join(KNOWN)}"),
        ("colour", KNOWN, f"choose one of {', '.join(KNOWN)}"),
        (7, KNOWN, f"choose one of {', '.join(KNOWN)}"),
        ("colour", [], "leave it out"),
        ("colour", [f"key_{number}" for number in range(31)], "leave it out"),
    ],
)
def test_a_name_is_suggested_only_if_it_could_have_been_meant(name: object, known: Sequence[str], remedy: str) -> None:
    assert did_you_mean(name, known) == remedy


def test_the_path_of_a_section_stands_before_each_name() -> None:
    assert did_you_mean("sead", ["seed"], prefix="train.") == "did you mean 'train.seed'?"
    assert did_you_mean("colour", ["a", "b"], prefix="x.") == "choose one of x.a, x.b"


def test_arguments_of_transformers_are_not_taken_for_other_settings() -> None:
    settings = [field.name for field in dataclasses.fields(TrainConfig)]
    for argument in ("deepspeed", "ddp_timeout", "hub_token", "data_seed", "save_safetensors", "tpu_num_cores"):
        assert did_you_mean(argument, settings, otherwise="look it up") == "look it up"
