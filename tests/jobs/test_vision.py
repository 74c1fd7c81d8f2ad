"""Jobs on the CPU: ranks whose packs hold other kinds of media, or none, or that share a pack, against each sample
alone.
"""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import last_words, write_samples
from tests.rounds import LONG, in_long_rounds, rounds
from tests.train import families
from tests.train.one_by_one import is_noise_of_keys, unequal
from tests.train.vision import plain_losses

from .launcher import run_job

JOB_S = float(rounds(400, 1500))
pytestmark = pytest.mark.timeout(2 * JOB_S + 100)
ON = [1, 2] if LONG else [2]
TEXT_MODEL, TOWER = ["model.language_model.*", "lm_head.*"], ["model.visual.*"]
CASES: dict[str, dict[str, Any]] = {
    "images-text": {"model": "qwen2_5_vl", "sources": ["images", "text"], "on": [1, 2]},
    "together": {"model": "qwen2_vl", "sources": ["video", "text"], "train": {"per_device_batch": 2}, "on": [1]},
    "mixed": {"model": "qwen2_5_vl", "sources": ["images", "text"], "train": {"bf16": True}, "on": [2]},
    "again": {
        "model": "qwen3_vl", "sources": ["images", "video"], "train": {"gradient_checkpointing": True}, "on": [2]
    },
    "shared": {"model": "qwen3_vl", "sources": ["large", "text"], "train": {"sequence_parallel": 2}, "on": [2]},
    "tower": {"model": "qwen2_vl", "sources": ["images", "text"], "train": {"frozen": TEXT_MODEL}, "on": [2]},
}  # fmt: skip
if LONG:  # llava_onevision-image-video and together, below and above, try the same of other models
    CASES |= {
        "deepstack": {"model": "qwen3_vl", "sources": ["text", "both"], "on": ON},
        "frozen": {
            "model": "qwen2_5_vl",
            "sources": ["images", "text"],
            "train": {"frozen": TOWER},
            "on": [2],
        },
        "images-video": {"model": "qwen2_5_vl", "sources": ["images", "video"], "on": ON},
        "first": {"model": "qwen2_vl", "sources": ["video", "text"], "on": [2]},
    }
HALVES, QUARTERS = {"sequence_parallel": 2}, {"sequence_parallel": 4}
# Ranks of a group share packs; some have no media in their part, or no share of the towers' work.
SHARED: list[tuple[str, int, str, list[str], dict[str, Any]]] = [
    ("whole", 1, "qwen3_vl", ["large", "text"], {}),
    ("quarters", 4, "qwen2_5_vl", ["large", "text"], QUARTERS),
    ("again", 4, "qwen3_vl", ["large", "images"], {**QUARTERS, "gradient_checkpointing": True}),
    ("groups", 4, "qwen3_vl", ["large", "text"], HALVES),
    ("copies", 4, "qwen3_vl", ["both", "text"], {**HALVES, "shard_ranks": 2}),
    ("matrices", 4, "qwen2_vl", ["large", "text"], {**HALVES, "tensor_parallel": 2}),
    ("together", 2, "qwen2_vl", ["large", "images"], {**HALVES, "per_device_batch": 2}),
    ("frozen", 2, "qwen3_vl", ["large", "text"], {**HALVES, "frozen": TOWER}),
    ("tower", 4, "qwen3_vl", ["large", "text"], {**HALVES, "frozen": TEXT_MODEL}),
    ("reversed", 2, "qwen3_vl", ["both", "text"], HALVES),
    ("tiles", 2, "internvl", ["images", "text"], HALVES),
    ("tiles-of-quarters", 4, "internvl", ["both", "image"], QUARTERS),
    ("omni", 4, "qwen2_5_omni", ["several", "text"], HALVES),
    ("omni-3", 4, "qwen3_omni", ["several", "text"], HALVES),
]
if LONG:
    CASES |= {
        f"shared-{name}": {"model": model, "sources": sources, "train": train, "on": [nproc], "attention": "auto"}
        for name, nproc, model, sources, train in SHARED
    }
    CASES["shared-reversed"]["is_reversed"] = True
# Every family, and each kind of media that it reads: on one rank, and on another none or other kinds.
# The cases above try much of it, so most of these are for long rounds.
PAIRS: dict[str, list[tuple[str, str]]] = {
    "qwen2_vl": [("both", "text"), ("images", "text")],
    "qwen2_5_vl": [("both", "text"), ("video", "text")],
    "qwen3_vl": [("images", "video"), ("video", "text")],
    "llava_onevision": [("image", "video"), ("both", "text"), ("images", "text")],
    "smolvlm": [("video", "text"), ("both", "text"), ("images", "video")],
    "internvl": [("images", "text"), ("both", "text"), ("image", "video")],
    "aya_vision": [("image", "text"), ("images", "text")],
    "idefics3": [("image", "text"), ("images", "text")],
    "gemma3": [("image", "text"), ("images", "text")],
    "llama4": [("image", "text"), ("images", "text")],
    "qwen2_audio": [("sound", "text")],
    "qwen2_5_omni": [("several", "text"), ("sound", "text"), ("image", "sound"), ("video", "heard")],
    "qwen3_omni": [("sound", "text"), ("image", "sound"), ("several", "text")],
}
FEW = {"llava_onevision": "image-video", "qwen2_5_omni": "several-text"}
CASES |= {
    f"{name}-{one}-{other}": {"model": name, "sources": [one, other], "on": ON}
    for name, pairs in PAIRS.items()
    for one, other in pairs
    if LONG or FEW.get(name) == f"{one}-{other}"
}

EVALUATED = [("images-text-1", "images-text-2")]
if LONG:
    EVALUATED += [(f"{name}-1", f"{name}-2") for name in ("images-video", "deepstack")]
    EVALUATED += [("shared-whole-1", "shared-2"), ("shared-whole-1", "shared-groups-4")]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By case and world size, what the job of that world size did."""
    folder = tmp_path_factory.mktemp("vision")
    folders: dict[str, dict[str, str]] = {}
    for model_type in sorted({case["model"] for case in CASES.values()}):
        model = families.build(model_type)
        asked = {source for case in CASES.values() if case["model"] == model_type for source in case["sources"]}
        folders[model_type] = {source: str(folder / model_type / source) for source in sorted(asked)}
        for source, target in folders[model_type].items():
            spans = np.array([[0, 1]], np.int32)
            samples = [
                (each["input_ids"].astype(np.int32), spans) for each in families.source_of(model_type, model, source)
            ]
            write_samples(Path(target), samples)
    job = folder / "job.json"
    evaluated = {run.rpartition("-")[0] for pair in EVALUATED for run in pair}
    cases = {name: {**case, "is_evaluated": name in evaluated} for name, case in CASES.items()}
    job.write_text(json.dumps({"datasets": folders, "cases": cases}))
    for nproc in sorted({nproc for case in CASES.values() for nproc in case["on"]}):
        done = run_job(nproc, "tests.jobs.vision_job", str(job), timeout_s=JOB_S)
        assert done.returncode == 0, last_words(done.stderr)
    return {path.stem: torch.load(path) for path in folder.glob("*.pt")}


def is_noise(model: str, parameter: str) -> bool:
    return model in {*families.TILED, "qwen3_omni"} and is_noise_of_keys(parameter)


RUNS = [
    f"{name}-{nproc}"
    for name, case in CASES.items()
    for nproc in case["on"]
    if name not in ("mixed", "shared-reversed")
]


@pytest.mark.parametrize("run", RUNS)
def test_gradients_are_those_of_the_samples_one_by_one_whatever_ranks_hold(results: dict[str, Any], run: str) -> None:
    made, case = results[run], CASES[run.rpartition("-")[0]]
    packs = [pack for of_rank in made["packs"] for pack in of_rank]
    assert sorted(source for source, _, _ in packs) == sorted(case["sources"])
    name = case["model"]
    reads_videos_as_images = name in ("smolvlm", "internvl") and "text" not in case["sources"]
    assert len({tuple(kinds) for _, _, kinds in packs}) == 2 - reads_videos_as_images  # of media: each pack has others
    model = families.build_plain(name).train()
    family = families.processor_of(name, model, case["sources"][0]).family
    of_source = {source: families.source_of(name, model, source) for source in case["sources"]}
    samples = [of_source[source][number] for source, numbers, _ in packs for number in numbers]
    num_losses = sum(int((sample["labels"][1:] != -100).sum()) for sample in samples)
    loss = torch.stack([plain_losses(model, sample, family=family) for sample in samples]).sum() / num_losses
    loss.backward()
    frozen = case.get("train", {}).get("frozen", [])
    expected = {
        name: each.grad
        for name, each in model.named_parameters()
        if each.grad is not None
        and not any(fnmatch(name, pattern) for pattern in frozen)
        and not is_noise(case["model"], name)
    }
    assert set(expected) <= set(made["gradients"])
    assert any(tower in name for name in made["gradients"] for tower in ("vis", "audio")) == (frozen != TOWER)
    assert unequal(made["gradients"], expected) == []
    more = made["gradients"].keys() - expected.keys()
    assert [each for each in more if made["gradients"][each].any() and not is_noise(name, each)] == []
    assert made["record"]["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert {key for key in made["record"] if key.startswith("loss")} == {
        "loss", *(f"loss/{source}" for source in case["sources"])
    }  # fmt: skip


def test_ranks_that_share_a_pack_share_the_work_of_its_towers(results: dict[str, Any]) -> None:
    """A rank reads the images of a pack, the other rank its videos, or each rank the media of a sample. Each reads the
    smallest medium, 4 rows, instead of another kind, and of both kinds for the pack without media.
    """
    (pack,) = (pack for of_rank in results["shared-2"]["packs"] for pack in of_rank if pack[0] == "large")
    of_source = families.source_of("qwen3_vl", families.build("qwen3_vl"), "large")
    media = [of_source[number]["media"] for number in pack[1]]
    names = "pixel_values", "pixel_values_videos"
    by_kind = [sum(len(each[name]) for each in media) + 3 * 4 for name in names]
    by_sample = [sum(len(each[name]) for name in names) + 2 * 4 for each in media]
    assert sorted(results["shared-2"]["rows"]) in (sorted(by_kind), sorted(by_sample))


@in_long_rounds
def test_the_proof_finds_features_that_go_to_other_tokens(results: dict[str, Any]) -> None:
    assert results["shared-reversed-2"]["error"] == (
        "Qwen3VLForConditionalGeneration with attention sdpa_varlen does not keep the samples of a pack apart: what "
        "one holds changes what is predicted in another (samples with media): set train.sequence_parallel to 1"
    )


def test_mixed_precision_reads_media_too(results: dict[str, Any]) -> None:
    mixed, exact = results["mixed-2"], results["images-text-2"]
    assert mixed["record"]["loss"] == pytest.approx(exact["record"]["loss"], rel=1e-2)
    assert {each.dtype for each in mixed["gradients"].values()} == {torch.float32}
    norms = [
        float((mixed["gradients"][name] - each).norm() / each.norm())
        for name, each in exact["gradients"].items() if each.any()
    ]  # fmt: skip
    assert 1e-4 < max(norms) < 0.2


def test_an_evaluation_is_the_same_on_any_number_of_ranks(results: dict[str, Any]) -> None:
    for pair in EVALUATED:
        one, two = (results[run]["evaluated"] for run in pair)
        assert one["eval_num_loss_tokens"] == two["eval_num_loss_tokens"]
        assert one["eval_loss"] == pytest.approx(two["eval_loss"], rel=1e-6)
