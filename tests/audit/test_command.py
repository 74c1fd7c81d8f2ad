"""`lmms-stream audit`: options, exit statuses, JSON, pages and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lmms_stream.__main__ import main
from lmms_stream.converters.convert import convert

from ..inspect.test_inspection import EVIL, Page
from .test_audit import answer, chat, question, write_rows


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two of 22 chats are fully masked; a text has tags and control characters."""
    rows = [*(chat(number) for number in range(20)), *([question(n), answer(n, learn=False)] for n in (90, 91))]
    rows[21][0]["content"] += EVIL.replace("\ud800", "")
    return write_rows(tmp_path_factory.mktemp("masked"), rows)


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = main(["audit", *arguments, "--workers", "1"])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_findings_are_printed_with_rule_and_examples(
    masked: str, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(masked, "--tokenizer", str(tokenizer), capsys=capsys)
    assert (status, err) == (1, "")
    assert "wrong  fully-masked: 2 of 22 samples (9.09%); no token is trained on\n    rule: wrong: 1% of a" in out
    assert f"sample 20 of {Path(masked).name}: all labels are masked" in out
    assert "\x1b" not in out
    assert "ok  nothing found by refused, masked-answers, untrained-ends" in out


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ([], 1),
        (["--fail-on", "never"], 0),
        (["--expect", "fully-masked", "--expect", "odd-characters", "--expect", "special-tokens"], 0),
        (["--expect", "fully-masked", "--expect", "odd-characters", "--fail-on", "look"], 0),
        (["--expect", "odd-characters"], 1),
    ],
)
def test_the_exit_status_follows_the_verdict(
    options: list[str], status: int, masked: str, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(masked, "--tokenizer", str(tokenizer), *options, capsys=capsys)[0] == status


def test_json_is_printed_alone_or_written_to_a_file(
    masked: str, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = run(masked, "--tokenizer", str(tokenizer), "--json", "-", capsys=capsys)
    report = json.loads(out)
    assert report["verdict"] == "wrong"
    (found,) = (each for each in report["findings"] if each["check"] == "fully-masked")
    assert (found["count"], found["total"], found["verdict"], found["is_expected"]) == (2, 22, "wrong", False)
    assert found["by_source"] == {Path(masked).name: {"num_found": 2, "total": 22}}
    assert found["examples"][1]["sample_id"] == 21
    assert report["sources"][Path(masked).name]["num_samples"] == 22
    assert sum(report["histogram"]) == 22
    file = tmp_path / "reports" / "audit.json"
    _, out, _ = run(masked, "--tokenizer", str(tokenizer), "--json", str(file), capsys=capsys)
    assert "fully-masked" in out
    written = json.loads(file.read_text())
    assert written | {"tokenizing_s": 0} == report | {"tokenizing_s": 0}


def test_the_page_shows_samples_of_each_finding_without_running_their_text(
    masked: str, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "audit.html"
    run(masked, "--tokenizer", str(tokenizer), "--html", str(file), capsys=capsys)
    page = Page(file.read_text())
    assert page.loaded == []
    assert not any(name == "script" for name, _ in page.elements)
    assert "wrong: fully-masked" in page.text
    assert "rule: wrong: 1% of a source's samples or more" in page.text
    assert "0 of them trained on" in page.text
    assert "<script>alert(1)</script>" in page.text  # as text


def test_a_runs_file_names_datasets_processor_packs_and_positions(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "chats.jsonl"
    others = tmp_path / "others.jsonl"
    rows.write_text("".join(json.dumps({"messages": chat(number)}) + "\n" for number in range(20)))
    others.write_text("".join(json.dumps({"messages": chat(number)}) + "\n" for number in range(20, 30)))
    convert([rows, others], str(tmp_path / "chats"))
    config = tmp_path / "run.yaml"
    config.write_text(
        f"""
dataset: {{remote: {tmp_path / "chats"}, packing_length: 32, overlong: keep,
  processor: {{type: chat, tokenizer: {tokenizer}}}}}
model: {{config: {{model_type: qwen2, max_position_embeddings: 48}}}}
train: {{output_dir: {tmp_path / "run"}, max_steps: 2, global_batch: 2}}
"""
    )
    status, out, _ = run(str(config), "--json", "-", capsys=capsys)
    report = json.loads(out)
    found = {each["check"]: each for each in report["findings"] if each["count"]}
    assert status == 1
    assert {*found} == {"overlong", "beyond-positions"}
    assert "(overlong: keep)" in found["overlong"]["what"]
    assert {*report["sources"]} == {str(rows), str(others)}
    assert found["overlong"]["examples"][0]["source"] == f"{rows}:1"
    status, out, _ = run(str(config), "dataset.packing_length=512", "model.config.max_position_embeddings=512",
                         capsys=capsys)  # fmt: skip
    assert status == 0
    assert not (tmp_path / "run").exists()
    for options, error in (
        (["--tokenizer", "x"], "already sets this: leave --tokenizer out"),
        (["--packing-length", "9"], "already sets this: leave --packing-length out"),
    ):
        status, _, err = run(str(config), *options, capsys=capsys)
        assert status == 1
        assert error in err


def test_a_runs_datasets_in_lanes_are_compared_with_the_dataset_to_evaluate(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, numbers in (("chats", range(20)), ("more", range(40, 60)), ("held", range(18, 24))):
        write_rows(tmp_path / name, [chat(number) for number in numbers])
    processor = f"processor: {{type: chat, tokenizer: {tokenizer}}}, packing_length: 512"
    config = tmp_path / "run.yaml"
    config.write_text(
        f"""
datasets:
  chats: {{remote: {tmp_path / "chats"}, packing_mode: lanes, {processor}}}
  more: {{remote: {tmp_path / "more"}, packing_mode: lanes, {processor}}}
eval_dataset: {{remote: {tmp_path / "held"}, {processor}}}
model: {{config: {{model_type: qwen2}}}}
train: {{output_dir: {tmp_path / "run"}, max_steps: 2, global_batch: 2}}
"""
    )
    page = tmp_path / "audit.html"
    status, out, _ = run(str(config), "--near", "--json", "-", "--html", str(page), capsys=capsys)
    report = json.loads(out)
    (found,) = (each for each in report["findings"] if each["count"])
    assert (status, found["check"], found["count"]) == (1, "repeated-across", 2)
    assert found["by_source"] == {"eval_dataset": {"num_found": 2, "total": 6}}
    assert found["examples"][0]["like"] == {"dataset": "chats", "sample_id": 18, "source": ""}
    assert Page(page.read_text()).text.count("How does task number 18 end") == 4  # messages and tokens of both
    assert report["near_s"] > 0


@pytest.mark.parametrize("is_launch", [True, False])
def test_samples_that_a_run_makes_are_refused_by_name(
    is_launch: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = "{dataset_type: vision_iterable, dataset_path: /data/rows.jsonl, packing: true, packing_length: 64}"
    file = tmp_path / "run.yaml"
    file.write_text(
        f"dataset_config: {dataset}\ntrainer_args: {{max_steps: 1}}\n"
        if is_launch
        else f"dataset: {dataset}\nmodel: {{config: {{model_type: qwen2}}}}\n"
        f"train: {{output_dir: {tmp_path}, max_steps: 2, global_batch: 2}}\n"
    )
    status, _, err = run(str(file), capsys=capsys)
    assert status == 1
    assert "the samples of dataset 'data' (dataset_type vision_iterable) are made by the run from /data/rows" in err
    assert "convert the rows with lmms-stream convert, and audit the new folder" in err


def test_a_path_that_is_no_dataset_is_an_error_that_says_what_to_do(
    masked: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "chats.jsonl"
    rows.write_text("{}\n")
    for arguments, error in (
        ([str(rows)], f"{rows} is a file, and a dataset is a folder or URL with shards: convert the file first"),
        ([str(tmp_path)], "holds no dataset (index.json is missing)"),
        ([masked], "holds messages, which only a processor turns into tokens: pass --tokenizer"),
        ([masked, "--overlong", "drop"], "--overlong needs --packing-length, the tokens of a pack: pass both"),
        ([str(tmp_path / "no.yaml")], "no such config file"),
    ):
        status, out, err = run(*arguments, capsys=capsys)
        assert (status, out) == (1, "")
        assert error in err
        assert len(err.splitlines()) == 1
