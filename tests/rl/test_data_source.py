"""Groups for rollouts: numbered over the whole run, put back, saved, and gone on with after a kill."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lmms_stream.doors.relax.arguments import _UNHEARD
from lmms_stream.doors.relax.in_flight import Group
from lmms_stream.errors import CheckpointError, ConfigError, CursorError, DataError, ObjectChangedError
from lmms_stream.rl import RolloutDataSource, RolloutDataSourceWithBuffer, Sample, add_data_arguments
from PIL import Image

from ..processes import run_module
from .rows import prompts, write_lines

STATE = "dataset/global_dataset_state_dict_"


def arguments(path: Path | None, folder: Path | str | None = None, **changes: Any) -> SimpleNamespace:
    parsed = add_data_arguments(argparse.ArgumentParser()).parse_args([])
    named = {"prompt_data": path and str(path), "input_key": "text", "label_key": "label", "n_samples_per_prompt": 2}
    saved = {"save": folder and str(folder), "load": folder and str(folder)}
    return SimpleNamespace(**{**vars(parsed), **named, **saved, **changes})


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "rows.jsonl", prompts(10))


def numbers(groups: list[Group]) -> list[tuple[Any, ...]]:
    """Of each group its number, the numbers of its samples, and its label."""
    return [(group[0].group_index, [each.index for each in group], group[0].label) for group in groups]


def test_flags_have_relaxs_defaults() -> None:
    parsed = vars(add_data_arguments(argparse.ArgumentParser()).parse_args([]))
    expected: dict[str, Any] = {
        "prompt_data": None, "label_key": None, "multimodal_keys": None, "system_prompt": None, "input_key": "input",
        "metadata_key": "metadata", "tool_key": "tools", "apply_chat_template": False, "rollout_shuffle": False,
        "use_streaming_dataset": False, "use_audio_in_video": False, "apply_chat_template_kwargs": {},
        "rollout_seed": 42, "rollout_max_prompt_len": None, "over_sampling_batch_size": None,
        "buffer_filter_path": None, "start_rollout_id": None, "num_rollout": None, "num_epoch": None,
        "rollout_batch_size": None, "n_samples_per_prompt": 1, "streaming_buffer_size": 10000,
        "prefetch_chunk_size": 32, "prefetch_max_cached": 256, "prefetch_num_workers": 1,
        "rollout_global_dataset": True,
    }  # fmt: skip
    assert expected.items() <= parsed.items()
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollout-seed", type=int, default=7)
    given = ["--multimodal-keys", '{"image":"images"}', "--disable-rollout-global-dataset", "--use-streaming-dataset"]
    options = add_data_arguments(parser).parse_args(given)
    assert (options.rollout_seed, options.multimodal_keys, options.rollout_global_dataset) == (
        7,
        {"image": "images"},
        False,
    )
    assert options.use_streaming_dataset
    assert "--prefetch-max-cached" in parser.format_help()


@pytest.mark.parametrize("name", _UNHEARD)
def test_settings_that_nothing_hears_are_refused_by_name(name: str, rows: Path) -> None:
    given: dict[str, Any] = {name: 2}
    with pytest.raises(ConfigError, match=rf"--{name.replace('_', '-')} \({name}\): not supported, .*: leave it out"):
        RolloutDataSource(arguments(rows, **given))
    off: dict[str, Any] = {name: None}
    RolloutDataSource(arguments(rows, **off))


@pytest.mark.parametrize("lazy", [False, True])
def test_groups_and_samples_are_numbered_over_the_whole_run(lazy: bool, rows: Path) -> None:
    source = RolloutDataSource(arguments(rows, use_streaming_dataset=lazy))
    assert numbers(source.get_samples(2)) == [(0, [0, 1], "0"), (1, [2, 3], "1")]
    groups = source.get_samples(19)
    assert len(groups) == 19
    assert numbers(groups)[-1] == (20, [40, 41], "0")
    assert (source.epoch_id, source.sample_offset, len(source), source.lengths()) == (2, 1, 10, 10)
    groups[0][0].metadata["seen"] = True
    assert "seen" not in groups[0][1].metadata
    assert "seen" not in source.get_samples(10)[1][0].metadata
    with pytest.raises(ConfigError, match="RolloutDataSource takes no groups back: use RolloutDataSourceWithBuffer"):
        source.add_samples(groups)
    with pytest.raises(ConfigError, match="the number of groups must be at least 0, got -1"):
        source.get_samples(-1)
    given: Any = "2"
    with pytest.raises(ConfigError, match="the number of groups must be a whole number, got '2': write 2"):
        source.get_samples(given)


def test_without_a_dataset_samples_are_empty_and_still_numbered_and_saved(tmp_path: Path) -> None:
    options = arguments(None, tmp_path, rollout_global_dataset=False)
    source = RolloutDataSourceWithBuffer(options)
    source.add_samples(source.get_samples(3)[1:])
    assert len(source) == 0
    source.save(0)
    resumed = RolloutDataSourceWithBuffer(options)
    resumed.load(0)
    assert numbers(resumed.get_samples(3)) == [(1, [2, 3], None), (2, [4, 5], None), (3, [6, 7], None)]


def test_groups_that_were_put_back_come_first_and_whole(rows: Path) -> None:
    source = RolloutDataSourceWithBuffer(arguments(rows))
    groups = source.get_samples(4)
    source.add_samples(groups[1:3])
    assert source.get_buffer_length() == 2
    assert numbers(source.get_samples(1)) == [(1, [2, 3], "1")]
    assert numbers(source.get_samples(3)) == [(2, [4, 5], "2"), (4, [8, 9], "4"), (5, [10, 11], "5")]
    with pytest.raises(DataError, match="a group has 1 samples and n_samples_per_prompt is 2: put whole groups back"):
        source.add_samples([groups[0], groups[1][:1]])
    with pytest.raises(DataError, match="a group must be a list of samples, got Sample"):
        source.add_samples(groups[0])  # type: ignore[arg-type]
    assert source.get_buffer_length() == 0


def last_first(args: Any, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]:
    return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]


def all_of_it(args: Any, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]:
    return buffer


def test_a_function_of_ones_own_chooses_groups_of_the_buffer(rows: Path) -> None:
    source = RolloutDataSourceWithBuffer(arguments(rows, buffer_filter_path=f"{__name__}.last_first"))
    source.add_samples(source.get_samples(3))
    assert [number for number, _, _ in numbers(source.get_samples(4))] == [2, 1, 0, 3]
    greedy = RolloutDataSourceWithBuffer(arguments(rows, buffer_filter_path=f"{__name__}.all_of_it"))
    greedy.add_samples(greedy.get_samples(3))
    with pytest.raises(ConfigError, match="the buffer filter gave 3 groups, expected 2"):
        greedy.get_samples(2)
    with pytest.raises(ConfigError, match=r"no\.such cannot be imported .*: name a function as MODULE\.NAME"):
        RolloutDataSourceWithBuffer(arguments(rows, buffer_filter_path="no.such"))


def all_but_kept(args: Any, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]:
    return buffer[:num_samples]


def test_no_group_of_the_buffer_is_lost_to_an_error_or_given_twice(rows: Path, tmp_path: Path) -> None:
    unkept = {"use_streaming_dataset": True, "streaming_buffer_size": 0, "prefetch_max_cached": 0}
    source = RolloutDataSourceWithBuffer(arguments(rows, tmp_path / "run", **unkept))
    source.add_samples(source.get_samples(3)[:2])
    text = rows.read_text()
    rows.write_text(text + "\n")  # the file is another, so that rows cannot be read
    with pytest.raises(ObjectChangedError):
        source.get_samples(40)
    assert source.get_buffer_length() == 2
    assert numbers(source.get_samples(2)) == [(0, [0, 1], "0"), (1, [2, 3], "1")]
    left = RolloutDataSourceWithBuffer(arguments(rows, buffer_filter_path=f"{__name__}.all_but_kept"))
    left.add_samples(left.get_samples(2))
    for path in ("all_but_kept", "the_first_twice"):
        left.buffer_filter = globals()[path]
        with pytest.raises(ConfigError, match="returned a group twice, or without deleting it from the buffer, so"):
            left.get_samples(2)
    assert left.get_buffer_length() == 2


def the_first_twice(args: Any, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]:
    return [buffer.pop(0)] * num_samples


def test_a_state_with_groups_in_its_buffer_is_refused_where_there_is_none(rows: Path, tmp_path: Path) -> None:
    source = RolloutDataSourceWithBuffer(arguments(rows, tmp_path))
    source.add_samples(source.get_samples(3)[:2])
    source.save(0)
    with pytest.raises(CursorError, match="buffer holds 2 groups, and RolloutDataSource has no buffer: use"):
        RolloutDataSource(arguments(rows, tmp_path)).load(0)


@pytest.mark.parametrize("name", ["dataset", "sample_index", "metadata", "buffer"])
def test_a_damaged_state_moves_nothing(name: str, rows: Path, tmp_path: Path) -> None:
    source = RolloutDataSourceWithBuffer(arguments(rows, tmp_path))
    source.add_samples(source.get_samples(3)[:1])
    source.save(0)
    path = tmp_path / f"{STATE}0.json"
    text = json.loads(path.read_text())
    text["values"][name] = [1]
    path.write_text(json.dumps(text))
    resumed = RolloutDataSourceWithBuffer(arguments(rows, tmp_path))
    with pytest.raises(CursorError, match=r"it is damaged|state of rollout 0 in .* is damaged"):
        resumed.load(0)
    assert (resumed.sample_offset, resumed.sample_index, resumed.buffer) == (0, 0, [])


def test_flags_of_json_say_how_they_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        add_data_arguments(argparse.ArgumentParser()).parse_args(["--multimodal-keys", "image"])
    assert "'image' is not a JSON object: write '{\"NAME\": VALUE}'" in capsys.readouterr().err


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("shuffled", [False, True])
def test_a_saved_source_goes_on_with_the_same_groups(lazy: bool, shuffled: bool, rows: Path, tmp_path: Path) -> None:
    options = arguments(rows, tmp_path / "run", rollout_shuffle=shuffled, use_streaming_dataset=lazy)
    source = RolloutDataSourceWithBuffer(options)
    source.add_samples(source.get_samples(13)[4:7])
    source.update_metadata({"best": 0.5})
    source.save(3)
    expected = [numbers(source.get_samples(8)) for _ in range(4)]
    for also_lazy in (lazy, not lazy):  # a state fits both kinds of datasets
        options.use_streaming_dataset = also_lazy
        resumed = RolloutDataSourceWithBuffer(options)
        resumed.load(3)
        assert resumed.get_metadata() == {"best": 0.5}
        assert [numbers(resumed.get_samples(8)) for _ in range(4)] == expected


def test_all_that_samples_hold_is_saved_without_pickles(rows: Path, tmp_path: Path) -> None:
    source = RolloutDataSourceWithBuffer(arguments(rows, tmp_path / "run"))
    groups = source.get_samples(2)
    sample = groups[0][0]
    sample.tokens, sample.rollout_log_probs, sample.reward = [1, 2, 3], [-0.5, float("-inf")], {"rule": 1.0}
    sample.status = Sample.Status.ABORTED
    odd: dict[Any, Any] = {"pair": (1, "x"), "__kind__": "mine", 7: None}
    sample.metadata = odd | {"name": np.float32(0.5), "raw": b"\x00\xff"}
    image = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    sample.multimodal_inputs = groups[0][1].multimodal_inputs = {"images": [image]}
    sample.multimodal_train_inputs = {"pixels": torch.arange(6).reshape(2, 3).to(torch.bfloat16), "grid": np.eye(2)}
    sample.multimodal_train_inputs |= {"none": torch.empty(0, 3), "one": torch.tensor(2.5)}
    sample.extra = "of my own"  # type: ignore[attr-defined]
    source.add_samples(groups)
    source.save(0)
    (folder,) = (tmp_path / "run").iterdir()
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".npz"]
    assert len(np.load(next(folder.glob("*.npz")), allow_pickle=False).files) == 7  # shared media are there once
    resumed = RolloutDataSourceWithBuffer(arguments(rows, tmp_path / "run"))
    resumed.load(0)
    found = resumed.buffer[0][0]
    assert found.multimodal_inputs is not None
    assert found.multimodal_train_inputs is not None
    assert np.array_equal(np.asarray(found.multimodal_inputs["images"][0]), np.asarray(image))
    pixels, grid = found.multimodal_train_inputs["pixels"], found.multimodal_train_inputs["grid"]
    assert pixels.dtype is torch.bfloat16
    assert torch.equal(pixels, sample.multimodal_train_inputs["pixels"])
    assert np.array_equal(grid, np.eye(2))
    for name in ("none", "one"):
        saved, loaded = sample.multimodal_train_inputs[name], found.multimodal_train_inputs[name]
        assert (loaded.shape, loaded.dtype, loaded.tolist()) == (saved.shape, saved.dtype, saved.tolist())
    media = ("multimodal_inputs", "multimodal_train_inputs")
    assert {k: v for k, v in vars(found).items() if k not in media} == {
        k: v for k, v in vars(sample).items() if k not in media
    }
    for wrong in (torch.eye(2).to_sparse(), image.convert("P")):
        sample.metadata = {"value": wrong}
        with pytest.raises(CheckpointError, match=r"dense tensors or PIL's images \(RGB, RGBA, L\), or leave"):
            source.save(1)
    sample.metadata = {"function": len}
    with pytest.raises(
        CheckpointError, match=r"state\.buffer\.metadata\.function is builtin_function_or_method, which"
    ):
        source.save(1)
    resumed.load(0)  # what could not be saved left nothing behind
    assert not list(folder.glob("*_1*"))


def test_states_are_found_by_rollout_and_wrong_ones_refused(rows: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    source = RolloutDataSourceWithBuffer(arguments(rows, run))
    source.load()  # nothing is there: it begins anew
    source.load(-1)
    for rollout in (2, 10):
        source.add_samples(source.get_samples(2)[:1])
        source.save(rollout)
        source.save(rollout)  # again, in the same place
    assert len(list((run / "dataset").iterdir())) == 4
    latest = RolloutDataSourceWithBuffer(arguments(rows, run))
    latest.load()
    assert latest.sample_group_index == 3
    with pytest.raises(CheckpointError, match=r"holds no state of rollout 3 .*: name a rollout that was saved"):
        latest.load(3)
    other = write_lines(tmp_path / "other.jsonl", prompts(11))
    for changes, error, message in (
        ({"prompt_data": str(other)}, CursorError, r"the state belongs to other data \(10 rows"),
        ({"rollout_shuffle": True}, CursorError, "the state was saved without --rollout-shuffle"),
        ({"n_samples_per_prompt": 3}, CursorError, "buffer holds groups of 2 samples and n_samples_per_prompt is 3"),
        ({"rollout_global_dataset": False}, CursorError, "the state is of a dataset and this run has no dataset"),
    ):
        with pytest.raises(error, match=message):
            RolloutDataSourceWithBuffer(arguments(rows, run, **changes)).load(2)
    arrays = next((run / "dataset").glob("*_2.*.npz"))
    arrays.write_bytes(arrays.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"is not what .*_2\.json was saved with: take an earlier state"):
        latest.load(2)
    arrays.unlink()
    with pytest.raises(CheckpointError, match=r"_2.json names a missing file"):
        latest.load(2)
    for text, message in (("{}", "is not a saved state"), ('{"version": 9}', "has version 9, expected 1")):
        (run / f"{STATE}2.json").write_text(text)
        with pytest.raises(CheckpointError, match=message):
            latest.load(2)
    with pytest.raises(ConfigError, match=r"no folder for states is set: set save \(--save\)"):
        RolloutDataSource(arguments(rows)).save(0)
    with pytest.raises(ConfigError, match="rollout_id must be a number of at least 0, got 'last'"):
        source.save("last")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="n_samples_per_prompt must be at least 1, got 0"):
        RolloutDataSource(arguments(rows, n_samples_per_prompt=0))
    with pytest.raises(ConfigError, match="there are no prompts: set --prompt-data"):
        RolloutDataSource(arguments(None))
    with pytest.raises(ConfigError, match="need hf_checkpoint"):
        RolloutDataSource(arguments(rows, apply_chat_template=True))


def test_states_lie_in_stores_too(rows: Path, s3_folder: str) -> None:
    source = RolloutDataSourceWithBuffer(arguments(rows, s3_folder))
    source.add_samples(source.get_samples(2))
    source.save(0)
    resumed = RolloutDataSourceWithBuffer(arguments(rows, s3_folder))
    resumed.load()
    assert numbers(resumed.get_samples(3)) == numbers(source.get_samples(3))


KILLED = """
import json, os, signal, sys
from types import SimpleNamespace
from lmms_stream.rl import RolloutDataSourceWithBuffer

options = SimpleNamespace(**json.loads(sys.argv[1]))
source = RolloutDataSourceWithBuffer(options)
source.load()
for rollout in range(int(sys.argv[2]), int(sys.argv[3])):
    groups = source.get_samples(3)
    print(rollout, json.dumps([[(each.group_index, each.index, each.label) for each in group] for group in groups]))
    sys.stdout.flush()
    if rollout == int(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)
    source.add_samples(groups[:1])
    source.save(rollout)
"""


def test_a_killed_run_goes_on_with_the_same_groups(rows: Path, tmp_path: Path) -> None:
    def run(name: str, first: int, killed_at: int) -> tuple[int, list[str]]:
        options = arguments(rows, tmp_path / name, use_streaming_dataset=True, rollout_shuffle=True)
        result = run_module(str(script), json.dumps(vars(options)), str(first), "9", str(killed_at), timeout_s=240)
        return result.returncode, result.stdout.splitlines()

    script = tmp_path / "killed_run.py"
    script.write_text(KILLED)
    status, expected = run("whole", 0, -1)
    assert (status, len(expected)) == (0, 9)
    status, before = run("killed", 0, 5)
    assert (status, len(before)) == (-9, 6)
    status, after = run("killed", 5, -1)
    assert status == 0
    assert before[:5] + after == expected
    assert before[5] == after[0]
