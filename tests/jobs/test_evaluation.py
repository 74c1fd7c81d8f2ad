"""Jobs on the CPU: the loss on held-out samples on 1, 2 and 4 ranks, against plain transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.train.model.build import ModelConfig
from lmms_stream.train.report.train_log import read_log

from tests.conftest import TokensAndSpans, last_words, write_samples, write_tokens
from tests.rounds import rounds
from tests.train.runs import MODEL, VOCABULARY, write_run

from .launcher import run_job
from .runs import with_one_layer

pytestmark = pytest.mark.timeout(700)  # for the jobs, of which each has a limit of its own
PACKING_LENGTH = 128
NUM_SAMPLES, NUM_OVERLONG = 37, 3
CASES: dict[str, dict[str, Any]] = {
    "packs": {"overrides": [], "on": [1, 2, 4]},
    "alone": {"overrides": ["eval_dataset.max_samples_per_pack=1"], "on": [2]},
    "workers": {"overrides": ["train.num_workers=2"], "on": [2]},
    "padded": {"overrides": ["train.pad_to=128", "train.per_device_batch=4"], "on": [2]},
    "together": {"overrides": ["train.tensor_parallel=2"], "on": rounds([4], [2, 4])},
    "copies": {"overrides": ["train.shard_ranks=2"], "on": [4]},
    "lanes": {"overrides": ["eval_dataset.packing_mode=lanes"], "on": [2]},
    "long": {"overrides": ["eval_dataset.packing_length=9"], "on": [2]},
    "unlearnt": {"overrides": ["eval_dataset.remote={folder}/unlearnt"], "on": [2]},
}
FIRST_TOKEN = np.array([[0, 1]], np.int32)  # nothing predicts it


def make_samples() -> list[TokensAndSpans]:
    """Tokens and which are learnt: few of some samples, most of others, none of one; some longer than a pack."""
    rng = np.random.default_rng(5)
    lengths = [*rng.integers(20, 60, NUM_SAMPLES).tolist(), *[PACKING_LENGTH + 1] * NUM_OVERLONG]
    made: list[TokensAndSpans] = []
    for length in rng.permutation(lengths).tolist():
        begin = int(rng.integers(1, length - 2))
        made.append((rng.integers(0, VOCABULARY, length).astype(np.int32), np.array([[begin, length]], np.int32)))
    made[0] = made[0][0], FIRST_TOKEN
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the jobs made, by world size and rank, and what they said."""
    folder = tmp_path_factory.mktemp("evaluation")
    write_tokens(folder / "train", num_samples=300)
    samples = make_samples()
    write_samples(folder / "held-out", samples, shard_bytes=1 << 12)
    write_samples(folder / "unlearnt", [(tokens, FIRST_TOKEN) for tokens, _ in samples])
    held_out = {"remote": str(folder / "held-out"), "packing_length": PACKING_LENGTH, "overlong": "drop"}
    run = {"max_steps": 3, "eval_steps": 2, "learning_rate": 0.0, "logging_steps": 3, "log_sample_ids": False}
    config = with_one_layer(write_run(folder / "run.yaml", folder / "train", eval_dataset=held_out, **run))
    (folder / "job.json").write_text(json.dumps(CASES).replace("{folder}", str(folder)))
    for nproc in (1, 2, 4):
        done = run_job(nproc, "tests.jobs.evaluation_job", str(config), str(folder / "job.json"), timeout_s=200)
        assert done.returncode == 0, last_words(done.stderr)
        (folder / f"{nproc}.txt").write_text(done.stderr)
    return folder


def plain() -> Any:
    """The model of the runs, by itself."""
    return ModelConfig(config=MODEL | {"num_hidden_layers": 1}).build().eval()


@pytest.fixture(scope="module")
def expected() -> dict[str, float]:
    """Each sample that fits by itself, by the model's own logits."""
    model = plain()
    total, count = 0.0, 0
    for tokens, spans in make_samples():
        if len(tokens) > PACKING_LENGTH or spans is FIRST_TOKEN:
            continue
        ids = torch.from_numpy(tokens.astype(np.int64))
        begin = int(spans[0, 0])
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, begin - 1 : -1]
        total += float(torch.nn.functional.cross_entropy(logits, ids[begin:], reduction="none").double().sum())
        count += len(ids) - begin
    return {"eval_loss": total / count, "eval_num_loss_tokens": count}


def cases_of(folder: Path) -> dict[str, dict[str, Any]]:
    """By case, world size and rank."""
    made = {path.stem: json.loads(path.read_text()) for path in folder.glob("?-?.json")}
    assert len(made) == 7
    return {f"{name}-{job}": value for job, cases in made.items() for name, value in cases.items()}


def is_expected(record: dict[str, Any], expected: dict[str, float]) -> bool:
    found = {name: record.get(name) for name in expected}
    return found == {**expected, "eval_loss": pytest.approx(expected["eval_loss"], rel=1e-5)}


def test_the_packs_to_evaluate_cannot_be_shared_equally(folder: Path) -> None:
    """So that some ranks have a pack more than others, and the tests below would find one that counts for none."""
    dataset = PackedStreamingDataset(
        folder / "held-out",
        processor=TokensProcessor(),
        packing=PackingConfig(packing_length=PACKING_LENGTH, overlong="drop"),
        order=OrderConfig(num_canonical_nodes=4),
    )
    num_packs = dataset.plan.num_packs(0)
    assert num_packs > 8
    assert num_packs % 4 == 1
    assert NUM_SAMPLES % 2 == 1  # packs of one


def test_the_loss_on_held_out_samples_is_that_of_each_alone_on_any_number_of_ranks(
    folder: Path, expected: dict[str, float]
) -> None:
    """For packs of any kind, read by any workers; for ranks that read the same, and for copies of the model."""
    made = {run: value for run, value in cases_of(folder).items() if "error" not in value}
    assert len(made) == sum(
        sum(case["on"]) for name, case in CASES.items() if name not in ("lanes", "long", "unlearnt")
    )
    assert {run: value for run, value in made.items() if not is_expected(value, expected)} == {}


def test_a_run_logs_its_evaluations_beside_its_steps(folder: Path, expected: dict[str, float]) -> None:
    for nproc in (1, 2, 4):
        records = read_log(folder / f"run-{nproc}")
        assert [(record["step"], "eval_loss" in record) for record in records] == [(2, True), (3, False), (3, True)]
        assert all(is_expected(record, expected) for record in records if "eval_loss" in record)


def test_predictions_are_those_of_each_sample_alone_in_their_order_on_each_rank_of_any_number(
    folder: Path, expected: dict[str, float]
) -> None:
    model = plain()
    fitting = [tokens for tokens, _ in make_samples() if len(tokens) <= PACKING_LENGTH]
    with torch.no_grad():
        logits = [model(input_ids=torch.from_numpy(each.astype(np.int64))[None]).logits[0].numpy() for each in fitting]
    for nproc in (1, 2, 4):
        for rank in (0, nproc - 1):
            made = np.load(folder / f"predicted-{nproc}-{rank}.npz")
            assert made["loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)
            assert len(made["predictions"]) == len(made["labels"]) == len(fitting)
            for tokens, expected_logits, predictions, labels in zip(
                fitting, logits, made["predictions"], made["labels"], strict=True
            ):
                learnt = labels[: len(tokens)] != -100
                assert (labels[: len(tokens)][learnt] == tokens[learnt]).all()
                np.testing.assert_allclose(predictions[: len(tokens)], expected_logits, rtol=1e-4, atol=1e-5)
                assert (predictions[len(tokens) :] == -100).all()


def test_samples_that_no_pack_holds_are_counted_in_one_line(folder: Path) -> None:
    line = f"eval_dataset: {NUM_OVERLONG} of {NUM_SAMPLES + NUM_OVERLONG} samples are longer than packing_length 128, "
    line += "and overlong is drop"
    for nproc in (1, 2, 4):
        num_cases = sum(nproc in case["on"] for name, case in CASES.items() if name not in ("lanes", "long"))
        assert (folder / f"{nproc}.txt").read_text().count(line) == num_cases + 1  # with the run itself


def test_datasets_that_cannot_be_evaluated_are_refused_by_all_ranks(folder: Path) -> None:
    messages = {
        "lanes": "the eval_dataset is packed in lanes, without an end: write its lengths index with lmms-stream",
        "long": "source 'eval_dataset' has no packs: all its samples are dropped; raise packing_length",
        "unlearnt": "the eval_dataset has no token to train on: choose another",
    }
    errors = {run: value["error"] for run, value in cases_of(folder).items() if "error" in value}
    assert set(errors) == {f"{name}-2-{rank}" for name in messages for rank in range(2)}
    assert [run for run, error in errors.items() if not error.startswith(messages[run.partition("-")[0]])] == []
