from __future__ import annotations

import dataclasses
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from lmms_stream.doors.huggingface.trainer import FSDP2SFTTrainer
from lmms_stream.errors import CheckpointError, ConfigError, CursorError, StorageError, TrainingError
from lmms_stream.storage.local import LocalStorage
from lmms_stream.storage.locks import locked
from lmms_stream.storage.owner import OWNER_NAME, Owner
from lmms_stream.storage.storage import Storage, open_storage
from lmms_stream.train.checkpoint.checkpoint import Checkpointer, checkpoints
from lmms_stream.train.checkpoint.saving import STAGING_NAME, RunOwner, other_differences
from lmms_stream.train.checkpoint.store import _OURS, FileDigest, open_target, write_synced
from lmms_stream.train.checkpoint.tensors import NO_ROOM_BYTES, Stager, _failures, tensors_of
from lmms_stream.train.report.train_log import read_log
from lmms_stream.train.run.distributed import init_distributed
from lmms_stream.train.run.flow import SaveClock
from lmms_stream.train.run.settings import TrainConfig
from torch.distributed.fsdp import fully_shard
from transformers import TrainerCallback

from ..conftest import write_tokens
from ..emulators import EMULATED
from ..mds.test_disk_faults import small_disk
from ..rounds import LONG, in_long_rounds, rounds
from .runs import MODEL, trainer_of, write_small_run

Parts = tuple[torch.nn.Module, torch.optim.Optimizer]
DATA = "__0_0.distcp"


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    init_distributed(60)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=["folder", "s3", *(EMULATED if LONG else [])])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "checkpoints")
    return f"{request.getfixturevalue(request.param)}/{tmp_path.name}"


def make_parts(seed: int, *, width: int = 64) -> Parts:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.LayerNorm(width))
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def take_step(parts: Parts, seed: int) -> None:
    model, optimizer = parts
    width = int(next(model.parameters()).shape[-1])
    inputs = torch.randn(4, width, generator=torch.Generator().manual_seed(seed))
    model(inputs).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def values(parts: Parts) -> list[torch.Tensor]:
    """Copies of all parameters and of what the optimizer keeps of each."""
    model, optimizer = parts
    kept = [optimizer.state[each][name] for each in model.parameters() for name in sorted(optimizer.state[each])]
    return [_whole(each).clone() for each in (*model.parameters(), *kept)]


def _whole(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach()


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def checkpointer(location: str, tmp_path: Path, **options: Any) -> Checkpointer:
    return Checkpointer(location, staging=tmp_path / "staging", timeout_s=60, **options)


def save_steps(location: str, tmp_path: Path, *steps: int, **options: Any) -> list[list[torch.Tensor]]:
    """Checkpoints of these steps, each after an update; what they hold."""
    parts, saved = make_parts(0), []
    with checkpointer(location, tmp_path, **options) as made:
        for step in steps:
            take_step(parts, step)
            saved.append(values(parts))
            made.save(*parts, step=step, state={"cursor": step}, documents={"model/config.json": b"{}"})
    return saved


def resume(location: str, tmp_path: Path, choice: str = "auto") -> tuple[int, list[torch.Tensor]] | None:
    """The step resumed from and what was loaded."""
    parts = make_parts(1)
    with checkpointer(location, tmp_path) as made:
        found = made.find(choice)
        if found is None:
            return None
        checkpoint = made.resume(*parts, found)
    assert checkpoint.state["cursor"] == checkpoint.step == checkpoint.state["step"]
    return checkpoint.step, values(parts)


def steps_in(location: str) -> list[int]:
    names = {found.key.split("/")[0] for found in open_storage(location).list_objects("step-")}
    return sorted(int(name.removeprefix("step-")) for name in names)


def test_the_next_save_copies_tensors_to_the_memory_of_the_last(group: None) -> None:
    parts, stager, kinds = make_parts(0), Stager(), ("exp_avg", "exp_avg_sq", "step")
    take_step(parts, 1)
    pointers = []
    for seed in (2, 3):
        take_step(parts, seed)
        staged = stager.stage(tensors_of(*parts))
        state = [each[kind] for each in staged["optimizer"].values() for kind in kinds]
        copies = [*staged["model"].values(), *state]
        assert same([_whole(each) for each in copies], values(parts))
        pointers.append([getattr(each, "_local_tensor", each).data_ptr() for each in copies])
    assert pointers[0] == pointers[1]
    assert not {*pointers[0]} & {each.to_local().data_ptr() for each in parts[0].state_dict().values()}
    tied = torch.ones(3)
    for model in ({"a": torch.ones(2)}, {"a": tied, "b": tied}, {"a": tied + 1, "b": tied}):
        for number in range(2):
            stager.fence()
            tied.add_(1)
            staged = stager.stage({"model": {**model, "n": number}})["model"]
            assert staged.keys() == {*model, "n"}
            assert staged["n"] == number
            assert same([staged[name] for name in model], [*model.values()])
    stager.release()


def test_a_save_reads_nothing_that_it_wrote(group: None, tmp_path: Path) -> None:
    """Reads of this process are counted by the kernel; the digests are those of the files."""
    parts = make_parts(0, width=1024)
    take_step(parts, 1)
    with checkpointer(str(tmp_path / "checkpoints"), tmp_path, asynchronous=False) as made:
        before = _bytes_read()
        made.save(*parts, step=1, state={}, documents={})
        assert _bytes_read() - before < 1 << 20
    (folder,) = checkpoints(tmp_path / "checkpoints")
    written = json.loads((folder / "complete.json").read_bytes())["files"]
    assert written[DATA]["num_bytes"] > 4 << 20
    assert written == {name: dataclasses.asdict(FileDigest.of(folder / name)) for name in written}


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_is_saved_does_not_follow_the_training_that_goes_on(
    asynchronous: bool, group: None, location: str, tmp_path: Path
) -> None:
    parts = make_parts(0)
    take_step(parts, 1)
    before = values(parts)
    with checkpointer(location, tmp_path, asynchronous=asynchronous) as made:
        made.save(*parts, step=1, state={"cursor": 1}, documents={})
        for seed in range(2, 20):
            take_step(parts, seed)
    assert not same(values(parts), before)
    found = resume(location, tmp_path)
    assert found is not None
    assert found[0] == 1
    assert same(found[1], before)
    assert resume(f"{location}-of-none", tmp_path) is None
    assert not [path for path in tmp_path.rglob("*") if ".tmp" in path.name or "rank-0" in path.name]


def test_the_latest_stay_and_nothing_else_is_deleted(group: None, location: str, tmp_path: Path) -> None:
    storage = open_storage(location)
    save_steps(location, tmp_path, 1)
    storage.write("step-00000001/notes.txt", b"mine")
    storage.write("step-00000009/complete.json", b"of a run that got further")
    storage.write("notes.txt", b"mine")
    save_steps(location, tmp_path, 2, 3, 4, keep=2)
    assert steps_in(location) == [1, 3, 4, 9]
    assert [found.key for found in storage.list_objects("step-00000001/")] == ["step-00000001/notes.txt"]
    assert storage.read("notes.txt") == b"mine"


def test_files_of_a_tokenizer_have_any_names(group: None, tmp_path: Path) -> None:
    """A chat template is a file with a name of the user."""
    location, parts = str(tmp_path / "checkpoints"), make_parts(0)
    names = [f"model/{name}" for name in ("additional_chat_templates/tool use.jinja", "a+b.txt", "..c", "d/..e")]
    with checkpointer(location, tmp_path, keep=1) as made:
        for step in (1, 2):
            made.save(*parts, step=step, state={"cursor": step}, documents=dict.fromkeys(names, b"x"))
    found = resume(location, tmp_path)
    assert found is not None
    assert found[0] == 2
    assert sorted(each.name for each in Path(location).iterdir()) == ["step-00000002"]
    for outside in ("model/..", "model/../x", "model/.", "../x", "model/a/b/c"):
        assert not _OURS.fullmatch(outside)


def ours(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What this project logged."""
    return [record.getMessage() for record in caplog.records if record.name == "lmms_stream"]


def truncate(storage: Storage, key: str) -> None:
    storage.write(key, storage.read(key)[:-7])


def flip(storage: Storage, key: str) -> None:
    data = bytearray(storage.read(key))
    data[len(data) // 2] ^= 1
    storage.write(key, bytes(data))


def lose(storage: Storage, key: str) -> None:
    storage.delete(key)


CHANGED = "was changed after writing: its checksum differs"
SHORT = r"has \d+ of \d+ bytes"


@pytest.mark.parametrize(
    ("location", "damage", "name", "says"),
    [
        ("folder", truncate, DATA, SHORT),
        ("folder", flip, DATA, CHANGED),
        ("folder", lose, DATA, "is missing"),
        ("folder", flip, ".metadata", CHANGED),
        ("folder", truncate, "trainer.json", SHORT),
        ("folder", flip, "trainer.json", CHANGED),
        ("folder", truncate, "complete.json", "is not JSON"),
        ("folder", lose, "complete.json", "is missing"),
        pytest.param("s3", truncate, DATA, SHORT, marks=in_long_rounds),
        ("s3", flip, DATA, CHANGED),
        pytest.param("s3", flip, "trainer.json", CHANGED, marks=in_long_rounds),
        ("s3", lose, "complete.json", ""),
    ],
    indirect=["location"],
)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning_that_names_the_file(
    damage: Any, name: str, says: str, group: None, location: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, _ = save_steps(location, tmp_path, 1, 2)
    storage = open_storage(location)
    damage(storage, f"step-00000002/{name}")
    found = resume(location, tmp_path)
    assert found is not None
    assert found[0] == 1
    assert same(found[1], first)
    warnings = ours(caplog)
    if not says:  # in a store it was never finished
        assert warnings == []
        return
    (warning,) = warnings
    assert re.fullmatch(rf"{location}/step-00000002/{name} {says}: the checkpoint of step 2 is passed over", warning)
    with pytest.raises(CheckpointError, match=f"step-00000002/{name} {says}"):
        resume(location, tmp_path, f"{location}/step-00000002")
    damage(storage, f"step-00000001/{name}")
    with pytest.raises(CheckpointError, match=rf"no checkpoint is complete.*step-00000001/{name} {says}"):
        resume(location, tmp_path)
    assert not [*tmp_path.rglob("rank-0/*")]  # files of damaged checkpoints of a store
    save_steps(location, tmp_path, 1, 2)  # both are replaced
    found = resume(location, tmp_path)
    assert found is not None
    assert found[0] == 2


def test_what_to_resume_from_can_be_told(group: None, location: str, tmp_path: Path) -> None:
    assert resume(location, tmp_path, "never") is None
    first, second = save_steps(location, tmp_path, 3, 5)
    found = resume(location, tmp_path, f"{location}/step-00000003")
    assert found is not None
    assert same(found[1], first)
    found = resume(f"{location}-other", tmp_path, f"{location}/step-00000005/")
    assert found is not None
    assert same(found[1], second)
    with pytest.raises(
        CheckpointError, match=r"has checkpoints, the latest of step 5, and train\.resume is never: set"
    ):
        resume(location, tmp_path, "never")
    for missing in (f"{location}/step-00000004", location, "step-00000003"):
        with pytest.raises(CheckpointError, match=rf"^{missing} is no complete checkpoint: name one \(…/step-0"):
            resume(location, tmp_path, missing)


def test_what_killed_saves_left_is_no_checkpoint(group: None, location: str, tmp_path: Path) -> None:
    (first,) = save_steps(location, tmp_path, 1)
    storage = open_storage(location)
    for name in (DATA, ".metadata", "trainer.json"):
        left = ".step-00000002.tmp" if isinstance(storage, LocalStorage) else "step-00000002"
        storage.write(f"{left}/{name}", storage.read(f"step-00000001/{name}"))
    found = resume(location, tmp_path)
    assert found is not None
    assert same(found[1], first)
    save_steps(location, tmp_path, 3, keep=1)
    assert steps_in(location) == [3]
    assert [path.name for path in (tmp_path / "checkpoints").glob(".*")] == []


def save_and_wait(made: Checkpointer, parts: Parts) -> None:
    take_step(parts, 2)
    made.save(*parts, step=2, state={"cursor": 2}, documents={})
    made.wait()


def save_and_fail(made: Checkpointer, parts: Parts) -> None:
    with made:
        made.save(*parts, step=2, state={"cursor": 2}, documents={})
        raise ValueError("the first")


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk_is_an_error_and_the_checkpoint_before_survives(
    asynchronous: bool, group: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, num_bytes=1_600_000) as limit:
        if limit is not None:
            pytest.skip("mounting a small file system is not allowed here")
        location = str(disk / "checkpoints")
        parts = make_parts(0, width=256)  # some 800 KB
        take_step(parts, 1)
        before = values(parts)
        expected = (
            rf"checkpoint {location}/step-00000002 was not saved; .* unchanged: no room on the disk of .*: free some"
        )
        made = checkpointer(location, tmp_path, asynchronous=asynchronous)
        made.save(*parts, step=1, state={"cursor": 1}, documents={})
        with pytest.raises(CheckpointError, match=expected):
            save_and_wait(made, parts)
        with pytest.raises(ValueError, match="the first"):
            save_and_fail(checkpointer(location, tmp_path), parts)
        (line,) = ours(caplog)
        assert "step-00000002 was not saved" in line
        assert [path.name for path in (disk / "checkpoints").iterdir()] == ["step-00000001"]
        loaded = make_parts(1, width=256)
        with checkpointer(location, tmp_path) as made:
            found = made.find("auto")
            assert found is not None
            assert made.resume(*loaded, found).step == 1
        assert same(values(loaded), before)


def test_a_file_that_may_not_grow_is_an_error_and_the_checkpoint_before_survives(group: None, tmp_path: Path) -> None:
    location = str(tmp_path / "checkpoints")
    save_steps(location, tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(CheckpointError, match="step-00000002 was not saved; earlier checkpoints are"):
            save_steps(location, tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert steps_in(location) == [1]


@pytest.mark.parametrize(
    ("free", "message"), [(NO_ROOM_BYTES, "torch failed"), (NO_ROOM_BYTES - 1, "no room on the disk of .*: free some")]
)
def test_an_error_of_torch_is_that_of_a_full_disk_where_nearly_nothing_is_free(
    free: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    with pytest.raises(CheckpointError, match=f"^{message}"), _failures(tmp_path):
        raise RuntimeError("torch failed")


def test_a_synced_file_is_whole_before_the_disk_is_asked_to_keep_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    write_synced(tmp_path / "folder" / "file", b"1234")
    assert synced == [4]


def test_another_model_is_an_error_and_other_settings_are_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tokens(tmp_path / "data", num_samples=300)
    run = write_small_run(tmp_path / "run.yaml", tmp_path / "data", max_steps=2, global_batch=8)
    out = f"train.output_dir={tmp_path / 'out'}"
    trainer_of(run, out).train()
    (saved,) = checkpoints(tmp_path / "out" / "checkpoints")
    state = json.loads((saved / "trainer.json").read_text())
    assert (state["step"], state["samples_seen"] > 0, state["num_skipped_steps"]) == (2, True, 0)
    assert set(state["fingerprint"]["versions"]) == {"lmms_stream", "torch", "transformers"}
    with pytest.raises(
        CheckpointError, match=r"step-00000002 is of another model \(rms_norm_eps 1e-06, now 0\.001\): "
    ):
        trainer_of(run, out, "model.config.rms_norm_eps=0.001").train()
    with pytest.raises(CursorError, match="they differ in the order settings"):
        trainer_of(run, out, "dataset.seed=3").train()
    caplog.clear()
    trainer = trainer_of(run, out, "train.max_steps=3", "train.weight_decay=0.1", "train.learning_rate=0.5")
    trainer.train()
    (line,) = ours(caplog)
    assert line == (
        f"resumed from {saved} with other settings: train.learning_rate was 0.001, is 0.5; "
        "train.max_steps was 2, is 3; train.weight_decay was 0.0, is 0.1"
    )
    assert {group["weight_decay"] for group in trainer.optimizer.param_groups} == {0.1, 0.0}
    assert trainer.step == 3


def test_names_in_a_checkpoint_are_those_of_the_model_itself(tmp_path: Path) -> None:
    from lmms_stream.train.checkpoint.tensors import read_metadata, stored_tensors

    write_tokens(tmp_path / "data", num_samples=300)
    run = write_small_run(tmp_path / "run.yaml", tmp_path / "data", max_steps=1, output_dir=str(tmp_path / "out"))
    trainer = trainer_of(run)
    names = set(trainer.model.model.state_dict())
    trainer.train()
    (saved,) = checkpoints(tmp_path / "out" / "checkpoints")
    assert set(stored_tensors(read_metadata(saved), "model.")) == names
    shutil.rmtree(saved)


def test_what_a_model_drops_is_the_same_in_a_resumed_run(tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", num_samples=60)
    path = write_small_run(tmp_path / "run.yaml", tmp_path / "data", max_steps=4, lr_scheduler_type="constant")
    losses: dict[str, list[float]] = {}
    for name, *stops in (("whole", 3), ("resumed", 1, 3), ("other", 1)):
        output = tmp_path / name
        for stop in stops:
            overrides = [f"train.output_dir={output}", f"train.max_steps={stop}", "model.config.attention_dropout=0.3"]
            trainer_of(path, *overrides, *["train.seed=1"] * (name == "other")).train()
        losses[name] = [record["loss"] for record in read_log(output)]
    assert losses["resumed"] == losses["whole"]
    assert losses["whole"][0] != losses["other"][0]


@pytest.mark.parametrize("stored", rounds(["folder"], ["folder", "store"]))
def test_a_parameter_that_had_no_gradient_yet_does_not_keep_a_run_from_going_on(
    stored: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Here a tower for images of a run on text."""
    write_tokens(tmp_path / "data", num_samples=60)
    vision = {
        "model_type": "qwen2_vl",
        "text_config": {
            **MODEL, "model_type": "", "num_key_value_heads": 2,
            "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
        },
        "vision_config": {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32, "mlp_ratio": 2},
        **{f"{name}_token_id": 1 + i for i, name in enumerate(("image", "video", "vision_start", "vision_end"))},
    }  # fmt: skip
    path = write_small_run(tmp_path / "run.yaml", tmp_path / "data", max_steps=4, lr_scheduler_type="constant")
    settings = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**settings, "model": {"config": vision}}))
    losses = {}
    for name, *stops in (("whole", 2), ("resumed", 1, 2)):
        folder = request.getfixturevalue("s3_folder") + f"/{name}" if stored == "store" else tmp_path / name / "saved"
        for stop in stops:
            overrides = [f"train.output_dir={tmp_path / name}", f"train.checkpoint_dir={folder}"]
            trainer = trainer_of(path, *overrides, f"train.max_steps={stop}")
            trainer.train()
        losses[name] = [record["loss"] for record in read_log(tmp_path / name)]
        states = [len(trainer.optimizer.state.get(each, ())) for each in trainer.model.parameters()]
        assert 0 in states
        assert 3 in states
    assert losses["resumed"] == losses["whole"]
    assert len(losses["whole"]) == 2


def test_a_file_that_rank_0_sees_late_or_in_part_is_no_checkpoint(tmp_path: Path) -> None:
    target = open_target(str(tmp_path / "saved"), staging=tmp_path / "staging")
    (tmp_path / "whole").write_bytes(b"1234")
    files = {"a": FileDigest.of(tmp_path / "whole")}
    target.prepare(1)
    for there in (None, b"123"):
        if there is not None:
            (target.writing(1) / "a").write_bytes(there)
        with pytest.raises(
            CheckpointError, match=r"tmp/a was written by another rank, .*: checkpoint_dir must be a folder"
        ):
            target.commit(1, files)
        assert target.candidates() == []
    (target.writing(1) / "a").write_bytes(b"1234")
    target.commit(1, files)
    assert target.candidates() == [1]


class FailedSave(TrainerCallback):
    """Waits, after the step behind a save, until the save has failed; spoils the folder before the save."""

    trainer: FSDP2SFTTrainer

    def __init__(self, spoil: Callable[[Path], None]) -> None:
        self.spoil = spoil

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            self.spoil(Path(self.trainer.saver.url))
        control.should_save = state.global_step == 3
        if state.global_step == 4:
            deadline = time.monotonic() + 60
            while not self.trainer.saver.has_failed and time.monotonic() < deadline:
                time.sleep(0.01)


def leave_a_file_for_a_folder(folder: Path) -> None:
    """Where killed runs leave folders."""
    (folder / ".step-00000007.tmp").write_text("a file")


def unplug(folder: Path) -> None:
    """A file lies where the folder was, so that nothing can make the folder again."""
    folder.rename(folder.with_name("elsewhere"))
    folder.touch()


@pytest.mark.parametrize(
    ("spoil", "reason"), [(leave_a_file_for_a_folder, "Not a"), (unplug, "checkpo")], ids=["file", "unplugged"]
)
def test_a_save_in_flight_that_failed_is_told_in_the_next_step_and_not_at_the_next_save(
    spoil: Callable[[Path], None], reason: str, tmp_path: Path
) -> None:
    write_tokens(tmp_path / "data", num_samples=60)
    path = write_small_run(tmp_path / "run.yaml", tmp_path / "data", max_steps=40, save_steps=40)
    failed = FailedSave(spoil)
    failed.trainer = trainer_of(path, callbacks=[failed])
    message = rf"step-00000003 was not saved; earlier checkpoints are unchanged: .*{reason}"
    with pytest.raises(CheckpointError, match=message):
        failed.trainer.train()
    assert read_log(tmp_path / "default")[-1]["step"] in (4, 5)


@pytest.mark.parametrize(("minutes", "steps"), [(1e-9, [1, 2, 3]), (600, [3])])
def test_a_checkpoint_is_saved_when_so_many_minutes_have_passed(
    minutes: float, steps: list[int], tmp_path: Path
) -> None:
    write_tokens(tmp_path / "data", num_samples=60)
    path = write_small_run(tmp_path / "run.yaml", tmp_path / "data", max_steps=3, save_minutes=minutes)
    trainer_of(path).train()
    assert [each.name for each in checkpoints(tmp_path / "default" / "checkpoints")] == [
        f"step-{step:08d}" for step in steps
    ]


def test_the_clock_of_rank_0_alone_tells_when_a_checkpoint_is_due() -> None:
    assert [SaveClock(1e-9, rank=rank).is_due for rank in (0, 1)] == [True, False]
    assert not SaveClock(None, rank=0).is_due
    with pytest.raises(ConfigError, match=r"train\.save_minutes must be above 0, got 0"):
        TrainConfig(output_dir="out", global_batch=1, max_steps=1, save_minutes=0)
    with pytest.raises(ConfigError, match=r"save_minutes is 5, and train\.save_steps no saves nothing: set it to"):
        TrainConfig(output_dir="out", global_batch=1, max_steps=1, save_minutes=5, save_steps="no")


def test_a_setting_that_the_version_of_a_checkpoint_did_not_have_was_its_default() -> None:
    args = TrainConfig(output_dir="out", global_batch=2, max_steps=3, optim="sgd")
    saved = {"train": {"output_dir": "before", "global_batch": 2, "max_steps": 3}, "versions": {}}
    now = {"train": dataclasses.asdict(args), "versions": {}}
    assert other_differences(saved, now) == ["train.optim was 'adamw', is 'sgd'"]


@pytest.mark.parametrize("setting", ["output_dir", "checkpoint_dir"])
def test_two_runs_do_not_write_to_one_folder(setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was killed leaves nothing locked: the kernel frees its locks."""
    monkeypatch.setattr("lmms_stream.train.checkpoint.saving.OTHER_RUN_S", 0.1)
    write_tokens(tmp_path / "data", num_samples=40)
    folder = tmp_path / "own"
    settings: dict[str, Any] = {setting: str(folder)}
    path = write_small_run(tmp_path / "run.yaml", tmp_path / "data", max_steps=1, **settings)
    folder.mkdir()
    program = "import fcntl, sys; f = open(sys.argv[1], 'ab'); fcntl.flock(f, 2); print(flush=True); input()"
    command = [sys.executable, "-c", program, str(folder / ".run.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        stacks = folder / "stacks" / "rank-0.txt"  # opened by the other run, and still empty
        stacks.parent.mkdir()
        stacks.touch()
        trainer, before = trainer_of(path), files_below(folder)
        with pytest.raises(TrainingError, match=f"another run writes to {folder}: .*run another train.{setting}"):
            trainer.train()
        assert files_below(folder) == before
        other.kill()
    assert trainer.step == 0
    assert trainer.train().global_step == 1
    with locked(folder / ".run.lock", timeout_s=0) as file:
        assert file is not None


def test_a_live_run_has_its_checkpoints_by_any_setting(
    group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmms_stream.train.checkpoint.saving.OTHER_RUN_S", 0.1)

    def owner(name: str, checkpoint_dir: str | None = None) -> RunOwner:
        output_dir = str(tmp_path / name)
        return RunOwner(TrainConfig(output_dir=output_dir, checkpoint_dir=checkpoint_dir, global_batch=1, max_steps=1))

    runs = owner("a"), owner("b", checkpoint_dir=str(tmp_path / "a" / "checkpoints"))
    for first, second in (runs, runs[::-1]):
        with (
            first,
            pytest.raises(TrainingError, match=r"to .*/a/checkpoints: it holds .* another train.checkpoint_dir"),
        ):
            second.__enter__()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with owner("a", checkpoint_dir=f"{tmp_path}/link/"):  # one folder has one lock
        pass


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".run.lock"}


OWNING = """
import sys
from lmms_stream.storage.owner import Owner
from lmms_stream.storage.storage import open_storage
print(Owner(open_storage(sys.argv[1]), beat_s=float(sys.argv[2])).take(), flush=True)
sys.stdin.read()
"""


def test_two_runs_do_not_write_to_one_prefix_of_a_store(
    s3_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A killed run of this machine is followed at once, and a run of another machine after three beats."""
    monkeypatch.setattr("lmms_stream.train.checkpoint.saving.BEAT_S", 1.0)
    write_tokens(tmp_path / "data", num_samples=40)
    path = write_small_run(tmp_path / "run.yaml", tmp_path / "data", max_steps=1, checkpoint_dir=s3_folder)
    store = open_storage(s3_folder)
    command = [sys.executable, "-c", OWNING, s3_folder, "0.3"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "None\n"
        said = f"another run writes to {s3_folder}: process {other.pid} on .* train.checkpoint_dir"
        on_its_way = tmp_path / "default" / STAGING_NAME / "rank-0" / "step-00000001" / "__0_0.distcp"
        on_its_way.parent.mkdir(parents=True)
        on_its_way.write_bytes(b"of the other run")
        before = files_below(tmp_path / "default")
        trainer_of(path).build()
        trainer = trainer_of(path)
        with pytest.raises(TrainingError, match=said):
            trainer.train()
        assert files_below(tmp_path / "default") == before
        other.kill()
    assert trainer.step == 0
    killed = json.loads(store.read(OWNER_NAME))
    assert killed["pid"] == other.pid
    store.write(OWNER_NAME, json.dumps({**killed, "place": "another machine"}).encode())
    caplog.set_level("INFO", "lmms_stream")
    assert trainer.train().global_step == 1
    assert not on_its_way.exists()
    assert f"{OWNER_NAME} is of process {other.pid} on" in caplog.text
    assert "which has ended: this run takes over" in caplog.text
    assert OWNER_NAME not in {found.key for found in store.list_objects("")}
    caplog.clear()
    store.write(OWNER_NAME, json.dumps(killed).encode())
    on_its_way.parent.mkdir(parents=True)
    on_its_way.touch()
    longer = trainer_of(path, "train.max_steps=2")
    longer.build(None)  # reads the configs of the checkpoint, and owns nothing yet
    assert on_its_way.exists()
    assert longer.train().global_step == 2
    assert "this run takes over" in caplog.text
    assert "waits up to" not in caplog.text


def test_a_run_whose_store_was_taken_over_saves_nothing_more(s3_folder: str, tmp_path: Path, group: None) -> None:
    store, parts = open_storage(s3_folder), make_parts(0)
    owner = Owner(store, beat_s=600)
    assert owner.take() is None
    take_step(parts, 1)
    with checkpointer(s3_folder, tmp_path) as made:
        made.check_owner = owner.check
        made.save(*parts, step=1, state={}, documents={})
        made.wait()
        taken = json.dumps({**json.loads(store.read(OWNER_NAME)), "token": "other", "host": "elsewhere"}).encode()
        store.write(OWNER_NAME, taken)
        made.save(*parts, step=2, state={}, documents={})
        with pytest.raises(CheckpointError, match=r"is now of process \d+ on elsewhere, .*saves nothing more"):
            made.wait()
    assert steps_in(s3_folder) == [1]
    owner.release()
    assert store.read(OWNER_NAME) == taken
    store.write(OWNER_NAME, b"[1]")
    with pytest.raises(StorageError, match="is not of a run: remove or rename this object"):
        Owner(store).take()
