"""Jobs on the CPU: one step of models that ranks divide, against plain transformers, each sample or pack by itself."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import last_words, write_samples
from tests.rounds import in_long_rounds

from .divided_cases import (
    CASES,
    EXPERTS,
    OF_TOKENS,
    PAIRS,
    REFUSED,
    of_type,
    short_samples,
)
from .launcher import run_job
from .test_sharding import Tensors, alone, difference, plain, tokens_and_learnt

pytestmark = pytest.mark.timeout(800)  # for the jobs, of which each has a limit of its own
DATA = {"text": tokens_and_learnt(), "short": short_samples(3), "single": short_samples(4)}
Results = dict[tuple[str, int], list[dict[str, Any]]]  # by case and world size, what each rank did


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """All cases, on one set of ranks for each world size."""
    folder = tmp_path_factory.mktemp("divided")
    for name, samples in DATA.items():
        write_samples(folder / name, samples, shard_bytes=1 << 12)
    cases = {
        name: {**case, "dataset": str(folder / case.get("data", "text"))}
        for name, case in (CASES | PAIRS | REFUSED).items()
    }
    (folder / "job.json").write_text(json.dumps({"cases": cases}))
    for nproc in sorted({nproc for case in cases.values() for nproc in case["on"]}):
        done = run_job(nproc, "tests.jobs.sharding_job", str(folder / "job.json"), timeout_s=400)
        assert done.returncode == 0, last_words(done.stderr)
    return {
        (name, nproc): [torch.load(folder / f"{name}-{nproc}-{rank}.pt") for rank in range(nproc)]
        for name, case in cases.items()
        for nproc in case["on"]
    }


def of_packs(
    kind: Any, packs: list[list[int]], samples: Any, *, router_weight: float
) -> tuple[Tensors, float, list[set[tuple[str, int]]]]:
    """Gradients by transformers' own losses of each pack; the loss; and of each pack the rows of experts it uses."""
    model = plain(kind)
    num_tokens = sum(len(samples[i][0]) for pack in packs for i in pack)
    num_targets = num_tokens - sum(len(pack) for pack in packs)
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    total, loss_sum, used = {name: torch.zeros_like(value) for name, value in trained.items()}, 0.0, []
    routed = {"output_router_logits": True} if kind["config"].get("router_aux_loss_coef") else {}
    for pack in packs:
        ids = [torch.from_numpy(samples[i][0].astype("int64")) for i in pack]
        positions = torch.cat([torch.arange(len(each)) for each in ids])
        labels = torch.cat([torch.cat([torch.tensor([-100]), each[1:]]) for each in ids])
        out = model(input_ids=torch.cat(ids)[None], position_ids=positions[None], use_cache=False, **routed)
        loss = torch.nn.functional.cross_entropy(out.logits[0, :-1], labels[1:], reduction="sum") / num_targets
        loss_sum += float(loss.detach())
        model.zero_grad()
        balance = router_weight * out.aux_loss * len(positions) / num_tokens if routed else 0.0
        (loss + balance).backward()
        gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
        of_experts = {name: gradient for name, gradient in gradients.items() if ".experts." in name}
        rows = {name: gradient.flatten(1).any(dim=1).nonzero()[:, 0] for name, gradient in of_experts.items()}
        used.append({(name, int(row)) for name, numbers in rows.items() for row in numbers})
        for name, gradient in gradients.items():
            total[name] += gradient
    return {f"model.{name}": value for name, value in total.items()}, loss_sum, used


def weight_of(kind: Any) -> float:
    return float(kind["config"].get("router_aux_loss_coef", 0.0))


def norm_of(gradients: Tensors) -> float:
    return float(torch.stack([each.float().norm() for each in gradients.values()]).norm())


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")  # of peft, for lora
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["on"]])
def test_gradients_of_a_divided_model_are_those_of_its_samples_one_by_one(results: Results, name: str) -> None:
    """On every rank, with the norm that they are clipped by; with the router's loss of the global batch, and with no
    token for any expert of a rank; whatever part of matrices, experts and tokens a rank has.
    """
    case = CASES[name]
    bound, num_packs = case.get("bound", 1e-5), case.get("train", {}).get("global_batch", 4)
    packs = results[name, case["on"][0]][0]["packs"]
    if case.get("data", "text") == "text":
        expected, loss = alone(plain(case["model"]), packs), None
    else:
        expected, loss, _ = of_packs(case["model"], packs, DATA[case["data"]], router_weight=weight_of(case["model"]))
    for nproc in case["on"]:
        for made in results[name, nproc]:
            assert len(made["packs"]) == num_packs  # those of a group count once
            assert sorted(map(sorted, made["packs"])) == sorted(map(sorted, packs))
            trained = {key: value for key, value in expected.items() if key in made["gradients"]}
            assert len(trained) == len(expected) or "frozen" in case["train"]
            assert len(trained) >= 8
            assert difference(made["gradients"], trained) <= bound
            assert made["grad_norm"] == pytest.approx(norm_of(trained), rel=bound)
            assert loss is None or made["loss"] == pytest.approx(loss, rel=1e-5)
            assert name not in OF_TOKENS or made["attention"] == "sdpa_varlen"


def test_packs_use_other_experts_and_the_routers_loss_counts(results: Results) -> None:
    """So that the test above would find an expert without gradient, or a router without loss."""
    packs = results["experts", 2][0]["packs"]
    gradients, _, used = of_packs(EXPERTS, packs, DATA["short"], router_weight=weight_of(EXPERTS))
    assert len({frozenset(rows) for rows in used}) > 1
    assert difference(gradients, of_packs(EXPERTS, packs, DATA["short"], router_weight=0.0)[0]) > 1e-3


def test_each_rank_holds_its_part_of_what_is_cut_and_of_that_what_fsdp_leaves_it(results: Results) -> None:
    """Of [64, 32]: 2 tensor parallel ranks have 32 rows each, of which 2 that share a copy have 16."""
    cut, whole = "model.model.layers.0.mlp.gate_proj.weight", "model.model.norm.weight"
    for qwen2, llama in zip(results["cut-qwen2", 4], results["cut-llama", 4], strict=True):
        assert qwen2["held"][cut] == (16, 32)
        assert qwen2["held"][cut.replace("gate", "down")] == (16, 32)
        assert qwen2["held"][whole] == (16,)
        assert qwen2["held"]["model.model.embed_tokens.weight"] in ((66, 32), (65, 32))  # tied
        assert llama["held"][cut] == (32, 32)  # two copies
        assert llama["held"]["model.lm_head.weight"] == (66, 32)


def test_ranks_read_packs_of_their_own_and_hold_parts_of_some_experts(results: Results) -> None:
    """Of 8 experts 4, which two of four ranks share; of 4 experts 2, one of two ranks'. All share what is no expert."""
    for name, nproc, experts in (("gpt_oss", 4, "mlp.experts"), ("llama4", 2, "feed_forward.experts")):
        ranks = results[f"apart-{name}", nproc]
        assert len({tuple(map(tuple, made["packs"])) for made in ranks}) == 1
        for made in ranks:
            assert made["held"][f"model.model.layers.0.{experts}.gate_up_proj"] == (2, 32, 32)
            assert made["held"][f"model.model.layers.0.{experts}.down_proj"] == (2, 16, 32)
            assert made["held"]["model.model.norm.weight"] == (32 // nproc,)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_divided_is_refused_by_name_on_every_rank(results: Results, name: str) -> None:
    (nproc,), message = REFUSED[name]["on"], REFUSED[name]["error"]
    pattern = ".*".join(map(re.escape, message.split("…")))
    errors = [made.get("error", "") for made in results[name, nproc]]
    assert [re.fullmatch(pattern, error, re.DOTALL) is not None for error in errors] == [True] * nproc, errors


@in_long_rounds
@pytest.mark.parametrize(
    ("one", "other", "of_loss", "of_gradients"),
    [
        (("pair-experts", 4), ("pair-experts-alone", 2), 1e-6, 1e-5),
        (("pair-z", 2), ("pair-z-alone", 2), 1e-6, 1e-5),
        (("pair-mixed", 4), ("pair-mixed-whole", 4), 1e-3, 0.02),  # in bfloat16
    ],
    ids=["experts", "z", "mixed"],
)
def test_losses_that_plain_transformers_lacks_are_those_of_undivided_models(
    results: Results, one: tuple[str, int], other: tuple[str, int], of_loss: float, of_gradients: float
) -> None:
    """Penalties of packs that lie on several ranks; mixed precision of experts on different ranks."""
    divided, whole = results[one][0], results[other][0]
    assert divided["loss"] == pytest.approx(whole["loss"], rel=of_loss)
    assert difference(divided["gradients"], whole["gradients"]) <= of_gradients


@in_long_rounds
def test_ranks_of_a_group_draw_the_same_dropout(tmp_path: Path) -> None:
    """So gradients are those of one rank, which draws it for the whole."""
    write_samples(tmp_path / "data", tokens_and_learnt(), shard_bytes=1 << 12)
    dropout = {"attention_dropout": 0.0, "residual_dropout": 0.3, "embedding_dropout": 0.2}
    made: dict[tuple[int, int], dict[str, Any]] = {}
    for nproc in (1, 2):
        case = {"model": of_type("starcoder2", **dropout), "train": {"tensor_parallel": nproc}, "on": [nproc]}
        path = tmp_path / f"job-{nproc}.json"
        path.write_text(json.dumps({"dataset": str(tmp_path / "data"), "cases": {"drawn": case}}))
        done = run_job(nproc, "tests.jobs.sharding_job", str(path), timeout_s=100)
        assert done.returncode == 0, last_words(done.stderr)
        made |= {(nproc, rank): torch.load(tmp_path / f"drawn-{nproc}-{rank}.pt") for rank in range(nproc)}
    one = made[1, 0]
    for rank in range(2):
        assert made[2, rank]["packs"] == one["packs"]
        assert difference(made[2, rank]["gradients"], one["gradients"]) < 1e-5
    assert difference(one["gradients"], alone(plain(of_type("starcoder2")), one["packs"])) > 1e-2
