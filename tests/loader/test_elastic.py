"""The same global batches for any world, which changes in the middle of an epoch: with a plan, and in lanes."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pytest
from lmms_stream.errors import ConfigError, CursorError
from lmms_stream.loader.collate import collate
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.loader.workers import StartMethod
from lmms_stream.mds.core import PackingMode
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.packing import Overlong, PackingConfig
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.types import Batch, Processed, Sample, World

from ..conftest import write_tokens
from ..rounds import LONG, rounds

GLOBAL_BATCH = 8
NUM_LANES = 12  # shared by 1, 2 and 4 ranks with 1 or 3 workers each
WORLDS = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)]  # ranks, nodes

Tokens = tuple[int, ...]  # of a pack
Steps = dict[int, list[Tokens]]  # step -> its packs, sorted

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine with fewer cores


@dataclass(frozen=True)
class Reading:
    """What all ranks delivered: the packs of each step, and their merged state after it."""

    steps: Steps
    state: dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    write_tokens(folder, num_samples=3000)
    return folder


def open_dataset(
    folder: Path, mode: PackingMode, *, overlong: Overlong = "error", packing_length: int = 256
) -> PackedStreamingDataset:
    return PackedStreamingDataset(
        folder,
        processor=TokensProcessor(),
        packing=PackingConfig(packing_length=packing_length, window=64, overlong=overlong),
        packing_mode=mode,
        order=OrderConfig(seed=5, num_canonical_nodes=NUM_LANES, shuffle_block_size=150),
    )


def read(
    dataset: PackedStreamingDataset,
    *,
    num_steps: int,
    state: dict[str, Any] | None = None,
    world: tuple[int, int] = (1, 1),
    num_workers: int = 0,
    global_batch: int = GLOBAL_BATCH,
    balance: str | int = "deal",
) -> Reading:
    """Steps of all ranks from a state on, epoch after epoch."""
    steps: Steps = defaultdict(list)
    states = []
    world_size, num_nodes = world
    for rank in range(world_size):
        loader = PackedLoader(
            dataset,
            global_batch=global_batch,
            balance=balance,
            world=World(rank=rank, world_size=world_size, num_nodes=num_nodes),
            num_workers=num_workers,
            timeout_s=60,
        )
        if state is not None:
            loader.load_state_dict(state)
        first = loader.step
        while loader.step < first + num_steps:
            for batch in loader:
                steps[batch.step].append(tuple(batch.input_ids[0].tolist()))
                if loader.step == first + num_steps:
                    break
        states.append(loader.state_dict())
    if loader.state_is_per_rank:
        merged = PackedLoader.merge_states(states)
    else:
        assert all(each == states[0] for each in states)
        merged = states[0]
    return Reading({step: sorted(packs) for step, packs in steps.items()}, json.loads(json.dumps(merged)))


Whole = Callable[[PackingMode, int], Reading]


@pytest.fixture(scope="module")
def read_whole(folder: Path) -> Whole:
    """So many steps by one rank without workers, each once for all tests."""
    return cache(lambda mode, num_steps: read(open_dataset(folder, mode), num_steps=num_steps))


@pytest.mark.parametrize("mode", ["plan", "lanes"])
@pytest.mark.parametrize(
    ("world", "num_workers"),
    [
        (world, num_workers)
        for world in WORLDS
        for num_workers in (0, 1, 3)
        if LONG or (world, num_workers) in (((1, 1), 0), ((1, 1), 3), ((2, 2), 0), ((4, 2), 0), ((4, 2), 3))
    ],
)
def test_resumed_twice_at_random_steps_in_any_world_the_global_batches_are_the_same(
    folder: Path, read_whole: Whole, mode: PackingMode, world: tuple[int, int], num_workers: int
) -> None:
    dataset = open_dataset(folder, mode)
    rng = np.random.default_rng([world[0], world[1], num_workers, mode == "plan"])
    first, second = (int(count) for count in rng.integers(1, 6, 2))
    whole = read_whole(mode, first + second + 5)
    at_first = read(dataset, num_steps=first, world=WORLDS[int(rng.integers(5))])
    at_second = read(dataset, num_steps=second, state=at_first.state, world=world, num_workers=num_workers)
    rest = read(
        open_dataset(folder, mode),
        num_steps=5,
        state=at_second.state,
        world=WORLDS[int(rng.integers(5))],
        num_workers=int(rng.choice([0, 1, 3])),
    )
    assert at_first.steps | at_second.steps | rest.steps == whole.steps
    assert rest.state == whole.state


@pytest.mark.parametrize("mode", ["plan", "lanes"])
def test_resumed_around_the_end_of_an_epoch_the_global_batches_are_the_same(folder: Path, mode: PackingMode) -> None:
    dataset = open_dataset(folder, mode)
    num_packs = open_dataset(folder, "plan").plan.num_packs(0)
    last = -(-num_packs // GLOBAL_BATCH)
    whole = read(dataset, num_steps=last + 6)
    for stop in (last - 1, last, last + 1):
        before = read(dataset, num_steps=stop, world=(2, 1))
        after = read(open_dataset(folder, mode), num_steps=last + 6 - stop, state=before.state, world=(4, 2))
        assert before.steps | after.steps == whole.steps


@pytest.mark.parametrize("num_workers", [0, 3])
def test_ranks_and_workers_without_packs_in_a_short_step_pad_it(folder: Path, num_workers: int) -> None:
    dataset = open_dataset(folder, "plan")
    num_packs = dataset.plan.num_packs(0)
    global_batch = num_packs // 4 // 3 * 12 - 12  # which leaves some packs for a last step, fewer than a quarter
    assert 0 < num_packs % global_batch < global_batch // 4
    whole = read(dataset, num_steps=2, global_batch=global_batch)
    assert len(real_packs(whole.steps)) == num_packs
    shared = read(dataset, num_steps=2, global_batch=global_batch, world=(4, 2), num_workers=num_workers)
    assert shared == whole


@pytest.mark.parametrize(("world", "num_workers"), [((1, 1), 3), ((2, 2), 1), ((4, 2), 0)])
def test_resumed_inside_windows_in_any_world_the_global_batches_are_the_same(
    folder: Path, world: tuple[int, int], num_workers: int
) -> None:
    dataset = open_dataset(folder, "plan")
    whole = read(dataset, num_steps=17, balance=7)
    assert whole.steps != read(dataset, num_steps=17).steps
    state = None
    steps: Steps = {}
    for num_steps, (ranks, workers) in zip((5, 4, 8), [(world, num_workers), ((4, 1), 0), (world, 0)], strict=True):
        reading = read(dataset, num_steps=num_steps, state=state, world=ranks, num_workers=workers, balance=7)
        steps |= reading.steps
        state = reading.state
    assert steps == whole.steps
    assert state == whole.state


@pytest.mark.parametrize("balance", ["deal", 4])
def test_another_global_batch_and_balance_go_on_with_each_pack_once(folder: Path, balance: str | int) -> None:
    dataset = open_dataset(folder, "plan")
    first = read(dataset, num_steps=10, world=(2, 1), balance=7)
    left = dataset.plan.num_packs(0) - 10 * GLOBAL_BATCH
    rest = read(dataset, num_steps=-(-left // 12), state=first.state, world=(4, 2), global_batch=12, balance=balance)
    epoch = read(dataset, num_steps=-(-dataset.plan.num_packs(0) // GLOBAL_BATCH))
    assert real_packs(first.steps) + real_packs(rest.steps) != real_packs(epoch.steps)
    assert sorted(real_packs(first.steps) + real_packs(rest.steps)) == real_packs(epoch.steps)


def real_packs(steps: Steps) -> list[Tokens]:
    return sorted(pack for packs in steps.values() for pack in packs if any(pack))


@pytest.mark.parametrize("overlong", ["error", "drop", "truncate", "split"])
def test_plan_and_lanes_give_the_same_packs(folder: Path, overlong: Overlong) -> None:
    packing_length = 256 if overlong == "error" else 50
    planned, lanes = (
        open_dataset(folder, mode, overlong=overlong, packing_length=packing_length) for mode in ("plan", "lanes")
    )
    # Lanes go on to their next epoch where a canonical node of the plan waits for the others: the steps before agree.
    packs = planned.plan.packs(0, 0, planned.plan.num_packs(0))
    per_lane = np.bincount(packs.canonical_nodes, minlength=NUM_LANES)
    num_steps = int(per_lane.min()) * NUM_LANES // GLOBAL_BATCH
    assert num_steps > 5
    assert read(lanes, num_steps=num_steps).steps == read(planned, num_steps=num_steps).steps


def test_lanes_need_no_index(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tokens(tmp_path / "plain", num_samples=800, with_index=False)
    write_tokens(tmp_path / "indexed", num_samples=800)
    assert open_dataset(tmp_path / "indexed", "auto").mode == "plan"
    dataset = open_dataset(tmp_path / "plain", "lanes")
    assert dataset.mode == "lanes"
    found = read(dataset, num_steps=20).steps
    assert found == read(open_dataset(tmp_path / "indexed", "lanes"), num_steps=20).steps
    assert not (tmp_path / "plain" / "_lmms" / "lengths").exists()
    assert not caplog.records


def test_another_global_batch_goes_on_with_the_very_next_packs_of_the_lanes(folder: Path) -> None:
    dataset = open_dataset(folder, "lanes")
    whole = real_packs(read(dataset, num_steps=15).steps)
    first = read(dataset, num_steps=3, world=(2, 1))
    rest = read(dataset, num_steps=8, state=first.state, world=(4, 2), global_batch=12)
    assert real_packs(first.steps) + real_packs(rest.steps) != whole
    assert sorted(real_packs(first.steps) + real_packs(rest.steps)) == whole


def test_steps_of_a_run_in_lanes_have_no_state_for_a_trainer(folder: Path) -> None:
    loader = PackedLoader(open_dataset(folder, "lanes"), global_batch=8)
    with pytest.raises(ConfigError, match="packs of lanes have a state on each rank: write a lengths index with"):
        loader.steps(until=4).state_dict()


def test_a_lane_state_is_small_and_of_one_rank_alone_is_refused(folder: Path) -> None:
    dataset = open_dataset(folder, "lanes")
    loaders = [PackedLoader(dataset, global_batch=8, world=World(rank=rank, world_size=2)) for rank in range(2)]
    for loader in loaders:
        for batch in loader:
            if (batch.step, batch.micro_batch) == (9, 3):
                break
    states = [loader.state_dict() for loader in loaders]
    assert len(json.dumps(PackedLoader.merge_states(states))) < 1500 * NUM_LANES
    with pytest.raises(CursorError, match=r"lane 1 after 0 packs instead of 7: it is of one rank alone; save Packed"):
        PackedLoader(dataset, global_batch=8).load_state_dict(states[0])
    next(iter(loaders[0]))
    with pytest.raises(CursorError, match="cursors of ranks at steps 10 and 0 cannot be merged"):
        PackedLoader.merge_states([states[0], PackedLoader(dataset, global_batch=8).state_dict()])


def test_states_of_a_plan_and_of_lanes_are_told_apart(folder: Path) -> None:
    planned, lanes = (PackedLoader(open_dataset(folder, mode), global_batch=8) for mode in ("plan", "lanes"))
    with pytest.raises(CursorError, match=r"the saved cursor is one of lanes.*set packing_mode to lanes"):
        planned.load_state_dict(lanes.state_dict())
    with pytest.raises(CursorError, match="the saved cursor is not one of lanes"):
        lanes.load_state_dict(planned.state_dict())
    other = PackedLoader(open_dataset(folder, "lanes", packing_length=300), global_batch=8)
    with pytest.raises(CursorError, match="they differ in the packing settings"):
        other.load_state_dict(lanes.state_dict())


def test_what_lanes_cannot_do_is_said(folder: Path) -> None:
    dataset = open_dataset(folder, "lanes")
    with pytest.raises(ConfigError, match=r"1 ranks of 5 workers are 5 readers, which cannot share 12 lanes"):
        PackedLoader(dataset, global_batch=8, num_workers=5)
    with pytest.raises(ConfigError, match="balance 'window' needs lengths in advance, and packs of lanes have none"):
        PackedLoader(dataset, global_batch=8, balance="window")
    with pytest.raises(ConfigError, match=r"a mixture needs lengths indexes, and 'a' has no index"):
        PackedLoader({"a": dataset, "b": open_dataset(folder, "plan")}, global_batch=8)
    loader = PackedLoader(dataset, global_batch=8)
    with pytest.raises(ConfigError, match=r"lanes, and sources with weights .* have no end"):
        len(loader)
    with pytest.raises(ConfigError, match="skip_steps needs a lengths index"):
        loader.skip_steps(1)
    with pytest.raises(ConfigError, match="packs of lanes are not known beforehand"):
        _ = loader.mixture


@pytest.mark.timeout(200)
@pytest.mark.parametrize("mode", ["plan", "lanes"])
@pytest.mark.parametrize("start_method", ["fork", *(["spawn"] if LONG else [])])
def test_workers_that_persist_follow_the_cursor_wherever_it_goes(
    folder: Path, mode: PackingMode, start_method: Literal["fork", "spawn"]
) -> None:
    loader = PackedLoader(
        open_dataset(folder, mode),
        global_batch=GLOBAL_BATCH,
        num_workers=2,
        persistent_workers=True,
        start_method=start_method,
        pin_memory=True,  # has no effect without a GPU
        timeout_s=90,
    )

    def steps(num_steps: int) -> list[list[int]]:
        first, found = loader.step, []
        for batch in loader:
            found.append(batch.sample_ids.tolist())
            if loader.step == first + num_steps:
                break
        return found

    start = loader.state_dict()
    whole = steps(7)
    state = loader.state_dict()
    further = steps(2)
    loader.load_state_dict(start)
    assert steps(3) + steps(4) == whole
    loader.load_state_dict(state)
    assert steps(2) == further


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_look_at_a_batch_and_iterations_that_end_late_leave_the_others_their_batches(
    folder: Path, num_workers: int
) -> None:
    def batches(loader: PackedLoader) -> list[list[int]]:
        return [batch.sample_ids.tolist() for batch in loader]

    def opened(**options: Any) -> PackedLoader:
        return PackedLoader(open_dataset(folder, "plan"), global_batch=GLOBAL_BATCH, timeout_s=60, **options)

    whole = batches(opened())
    loader = opened(num_workers=num_workers)
    first = iter(loader)
    found = [next(first).sample_ids.tolist() for _ in range(108)]
    second = iter(loader)
    found_second = [next(second).sample_ids.tolist() for _ in range(2)]
    assert found + [each.sample_ids.tolist() for each in first] == whole
    assert found_second + [each.sample_ids.tolist() for each in second] == whole[108 // GLOBAL_BATCH * GLOBAL_BATCH :]


def test_persistent_workers_serve_the_latest_iteration(folder: Path) -> None:
    dataset = open_dataset(folder, "plan")
    loader = PackedLoader(dataset, global_batch=GLOBAL_BATCH, num_workers=2, persistent_workers=True, timeout_s=60)
    first = iter(loader)
    next(first)
    second = iter(loader)
    found = [next(second).sample_ids.tolist()]
    with pytest.raises(ConfigError, match=r"another iteration of this loader has begun.*leave persistent_workers out"):
        list(first)
    found += [batch.sample_ids.tolist() for batch in second]
    assert found == [batch.sample_ids.tolist() for batch in PackedLoader(dataset, global_batch=GLOBAL_BATCH)]


class OneByOne:
    """A TokensProcessor whose samples workers process one by one, and send."""

    columns, schema, description = TokensProcessor.columns, TokensProcessor.schema, TokensProcessor().description

    def measure(self, sample: Sample) -> int:
        return TokensProcessor().measure(sample)

    def process(self, sample: Sample) -> Processed:
        return TokensProcessor().process(sample)


def own_collate(*samples: Any, **options: Any) -> Batch:
    """A collator whose batches are sent as torch sends them."""
    return collate(*samples, **options)


@dataclass(frozen=True)
class Setup:
    """What stays the same in a run that is resumed: the datasets, and how they are mixed."""

    datasets: Any
    options: dict[str, Any]

    @staticmethod
    def drawn(folder: Path, draw: random.Random) -> Setup:
        mode: PackingMode = draw.choice(["plan", "plan", "lanes"])
        processor: Any = draw.choice([TokensProcessor(), OneByOne()])
        names = ["a"] if mode == "lanes" else ["a", "b", "c"][: draw.randint(1, 3)]
        order = OrderConfig(
            seed=draw.randint(0, 99), shuffle=draw.random() < 0.8, num_canonical_nodes=NUM_LANES,
            shuffle_block_size=draw.choice([64, 1 << 18]), reshuffle=mode == "lanes" or draw.random() < 0.7,
        )  # fmt: skip
        packing = PackingConfig(
            packing_length=draw.choice([64, 100, 256]), window=64, overlong=draw.choice(["split", "error"]),
            strategy=draw.choice(["best_fit", "first_fit", "next_fit", "window_32"]),
        )  # fmt: skip
        datasets = {
            name: PackedStreamingDataset(
                folder / name, processor=processor, packing=packing, packing_mode=mode, order=order
            )
            for name in names
        }
        options: dict[str, Any] = {"collator": draw.choice([collate, collate, own_collate])}
        if len(names) > 1 and draw.random() < 0.6:
            options["weights"] = {name: draw.choice([0.5, 1, 2]) for name in names}
            options["max_epochs"] = {name: draw.randint(1, 2) for name in names}
        return Setup(datasets if len(names) > 1 else datasets["a"], options)

    def loader(self, **options: Any) -> PackedLoader:
        return PackedLoader(self.datasets, global_batch=NUM_LANES, timeout_s=120, **self.options, **options)


def check_run(setup: Setup, draw: random.Random, *, num_steps: int) -> None:
    """Read steps of a run in changing worlds, and compare each batch's pack and each state with those of one reader."""
    whole, states = packs_and_states(setup, num_steps=num_steps)
    # Each "spawn" costs some seconds: test_loader.py tries it in short rounds.
    interpreters = get_args(StartMethod) if LONG else ("fork", "server", "forkserver")
    state, step = states[0], 0
    while step < len(whole):
        worlds = [(ranks, nodes) for ranks in (1, 2, 3, 4) for nodes in (1, 2) if ranks % nodes == 0]
        world_size, num_nodes = draw.choice(worlds)
        num_workers = draw.choice([each for each in range(4) if not NUM_LANES % (world_size * max(1, each))])
        loaders = [
            setup.loader(
                world=World(rank=rank, world_size=world_size, num_nodes=num_nodes), num_workers=num_workers,
                start_method=draw.choice(interpreters if world_size * num_workers == 1 else ["fork", "server", None]),
                persistent_workers=draw.random() < 0.5,
            )
            for rank in range(world_size)
        ]  # fmt: skip
        for _ in range(draw.randint(1, 2)):  # the second time as the loaders stand, or from a state that they load
            last = min(len(whole), step + draw.randint(1, 5))
            rest = draw.choice([0, draw.randrange(NUM_LANES // world_size)]) if last < len(whole) else 0
            found: dict[int, list[Any]] = defaultdict(list)
            after = []
            for loader in loaders:
                if loader.step != step or draw.random() < 0.5:
                    loader.load_state_dict(json.loads(json.dumps(state)))
                check_rank(loader, found, states, first=step, last=last, num_more=rest)
                after.append(loader.state_dict())
            assert [sorted(found[each]) for each in range(step, last)] == whole[step:last]
            state = PackedLoader.merge_states(after) if loaders[0].state_is_per_rank else after[0]
            step = last
            assert state == states[step]
            if step == len(whole):
                break


def check_rank(
    loader: PackedLoader, found: dict[int, list[Any]], states: list[Any], *, first: int, last: int, num_more: int
) -> None:
    """Read a rank's batches of steps [first, last), and num_more of the step behind; add the packs of the steps."""
    num_read = 0
    while loader.step < last or num_more:
        for batch in loader:
            step, position = divmod(num_read, loader.micro_batches)
            num_read += 1
            assert loader.step == first + step + (position == loader.micro_batches - 1)
            if not loader.state_is_per_rank:
                assert loader.state_dict() == states[loader.step]
            if first + step < last:
                found[first + step].append((batch.source, *batch.input_ids[0].tolist()))
            if num_read == (last - first) * loader.micro_batches + num_more:
                return


def packs_and_states(setup: Setup, *, num_steps: int) -> tuple[list[list[Any]], list[Any]]:
    """The packs of each step as one rank without workers reads them, and the state before each step and at the end."""
    loader = setup.loader()
    whole: list[list[Any]] = []
    states = [loader.state_dict()]
    packs: list[Any] = []
    while len(whole) < num_steps and loader.packs_left != 0:
        for batch in loader:
            packs.append((batch.source, *batch.input_ids[0].tolist()))
            if loader.step > len(whole):
                whole.append(sorted(packs))
                states.append(loader.state_dict())
                packs = []
            if len(whole) == num_steps:
                break
    return whole, states


@pytest.mark.timeout(2900)
@pytest.mark.parametrize("first_case", range(0, rounds(2, 40), rounds(2, 10)))
def test_runs_that_change_worlds_workers_and_how_they_start_read_the_packs_of_one_reader(
    tmp_path: Path, first_case: int
) -> None:
    for name, num_samples in (("a", 900), ("b", 40), ("c", 333)):
        write_tokens(tmp_path / name, num_samples=num_samples)
    for case in range(first_case, first_case + rounds(2, 10)):
        draw = random.Random(case)
        check_run(Setup.drawn(tmp_path, draw), draw, num_steps=draw.randint(4, rounds(20, 40)))
