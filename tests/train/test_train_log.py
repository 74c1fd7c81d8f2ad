"""The log of a run as it is written and read: valid JSON lines, what counts of them, and disks that refuse."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
from lmms_stream.errors import DataError, StorageError
from lmms_stream.train.checkpoint.checkpoint import checkpoints
from lmms_stream.train.report.run_log import RunLog, StepProfiler, open_reports
from lmms_stream.train.report.train_log import LOG_NAME, RecordFile, history, read_log
from lmms_stream.train.run.counts import StepReading, Unreached
from lmms_stream.train.run.distributed import init_distributed
from lmms_stream.train.run.schedules import Schedule
from lmms_stream.train.run.settings import Reporter, TrainConfig
from lmms_stream.types import World
from torch.profiler import record_function
from transformers import TrainerCallback

from ..conftest import write_tokens
from ..mds.test_disk_faults import small_disk
from ..processes import ROOT, run_module
from .runs import trainer_of, write_small_run


def test_half_a_line_of_a_killed_run_goes_and_its_records_stay(tmp_path: Path) -> None:
    path = tmp_path / "run" / "log.jsonl"
    for before, kept in (("", []), ('{"step": 1', []), ('{"step": 1}\n{"st', [1]), ('{"step": 1}\n', [1])):
        path.parent.mkdir(exist_ok=True)
        path.write_text(before)
        log = RecordFile(path)
        log.write({"step": 2, "loss": 0.5})
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [*kept, 2]
        log.close()
    long = '{"step": 1, "sample_ids": [' + "7, " * 100_000
    path.write_text('{"step": 0}\n' + long)
    RecordFile(path).close()
    assert path.read_text() == '{"step": 0}\n'


def test_a_run_in_the_output_dir_of_another_that_goes_on_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = (
        "import sys; from pathlib import Path; from lmms_stream.train.report.train_log import RecordFile; "
        "log = RecordFile(Path(sys.argv[1])); print(log.is_shared, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path / LOG_NAME)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "False\n"
        (report,) = open_reports(tmp_path, (), first_step=1, settings={})
        report.close()
        assert f"another run writes {tmp_path / LOG_NAME}: two runs in one output_dir" in caplog.text
        other.communicate("", timeout=30)
    caplog.clear()
    (report,) = open_reports(tmp_path, (), first_step=1, settings={})
    report.close()
    assert not caplog.text


def strict_json(line: str) -> Any:
    """As RFC 8259 has it, without Python's NaN and Infinity."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return json.loads(line, parse_constant=refuse)


def test_what_is_not_finite_is_null_in_the_log(tmp_path: Path) -> None:
    log = RecordFile(tmp_path / "log.jsonl")
    log.write({"step": 1, "loss": float("nan"), "grad_norm": None, "perf/mfu": float("inf"), "sample_ids": [3]})
    log.close()
    (line,) = (tmp_path / "log.jsonl").read_text().splitlines()
    assert strict_json(line) == {"step": 1, "loss": None, "grad_norm": None, "perf/mfu": None, "sample_ids": [3]}


def test_steps_without_an_update_are_counted_and_left_out_of_the_gradient_norm(tmp_path: Path) -> None:
    """The first update, at this learning rate, makes every later loss NaN."""
    write_tokens(tmp_path / "data", num_samples=120)
    path = write_small_run(
        tmp_path / "run.yaml", tmp_path / "data", max_steps=4, learning_rate=1e38, lr_scheduler_type="constant"
    )
    together_by_two = ("together", "train.log_sample_ids=false", "train.logging_steps=2", "train.save_steps=3")
    for name, *options in (("single",), together_by_two):
        trainer_of(path, f"train.output_dir={tmp_path / name}", *options).train()
    for line in (tmp_path / "single" / "train_log.jsonl").read_text().splitlines():
        strict_json(line)
    single, together = read_log(tmp_path / "single"), read_log(tmp_path / "together")
    assert [record["num_skipped_steps"] for record in single] == [0, 1, 2, 3]
    norms = [record["grad_norm"] for record in single]
    assert norms[0] > 0
    assert norms[1:] == [None, None, None]
    assert [(record["step"], record["num_steps"], record["num_skipped_steps"]) for record in together] == [
        (2, 2, 1),
        (4, 2, 3),
    ]
    assert [record["grad_norm"] for record in together] == [norms[0], None]
    saved = checkpoints(tmp_path / "together" / "checkpoints")
    counts = [json.loads((each / "trainer.json").read_text()) for each in saved]
    assert [(each["step"], each["num_skipped_steps"]) for each in counts] == [(3, 2), (4, 3)]  # 3 has no record


def steps(*ranges: tuple[int, int]) -> list[dict[str, Any]]:
    """Records of the steps (begun, step]; `line` tells them apart."""
    return [{"step": step, "num_steps": step - begun, "line": line} for line, (begun, step) in enumerate(ranges)]


@pytest.mark.parametrize(
    ("ranges", "kept"),
    [
        ([(0, 1), (1, 2), (2, 3)], [0, 1, 2]),
        ([(0, 1), (1, 2), (2, 3), (1, 2), (2, 3), (3, 4)], [0, 3, 4, 5]),  # killed after 3, resumed from 1
        ([(0, 5), (5, 10), (8, 12), (12, 16)], [0, 2, 3]),  # another logging_steps: step 10 is not in line 2 alone
        ([(0, 1), (1, 2), (2, 3), (1, 2)], [0, 3]),  # resumed, and not as far as before yet
        ([(0, 1), (1, 2), (0, 1), (1, 2), (0, 1)], [4]),  # begun again, twice
    ],
)
def test_of_steps_that_a_resumed_run_did_again_the_later_records_count(
    ranges: list[tuple[int, int]], kept: list[int]
) -> None:
    assert [record["line"] for record in history(steps(*ranges)).steps] == kept


def test_evaluations_that_were_done_again_count_once() -> None:
    def evaluation(step: int, loss: float) -> dict[str, Any]:
        return {"step": step, "eval_loss": loss}

    records = steps((0, 10), (10, 20), (20, 30), (20, 30), (30, 40))
    log = [*records[:2], evaluation(25, 0.1), records[2], evaluation(35, 0.2)]
    assert history(log) == (records[:3], [evaluation(25, 0.1), evaluation(35, 0.2)])
    log += [evaluation(25, 0.3), *records[3:], evaluation(50, 0.4)]  # killed after 35, resumed from 20
    assert history(log) == ([*records[:2], *records[3:]], [evaluation(25, 0.3), evaluation(50, 0.4)])


def test_figures_of_a_script_join_the_record_of_their_step() -> None:
    (first, second), mine = steps((0, 1), (1, 2)), {"step": 2, "mine": 0.5}
    for log in ([first, second, mine], [first, mine, second]):
        assert history(log).steps == [first, second | mine]
    assert history([first, second, mine, second]).steps == [first, second]  # done again, without figures


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"step": 2, "lo', r"\(Unterminated string"),
        (b"\0\0\0\0", r"\(Expecting value"),
        (b"\xff\xfe{}", "not a record of a run"),
        (b"[1]", r"\(an object with its step\)"),
        (b'{"loss": 1.0}', r"\(an object with its step\)"),
        (b'{"step": "2"}', r"\(an object with its step\)"),
    ],
)
def test_a_damaged_line_is_named(line: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "train_log.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    with pytest.raises(
        DataError, match=rf"{re.escape(str(path))}:2: not a record of a run.*: remove the line"
    ) as error:
        read_log(tmp_path)
    assert re.search(reason, str(error.value))
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    assert read_log(tmp_path) == read_log(path) == [{"step": 1}]
    assert read_log(tmp_path / "none") == []


RUN = """
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
import torch
from lmms_stream.errors import StorageError
from lmms_stream.train.report.run_log import StepProfiler
from lmms_stream.train.report.run_log import RunLog
from lmms_stream.train.run.counts import StepReading, Unreached
from lmms_stream.train.run.distributed import init_distributed
from lmms_stream.train.run.schedules import Schedule
from lmms_stream.train.run.settings import Reporter, TrainConfig
from lmms_stream.types import World

from tests.mds.test_disk_faults import limit_files


def run(kind, output):
    if kind == "profile":
        with StepProfiler((0, 1), output_dir=output, rank=0, step=0):
            for _ in range(2000):
                torch.ones(2) + 1
        return
    args = TrainConfig(output_dir=str(output), global_batch=1, max_steps=9, report_to=[kind] * (kind != "log"))
    log = RunLog(args, world=World())
    schedule = Schedule(args, torch.optim.SGD([torch.zeros(1)]), max_steps=9)
    with log.running(schedule, step=0, position=0):
        for step in range(1, 1000):
            log.write({"step": step, **{f"{kind}/{n}": n / step for n in range(200)}}, position=0)

if sys.argv[2] == "limited":
    limit_files(40_000)
for kind in sys.argv[3:]:
    try:
        run(kind, Path(sys.argv[1], kind, "run"))
    except StorageError as error:
        print(error)
"""


def run_out_of_room(folder: Path, kinds: Sequence[str], *, num_bytes: int) -> list[str]:
    """The StorageErrors of what runs write, each to a disk of this size, in one process."""
    with ExitStack() as disks:
        limits = [disks.enter_context(small_disk(folder / kind, num_bytes=num_bytes)) for kind in kinds]
        (folder / "run.py").write_text(RUN)
        limited = "whole" if limits[0] is None else "limited"
        done = run_module(str(folder / "run.py"), str(folder), limited, *kinds, timeout_s=100)
        assert done.returncode == 0, done.stderr
        assert list((folder / "profile" / "run" / "profile").iterdir()) == []
    return done.stdout.splitlines()


def test_a_disk_that_fills_up_is_one_line_that_names_the_file(tmp_path: Path) -> None:
    full = r"no room on the disk of this node \((No space left on device|File too large)\): free some, and the same"
    expected = {
        "log": f"train_log.jsonl: {full}",
        "tensorboard": f"(train_log.jsonl|tensorboard): {full}",
        "profile": "profile/rank-0-step-1.json: the trace could not be written whole, as on a full disk",
    }
    lines = run_out_of_room(tmp_path, list(expected), num_bytes=160_000)
    for (kind, message), line in zip(expected.items(), lines, strict=True):
        assert re.match(f"{re.escape(str(tmp_path / kind))}/run/{message}", line), line


def test_a_folder_or_file_where_a_log_should_lie_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").touch()
    (tmp_path / "wandb").touch()
    reporters: list[tuple[Reporter, str]] = [("wandb", "wandb/run-id.txt"), ("tensorboard", "tensorboard")]
    for name, path in reporters:
        args = TrainConfig(output_dir=str(tmp_path), global_batch=1, max_steps=1, report_to=[name])
        log = RunLog(args, world=World())
        schedule = Schedule(args, torch.optim.SGD([torch.zeros(1)]), max_steps=1)
        with pytest.raises(
            StorageError, match=f"{re.escape(str(tmp_path / path))}: .*: check the path and its rights$"
        ):
            log.running(schedule, step=0, position=0).__enter__()
    (tmp_path / "train_log.jsonl").unlink()
    (tmp_path / "train_log.jsonl").mkdir()
    with pytest.raises(StorageError, match=r"train_log.jsonl: Is a directory: .*: check the path and its rights"):
        RecordFile(tmp_path / "train_log.jsonl")
    with pytest.raises(StorageError, match=r"train_log.jsonl: Is a directory: .*: check the path and its rights"):
        read_log(tmp_path)


def test_the_trace_of_a_resumed_run_lies_beside_that_of_the_one_before(tmp_path: Path) -> None:
    for step in (0, 4):
        with StepProfiler((1, 3), output_dir=tmp_path, rank=1, step=step) as profiler:
            for _ in range(step + 2):  # the first ends in the middle of its trace
                with record_function(f"begun at {step}"):
                    torch.ones(2)
                profiler.step()
    for path, begun in (("rank-1-step-2.json", 0), ("rank-1-step-6.json", 4)):
        names = [event.get("name") for event in json.loads((tmp_path / "profile" / path).read_text())["traceEvents"]]
        assert names.count(f"begun at {begun}") == (1 if begun == 0 else 2)
    assert len(list((tmp_path / "profile").iterdir())) == 2
    (tmp_path / "none").touch()
    broken = StepProfiler((0, 1, str(tmp_path / "none")), output_dir=tmp_path, rank=0, step=0)
    with pytest.raises(StorageError, match=r"none/rank-0-step-1.json: .*: check the path and its rights"), broken:
        broken.step()


def test_by_default_a_step_is_read_once_the_next_is_queued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only waits at once: before an evaluation, a checkpoint, a callback that needs the record, and at the end."""
    queued: list[StepReading] = []
    waits: list[tuple[int, int]] = []  # step, and queued steps

    class Counted(StepReading):
        def __init__(self, *args: Any):
            super().__init__(*args)
            queued.append(self)

        @property
        def values(self) -> Any:
            waits.append((queued.index(self) + 1, len(queued)))
            return vars(StepReading)["values"].func(self)

    class Reader(TrainerCallback):
        steps: ClassVar[list[int]] = []

        def on_log(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            self.steps.append(state.global_step)

    monkeypatch.setattr("lmms_stream.train.loop.StepReading", Counted)
    write_tokens(tmp_path / "data", num_samples=100)
    run = write_small_run(tmp_path / "run.yaml", tmp_path / "data", max_steps=6, save_steps=4, learning_rate=0.01)
    records: list[list[dict[str, Any]]] = []
    for name in ("late", "at once"):
        trainer = trainer_of(run, f"train.output_dir={tmp_path / name}")
        if name == "at once":
            trainer.add_callback(Reader)
        trainer.train()
        records.append([*history(read_log(tmp_path / name / LOG_NAME)).steps])
    late, at_once = waits[:6], [(step - 6, num - 6) for step, num in waits[6:]]
    assert late == [(1, 2), (2, 3), (3, 4), (4, 4), (5, 6), (6, 6)]
    assert at_once == [(step, step) for step in range(1, 7)]
    assert Reader.steps[:6] == [1, 2, 3, 4, 5, 6]
    times = ("seconds", "perf/", "data/", "memory/", "alerts")
    assert [
        [{name: value for name, value in each.items() if not name.startswith(times)} for each in of_run]
        for of_run in records[:1]
    ] == [
        [{name: value for name, value in each.items() if not name.startswith(times)} for each in of_run]
        for of_run in records[1:]
    ]
    assert [each["step"] for each in records[0]] == [1, 2, 3, 4, 5, 6]
    assert all(each["num_steps"] == 1 for each in records[0])


def test_a_group_without_a_gradient_in_the_first_steps_that_reach_it_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Groups: by patterns, and towers, which only steps with their media reach."""
    init_distributed(60)
    parts = {name: torch.nn.Linear(2, 2, bias=False) for name in ("text", "extra", "seen", "blind", "between")}
    inner = torch.nn.ModuleDict(parts)
    inner.get_decoder = lambda: torch.nn.ModuleList([parts["text"], parts["extra"]])  # type: ignore[assignment]
    towers = {"image": parts["seen"], "video": parts["seen"], "audio": parts["blind"]}
    family = SimpleNamespace(kinds_of=lambda inputs: {*inputs})
    model = SimpleNamespace(model=inner, towers=towers, family=family)
    groups = Unreached(model, ["*", "extra.*"])
    world = World(rank=0, world_size=1)
    for step in range(1, 70):
        media = groups.media([cast(Any, SimpleNamespace(inputs=["image", "audio"] if step % 3 == 0 else []))])
        for name in ("text", "between", "seen"):
            parts[name].weight.grad = torch.full((2, 2), 1e-30 if name == "text" or step % 3 == 0 else 0.0)
        parts["blind"].weight.grad = torch.zeros(2, 2)
        reached = groups.reached(media)
        groups.take(reached, [float(each.gradient()) for each in reached], step=step, world=world)
    told = [each.getMessage().removeprefix("no gradient has reached the parameters of ") for each in caplog.records]
    assert [each.partition(":")[0] for each in told] == [
        "train.groups 'extra.*' in the first 20 steps that should, up to step 20",
        "train.groups '*', of audio in the first 20 steps that should, up to step 60",
    ]
    assert groups.reached([1.0, 1.0, 1.0]) == []
