"""Rollouts of finished groups. Prompts in flight when an actor or the run is killed are neither lost nor repeated."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lmms_stream.doors.relax.in_flight import Group
from lmms_stream.errors import ConfigError, DataError
from lmms_stream.rl import RolloutDataSource, RolloutDataSourceWithBuffer, RolloutManager, Sample

from ..conftest import last_words
from ..processes import run_module
from ..rounds import rounds
from .rows import prompts, write_lines

NUM_ROWS = 24
DONE, ABORTED = Sample.Status.COMPLETED, Sample.Status.ABORTED


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lines(tmp_path_factory.mktemp("rows") / "rows.jsonl", prompts(NUM_ROWS))


def options(path: Path, folder: Path | None = None, **changes: Any) -> SimpleNamespace:
    given = {"prompt_data": str(path), "input_key": "text", "label_key": "label", "n_samples_per_prompt": 2}
    places = {"rollout_batch_size": 4, "save": folder and str(folder), "load": folder and str(folder)}
    return SimpleNamespace(**{**given, **places, **changes})


def numbers(groups: list[Group]) -> list[int]:
    return [group[0].group_index or 0 for group in groups]


def a_word(args: Any, samples: list[Sample]) -> None:
    """A word more of each response; those of odd samples have two."""
    for sample in samples:
        sample.response += "w"
        sample.response_length += 1
        is_done = sample.response_length > (sample.index or 0) % 2
        sample.status = DONE if is_done else ABORTED


def at_once(args: Any, samples: list[Sample]) -> None:
    for sample in samples:
        sample.response, sample.response_length, sample.status = "w" * (sample.index or 0), 1, DONE


def length(args: Any, sample: Sample) -> float:
    return float(len(sample.response))


def test_a_rollout_has_its_groups_and_what_is_too_much_comes_first_in_the_next(rows: Path) -> None:
    args = options(rows, over_sampling_batch_size=6)
    source = RolloutDataSourceWithBuffer(args)
    asked: list[int] = []

    def generate(args: Any, samples: list[Sample]) -> None:
        asked.append(len(samples))
        at_once(args, samples)

    manager = RolloutManager(args, source, generate, length)
    assert [numbers(manager.generate()) for _ in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert asked == [12, 8, 8]  # finished groups that come back are not generated again
    assert (source.get_buffer_length(), source.get_num_in_flight()) == (2, 0)
    assert [sample.reward for sample in source.get_samples(1)[0]] == [24.0, 25.0]


@pytest.mark.parametrize("partial", [False, True])
def test_unfinished_groups_go_back_with_what_they_have_or_as_prompts(partial: bool, rows: Path) -> None:
    args = options(rows, partial_rollout=partial, mask_offpolicy_in_partial_rollout=partial, rollout_batch_size=2)
    source = RolloutDataSourceWithBuffer(args)
    calls = 0

    def generate(args: Any, samples: list[Sample]) -> None:
        nonlocal calls
        calls += 1
        for sample in samples if not partial and calls % 2 else ():  # these begin anew, so they end at once
            sample.response, sample.response_length, sample.status = "w", 1, ABORTED
        if partial or not calls % 2:
            (a_word if partial else at_once)(args, samples)

    groups = RolloutManager(args, source, generate, length).generate(5)
    assert numbers(groups) == [0, 1]
    assert [[sample.abort_count for sample in group] for group in groups] == ([[0, 1]] * 2 if partial else [[1, 1]] * 2)
    last = groups[0][1]
    assert last.response == ("ww" if partial else "w")
    assert last.loss_mask == ([0] if partial else None)  # of what the rollout before has generated
    assert last.metadata == ({"number": 0, "start_rollout_id": 5} if partial else {"number": 0})
    assert last.reward == (2.0 if partial else 1.0)


def test_rollouts_that_training_has_not_reached_are_made_again_after_a_kill(rows: Path, tmp_path: Path) -> None:
    args = options(rows, tmp_path)
    source = RolloutDataSourceWithBuffer(args)
    manager = RolloutManager(args, source, at_once, length)
    made = [numbers(manager.generate(rollout)) for rollout in range(3)]
    source.save(0)  # training is two rollouts behind
    resumed = RolloutDataSourceWithBuffer(args)
    resumed.load()
    again = RolloutManager(args, resumed, at_once, length)
    assert [numbers(again.generate(rollout)) for rollout in (1, 2, 3)] == [*made[1:], [12, 13, 14, 15]]


def keeps_even(args: Any, group: Group) -> bool:
    return (group[0].group_index or 0) % 2 == 0


def test_groups_that_a_filter_drops_are_not_part_of_a_rollout_and_do_not_come_back(rows: Path) -> None:
    args = options(rows, dynamic_sampling_filter_path=f"{__name__}.keeps_even")
    source = RolloutDataSourceWithBuffer(args)
    manager = RolloutManager(args, source, at_once, length)
    assert numbers(manager.generate()) == [0, 2, 4, 6]
    assert (manager.num_filtered, source.get_buffer_length(), source.get_num_in_flight()) == (4, 0, 0)


def without_first(args: Any, groups: list[list[Sample]]) -> None:
    groups[0][0].remove_sample = True


def test_a_filter_leaves_samples_of_a_rollout_out_of_the_loss(rows: Path) -> None:
    args = options(rows, rollout_sample_filter_path=f"{__name__}.without_first")
    groups = RolloutManager(args, RolloutDataSourceWithBuffer(args), at_once, length).generate()
    assert [group[0].remove_sample for group in groups] == [True, False, False, False]


def test_long_prompts_come_first_among_those_that_are_asked_for_together(rows: Path) -> None:
    source = RolloutDataSourceWithBuffer(options(rows, sort_prompts_by_length=True))
    groups = source.get_samples(9)
    assert [len(str(group[0].prompt).split()) for group in groups] == [7, 6, 5, 4, 3, 2, 2, 1, 1]
    assert numbers(groups) == [6, 5, 4, 3, 2, 1, 8, 0, 7]  # of equal lengths in their order
    source.add_samples(groups[:2])
    assert numbers(source.get_samples(3)) == [6, 5, 9]


def test_evaluation_goes_through_each_dataset_once(rows: Path, tmp_path: Path) -> None:
    other = write_lines(tmp_path / "other.jsonl", [{"q": "what?", "a": "that"}, {"q": "who?", "a": "she"}])
    args = options(rows, eval_prompt_data=["first", f"{rows}@[:3]"], n_samples_per_eval_prompt=2)
    found = RolloutManager(args, RolloutDataSourceWithBuffer(args), a_word, length).eval()
    assert [sample.label for sample in found["first"]["samples"]] == ["0", "0", "1", "1", "2", "2"]
    assert found["first"]["rewards"] == [1.0, 2.0] * 3
    assert found["first"]["truncated"] == [False] * 6
    named = options(rows, eval_prompt_data=["mine", str(other)], eval_input_key="q", eval_label_key="a")
    (samples,) = (each["samples"] for each in RolloutManager(named, None, at_once, length).eval().values())  # type: ignore[arg-type]
    assert [(sample.prompt, sample.label) for sample in samples] == [("what?", "that"), ("who?", "she")]
    with pytest.raises(ConfigError, match="--eval-prompt-data has 1 words: write pairs of"):
        RolloutManager(options(rows, eval_prompt_data=["mine"]), None, at_once, length).eval()  # type: ignore[arg-type]


def test_what_cannot_go_on_is_an_error_after_which_all_groups_are_there(rows: Path) -> None:
    args = options(rows)
    source = RolloutDataSourceWithBuffer(args)
    with pytest.raises(DataError, match="generate has left all 8 samples as they were: set status"):
        RolloutManager(args, source, lambda args, samples: None, length).generate()
    assert numbers(source.get_samples(5)) == [0, 1, 2, 3, 4]
    with pytest.raises(ConfigError, match="rollout_batch_size must be at least 1, got None: set --rollout-batch-size"):
        RolloutManager(options(rows, rollout_batch_size=None), source, at_once, length)
    unset: Any = None
    for name in ("rollout_batch_size", "over_sampling_batch_size", "n_samples_per_eval_prompt"):
        wrong: Any = {name: -1}
        with pytest.raises(ConfigError, match=f"{name} must be at least 1, got -1"):
            RolloutManager(options(rows, **wrong), source, at_once, length)
    with pytest.raises(ConfigError, match="reward must be a function, got None: see RolloutManager"):
        RolloutManager(args, source, at_once, unset)
    with pytest.raises(ConfigError, match="RolloutDataSource takes no groups back: give a RolloutDataSourceWithBuffer"):
        RolloutManager(args, RolloutDataSource(args), at_once, length)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"--partial-rollout-max-aborted-count \(.*\): not supported"):
        RolloutManager(options(rows, partial_rollout_max_aborted_count=2), source, at_once, length)
    with pytest.raises(ConfigError, match=r"--rollout-all-samples-process-path \(.*\): not supported"):
        RolloutManager(options(rows, rollout_all_samples_process_path="a.b"), source, at_once, length)
    with pytest.raises(ConfigError, match=r"--eval-config \(eval_config\): not supported"):
        RolloutManager(options(rows, eval_config="eval.yaml"), source, at_once, length).eval()


def test_a_late_result_of_a_holder_that_was_taken_for_lost_is_noticed(rows: Path) -> None:
    source = RolloutDataSourceWithBuffer(options(rows))
    late = source.get_samples(2, holder="slow")
    assert source.put_back("quick") == 0
    assert source.put_back("slow") == 2
    with pytest.raises(DataError, match="group 0 is not in flight: it was finished before, or put back"):
        source.finish(late)
    with pytest.raises(DataError, match="group 0 is already in the buffer"):
        source.add_samples(late)
    again = source.get_samples(2, holder="quick")
    source.finish([0])
    source.add_samples(again[1:])
    assert (source.get_num_in_flight(), numbers(source.get_samples(1))) == (0, [1])
    with pytest.raises(DataError, match="a group has no group_index"):
        source.finish([[Sample()]])


def test_a_group_that_is_returned_twice_in_a_call_is_refused_with_the_whole_call(rows: Path) -> None:
    source = RolloutDataSourceWithBuffer(options(rows))
    first, second = source.get_samples(2, holder="one")
    with pytest.raises(DataError, match="group 0 is already in the buffer"):
        source.add_samples([second, first, first])
    with pytest.raises(DataError, match="a group has no group_index"):
        source.add_samples([first, [Sample() for _ in first]])
    for twice in ([1, 0, 1], [second, first, second]):
        with pytest.raises(DataError, match="group 1 is not in flight"):
            source.finish(twice)
    assert (source.get_num_in_flight(), source.get_buffer_length()) == (2, 0)


@pytest.mark.parametrize("seed", range(rounds(6, 60)))
def test_whatever_happens_each_prompt_is_trained_on_once(seed: int, rows: Path, tmp_path: Path) -> None:
    """Groups are handed out, come back, are lost, delivered ahead of the training and saved, in any order."""
    rng = random.Random(seed)
    args = options(rows, tmp_path, use_streaming_dataset=True, rollout_shuffle=True)
    source = RolloutDataSourceWithBuffer(args)
    order = [sample.label for sample in RolloutDataSourceWithBuffer(options(rows, rollout_shuffle=True)).dataset or ()]
    handed: dict[str, list[Group]] = {"a": [], "b": [], "c": []}
    trained: dict[int, list[Group]] = {}
    saved, rollout = -1, 0
    for _ in range(120):
        holder = rng.choice("abc")
        event = rng.choice(["take", "take", "deliver", "deliver", "return", "lose", "save", "kill"])
        mine = handed[holder]
        if event == "take":
            mine += source.get_samples(rng.randint(1, 3), holder=holder)
        elif event == "deliver" and mine:
            source.finish(mine, rollout)
            trained[rollout] = trained.get(rollout, []) + mine
            handed[holder] = []
            rollout += rng.randint(0, 1)
        elif event == "return" and mine:
            source.add_samples([mine.pop()])
        elif event == "lose":
            assert source.put_back(holder) == len(mine)
            handed[holder] = []
        elif event == "save" and saved + 1 < rollout:
            saved = rng.randint(saved + 1, rollout - 1)  # training is behind the rollouts
            source.save(saved)
        elif event == "kill":
            source = RolloutDataSourceWithBuffer(args)
            source.load()
            handed = {"a": [], "b": [], "c": []}
            trained = {number: groups for number, groups in trained.items() if number <= saved}
            rollout = saved + 1
    source.put_back()
    found = [group for groups in trained.values() for group in groups]
    found += source.get_samples(source.get_buffer_length())
    assert sorted(numbers(found)) == list(range(source.sample_group_index))
    first_epoch = [group for group in found if numbers([group])[0] < NUM_ROWS]
    assert all(group[0].label == order[number] for group, number in zip(first_epoch, numbers(first_epoch), strict=True))


ACTORS = """
import json, os, signal, sys
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from lmms_stream.rl import RolloutDataSourceWithBuffer, Sample

path, folder, num_actors, num_rollouts, killed_at = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:])
context = get_context("fork")
source = RolloutDataSourceWithBuffer(SimpleNamespace(
    prompt_data=path, input_key="text", label_key="label", n_samples_per_prompt=2, save=str(folder), load=str(folder)))
source.load()

def act(connection):
    while True:
        groups = connection.recv()
        for sample in (sample for group in groups for sample in group):
            if sample.group_index == 6 and not (folder / "killed").exists():
                (folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            sample.response, sample.status = f"answer {sample.label}", Sample.Status.COMPLETED
        connection.send(groups)

def start(holder):
    here, there = context.Pipe()
    process = context.Process(target=act, args=(there,), daemon=True)
    process.start()
    there.close()
    here.send(source.get_samples(2, holder=holder))
    return here

actors = {holder: start(holder) for holder in map(str, range(num_actors))}
rollout, ready = source.get_metadata().get("rollout", -1) + 1, []
while rollout < num_rollouts:
    for connection in wait(actors.values()):
        holder = next(name for name, each in actors.items() if each is connection)
        try:
            done = connection.recv()
        except (EOFError, ConnectionError):
            print("lost", source.put_back(holder), flush=True)
            actors[holder] = start(holder)
        else:
            for group in done:
                source.finish([group], rollout + len(ready) // 4)  # in which it will be trained on
                ready.append(group)
            connection.send(source.get_samples(2, holder=holder))
    while len(ready) >= 4 and rollout < num_rollouts:
        batch, ready = ready[:4], ready[4:]
        print(json.dumps([rollout, [[(s.group_index, s.index, s.label, s.response) for s in g] for g in batch]]),
              flush=True)
        if rollout == killed_at:
            os.killpg(0, signal.SIGKILL)
        source.update_metadata({"rollout": rollout})
        source.save(rollout)
        rollout += 1
"""


@pytest.mark.parametrize("num_actors", [1, 3])
def test_killed_actors_and_killed_runs_lose_no_prompts_and_repeat_none(
    num_actors: int, rows: Path, tmp_path: Path
) -> None:
    def run(killed_at: int) -> list[str]:
        words = (str(rows), str(tmp_path), str(num_actors), "8", str(killed_at))
        result = run_module(str(script), *words, timeout_s=240)
        assert result.returncode == (0 if killed_at < 0 else -9), last_words(result.stdout + result.stderr)
        return result.stdout.splitlines()

    script = tmp_path / "actors.py"
    script.write_text(ACTORS)
    (tmp_path / "dataset").mkdir()
    before, after = run(killed_at=4), run(killed_at=-1)
    assert (tmp_path / "killed").exists()  # an actor was; of several, the run can be killed before it notices
    lost = [line for line in before + after if line.startswith("lost")]
    assert lost == ["lost 2"] or (num_actors > 1 and not lost)
    rollouts = [json.loads(line) for line in before if line.startswith("[")][:4]  # the fifth was trained on, not saved
    rollouts += [json.loads(line) for line in after if line.startswith("[")]
    assert [number for number, _ in rollouts] == list(range(8))
    groups = [[tuple(sample) for sample in group] for _, batch in rollouts for group in batch]
    left = RolloutDataSourceWithBuffer(options(rows, tmp_path))
    left.load()
    waiting = left.get_samples(left.get_buffer_length())
    assert waiting  # what the actors had when the run ended
    groups += [[(each.group_index, each.index, each.label, "") for each in group] for group in waiting]
    assert sorted(group[0][0] for group in groups) == list(range(left.sample_group_index))
    for group in groups:
        number = group[0][0]
        label = str(number % NUM_ROWS)
        answer = group[0][3] and f"answer {label}"
        assert group == [(number, 2 * number + copy, label, answer) for copy in range(2)]
