"""Runs as they are watched: logs that grow, are cut off, resumed, removed; the page and its data; samples."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from lmms_stream.converters.convert import convert
from lmms_stream.errors import ConfigError, DataError
from lmms_stream.tools.watch.run import MAX_POINTS, WatchedRun, thinned
from lmms_stream.tools.watch.server import sample_page
from lmms_stream.tools.watch.source import LogTail, open_run
from lmms_stream.train.report.train_log import RecordFile

from ..cli.test_plots import record, write_log
from ..conftest import run_cli, write_tokens
from ..train.runs import trainer_of, write_run

SCRIPT = '<script>alert("x")</script>'


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: str


def get(port: int, path: str, **headers: str) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return Answer(answer.status, dict(answer.getheaders()), body)


@contextlib.contextmanager
def watching(*runs: Path) -> Iterator[int]:
    """`lmms-stream watch` as a process; its port."""
    command = [sys.executable, "-m", "lmms_stream", "watch", *map(str, runs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        try:
            assert process.stdout is not None
            found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/ \(Ctrl-C ends it\)\n", process.stdout.readline())
            assert found
            yield int(found[1])
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()


def view_of(path: Path) -> dict[str, Any]:
    run = WatchedRun(open_run(path))
    run.update()
    return run.view()


def files_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def test_a_log_is_read_as_it_grows_whatever_becomes_of_it(tmp_path: Path) -> None:
    path = tmp_path / "train_log.jsonl"
    tail = LogTail(path)
    assert tail.read() == ([], False)
    path.write_bytes(b'{"step": 1}\n{"step": 2')
    assert tail.read() == ([{"step": 1}], True)
    assert tail.read() == ([], False)
    RecordFile(path).close()  # a resumed run removes the half line
    assert tail.read() == ([], False)
    with path.open("ab") as file:
        file.write(b'{"step": 2}\nnone\n[3]\n{"step": 3}\n')
    assert tail.read() == ([{"step": 2}, {"step": 3}], False)
    assert tail.num_damaged == 2
    with path.open("ab") as file:  # as other programs write what is not finite
        file.write(b'{"step": 4, "loss": NaN, "grad_norm": 1e999, "x": [-Infinity]}\n')
    assert tail.read() == ([{"step": 4, "loss": None, "grad_norm": None, "x": [None]}], False)
    path.write_bytes(b'{"step": 7}\n')  # begun again
    assert tail.read() == ([{"step": 7}], True)
    assert tail.num_damaged == 0
    path.unlink()
    assert tail.read() == ([], True)
    assert tail.read() == ([], False)


def test_of_a_run_that_was_killed_and_resumed_the_later_records_are_shown(tmp_path: Path) -> None:
    spike = {"kind": "loss_spike", "message": "a spike", "first_step": 3, "last_step": 3, "skip_steps": [[2, 3]]}
    run = write_log(tmp_path / "run", [record(1, 4.0), record(2, 3.0), record(3, 9.0) | {"alerts": [spike]}])
    watched = WatchedRun(open_run(run))
    watched.update()
    view = watched.view()
    assert [(alert["message"], alert["line"]) for alert in view["alerts"]] == [("a spike", "skip_steps: [[2, 3]]")]
    with (run / "train_log.jsonl").open("a") as file:
        file.write(json.dumps(record(2, 2.5)) + "\n" + json.dumps({"step": 2, "eval_loss": 2.75}) + "\n")
    watched.update()
    view = watched.view()
    (loss,) = [panel for panel in view["panels"] if panel["title"] == "loss"]
    curves = {series["name"]: (series["x"], series["y"]) for series in loss["series"]}
    assert curves == {"loss": ([1, 2], [4.0, 2.5]), "eval_loss": ([2], [2.75])}
    assert view["alerts"] == []
    assert dict(view["figures"])["loss"] == "2.5000"
    assert dict(view["figures"])["waiting for data"] == "2.0%"


def test_a_run_says_where_it_stands(tmp_path: Path) -> None:
    config = write_run(tmp_path / "run.yaml", tmp_path / "data", max_steps=4)
    log = tmp_path / "default" / "train_log.jsonl"
    assert view_of(config)["state"] == "has not begun: there is no log yet"
    log.parent.mkdir()
    log.touch()
    assert view_of(config)["state"] == "has begun, and has no record yet"
    log.write_text(json.dumps(record(1, None)) + "\n")
    view = view_of(config)
    assert (view["state"], view["done"]) == ("training", 0.25)
    assert dict(view["figures"])["loss"] == "not finite"
    assert dict(view["figures"])["step"] == "1 of 4"
    os.utime(log, (0, time.time() - 60))  # a shorter silence than the least that may mean an end
    assert view_of(config)["state"] == "training"
    os.utime(log, (0, time.time() - 4000))
    assert view_of(config)["state"] == "no record for 1 h 6 min: it may have ended at step 1"
    with log.open("a") as file:
        file.write(json.dumps(record(4, 1.0, num_steps=3)) + "\n")
    assert view_of(config)["state"] == "finished at step 4"
    assert view_of(log.parent)["state"] == "training"  # of its log alone, nothing says where it ends
    config.write_text(yaml.safe_dump({"trainer_args": {"output_dir": str(log.parent), "num_train_epochs": 1}}))
    assert view_of(config)["done"] == 0.4


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none", tmp_path / "none.yaml"):
        with pytest.raises(
            DataError, match=f"{re.escape(str(path))}: no run found: name the output_dir of a started run"
        ):
            open_run(path)
    (tmp_path / "other.yaml").write_text("a: 1")
    with pytest.raises(ConfigError, match=r"other\.yaml names no train\.output_dir: name the YAML file of a run"):
        open_run(tmp_path / "other.yaml")


def test_a_long_curve_keeps_its_spikes() -> None:
    curve: list[tuple[int, float | None]] = [(step, 1.0 + step % 7) for step in range(100_000)]
    curve[54_321] = (54_321, 99.0)
    curve[77] = (77, None)
    drawn = thinned(curve)
    assert len(drawn["x"]) <= MAX_POINTS + 2
    assert drawn["y"][drawn["x"].index(54_321)] == max(drawn["y"]) == 99.0
    assert drawn["x"] == sorted(drawn["x"])
    assert thinned([(1, None), (2, 3.0)]) == {"x": [1, 2], "y": [None, 3.0]}


def test_a_real_run_is_shown_once_and_stays_as_it_was(tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", num_samples=300)
    config = write_run(tmp_path / "run.yaml", tmp_path / "data", max_steps=3, save_steps=2)
    trainer_of(config).train()
    before = files_of(tmp_path)
    done = run_cli("watch", str(config), str(tmp_path / "default"), "--once")
    assert done.returncode == 0, done.stderr
    assert files_of(tmp_path) == before
    assert done.stdout.count("finished at step 3, 100% done") == 2  # of the folder, the checkpoint says it
    for shown in ("step ", "3 of 3", "tokens/s", "waiting for data", "checkpoints  step-00000003, step-00000002"):
        assert shown in done.stdout
    assert "samples of step 3" in done.stdout
    refused = run_cli("watch", str(tmp_path / "data"), "--once")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith(f"error: {tmp_path / 'data'}: no run found: ")
    assert "Traceback" not in refused.stderr


def test_the_page_its_data_and_samples_are_served_to_this_machine_alone(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens", num_samples=20)
    data = {"remote": str(tmp_path / "tokens"), "processor": {"type": "tokens"}}
    run = write_log(tmp_path / SCRIPT.replace("/", "|"), [record(1, 2.0) | {"sample_ids": ["a:3", "b:0"]}])
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump({"datasets": {"a": data}, "train": {"output_dir": str(run)}}))
    with watching(config, run) as port:
        page = get(port, "/")
        assert page.status == 200
        assert "default-src 'none'" in page.headers["Content-Security-Policy"]
        assert not re.findall(r"(?:src|href)=[\"'](?!data:)|https?://(?!www\.w3\.org/2000/svg)", page.body)
        answer = get(port, "/data.json")
        first, second = json.loads(answer.body)["runs"]
        assert first["folder"] == second["name"] == str(run)  # the page writes it as text
        assert first["samples"] == {"step": 1, "ids": ["a:3", "b:0"]}
        assert (first["has_datasets"], second["has_datasets"]) == (True, False)
        assert get(port, "/data.json", **{"If-None-Match": answer.headers["ETag"]}).status == 304
        with (run / "train_log.jsonl").open("a") as file:
            file.write(json.dumps(record(2, 1.5)) + "\n")
        assert dict(json.loads(get(port, "/data.json").body)["runs"][0]["figures"])["step"] == "2"
        sample = get(port, "/sample?run=0&id=a:3")
        assert "Sample 3 of 20" in sample.body
        assert "sandbox" in sample.headers["Content-Security-Policy"]
        assert "the datasets of sample" in get(port, "/sample?run=1&id=a:3").body
        assert get(port, "/sample?run=7&id=a:3").status == get(port, "/sample").status == 400
        assert get(port, "/etc/passwd").status == 404
        assert get(port, "/data.json", Host="rebound.example").status == 403
        taken = run_cli("watch", str(run), "--port", str(port))
        assert taken.returncode == 1
        assert taken.stderr.startswith(f"error: port {port} of 127.0.0.1 cannot be had (Address already in use): name")


def test_a_sample_that_holds_a_script_is_shown_and_not_run(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": f"Say {SCRIPT}", "response": "\u202eno\x1b[31m"}) + "\n")
    convert([rows], str(tmp_path / "chats"))
    data = {"remote": str(tmp_path / "chats"), "processor": {"type": "tokens"}}
    page = sample_page({"": data}, "0")
    assert "&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt;" in page
    assert "<script" not in page
    assert "\\u202eno\\x1b[31m" in page
    assert "default-src 'none'" in page
    for sample, said in (
        ("5", "there is no sample 5 in a dataset of 1"),
        ("b:0", "the datasets of sample &#x27;b:0&#x27; are not known: watch the YAML file"),
        (SCRIPT, "&lt;script&gt;"),
    ):
        shown = sample_page({"": data}, sample)
        assert said in shown
        assert "<script" not in shown
    foreign = sample_page({"": {"dataset_type": "vision", "dataset_path": "x.jsonl"}}, "0")
    assert "read from their sources, and cannot be shown: convert the sources to see samples" in foreign
