from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys
from collections import deque
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.errors import CursorError, LengthsError, PackingError
from lmms_stream.mds.lengths import LengthIndex
from lmms_stream.plan.cursor import Cursor, SourceCursor
from lmms_stream.plan.order import EpochOrder, OrderConfig, streams_digest
from lmms_stream.plan.pack_plan import PLAN_VERSION, PackPlan, plan_fingerprint
from lmms_stream.plan.packing import Overlong, PackingConfig, PackRange
from numpy.typing import NDArray

from ..rounds import rounds
from ..strategies import STRATEGIES, Lengths, chat_lengths, examples, order_configs, seeds, shard_sizes

pytestmark = pytest.mark.usefixtures("long_epochs")

PROCESS_TIMEOUT_S = 120


class PlanCase(NamedTuple):
    lengths: Lengths
    sizes: list[int]
    order: OrderConfig
    packing: PackingConfig

    def plan(self, *, kept_segments: int | None = None) -> PackPlan:
        return PackPlan(self.lengths, self.sizes, order=self.order, packing=self.packing, kept_segments=kept_segments)


@st.composite
def plan_cases(draw: st.DrawFn, *, overlongs: tuple[Overlong, ...] = ("drop", "truncate")) -> PlanCase:
    """Plans with a few samples longer than a pack, up to 16 canonical nodes and blocks from one sample up."""
    sizes = draw(shard_sizes())
    limit = draw(st.sampled_from([8, 100, 1000]))
    rng = np.random.default_rng(draw(seeds()))
    packing = PackingConfig(
        packing_length=limit,
        strategy=draw(st.sampled_from(STRATEGIES)),
        window=draw(st.sampled_from([4, 16, 1000])),
        overlong=draw(st.sampled_from(overlongs)),
    )
    lengths = rng.integers(1, limit // draw(st.sampled_from([1, 4])) + 2, size=sum(sizes))
    return PlanCase(lengths, sizes, draw(order_configs()), packing)


def small_plan(**changes: Any) -> PackPlan:
    """Four shards, three canonical nodes and fifteen blocks; the lengths need no random numbers."""
    lengths = np.arange(1200, dtype=np.int64) ** 2 % 509 + 1
    order = OrderConfig(seed=9, num_canonical_nodes=3, shuffle_block_size=96)
    return PackPlan(
        lengths,
        [500, 0, 300, 400],
        order=changes.pop("order", order),
        packing=changes.pop("packing", PackingConfig(packing_length=512)),
        **changes,
    )


def all_packs(plan: PackPlan, epoch: int) -> PackRange:
    return plan.packs(epoch, 0, plan.num_packs(epoch))


def sample_packs(packs: PackRange) -> list[list[int]]:
    return [packs.sample_ids[a:b].tolist() for a, b in pairwise(packs.offsets)]


def digest(plan: PackPlan, epoch: int) -> str:
    packs = all_packs(plan, epoch)
    content = hashlib.blake2b(digest_size=8)
    for array in (packs.sample_ids, packs.lengths, packs.offsets, packs.canonical_nodes):
        content.update(array.astype("<i8").tobytes())
    return content.hexdigest()


def naive_round_robin(packs_per_node: list[int]) -> list[int]:
    """Canonical node of each pack, one pack of every node that has packs left in each round."""
    queue = deque((node, count) for node, count in enumerate(packs_per_node) if count)
    nodes = []
    while queue:
        node, count = queue.popleft()
        nodes.append(node)
        if count > 1:
            queue.append((node, count - 1))
    return nodes


@examples(100)
@given(case=plan_cases(), epoch=st.integers(0, 3))
def test_every_sample_comes_once_an_epoch_except_dropped_ones(case: PlanCase, epoch: int) -> None:
    packs = all_packs(case.plan(), epoch)
    fits = case.lengths <= case.packing.packing_length
    expected = np.arange(len(case.lengths))[fits | (case.packing.overlong == "truncate")]
    assert sorted(packs.sample_ids) == expected.tolist()


@examples(60)
@given(case=plan_cases(), epoch=st.integers(0, 3))
def test_lengths_are_those_of_the_samples_and_no_pack_is_over_packing_length(case: PlanCase, epoch: int) -> None:
    limit = case.packing.packing_length
    packs = all_packs(case.plan(), epoch)
    assert packs.lengths.tolist() == np.minimum(case.lengths[packs.sample_ids], limit).tolist()
    for first, stop in pairwise(packs.offsets):
        assert 1 <= packs.lengths[first:stop].sum() <= limit


@examples(80)
@given(case=plan_cases(), epoch=st.integers(0, 3), data=st.data())
def test_any_range_of_packs_is_a_slice_of_the_epoch(case: PlanCase, epoch: int, data: st.DataObject) -> None:
    plan = case.plan()
    whole = all_packs(plan, epoch)
    reader = case.plan()  # has read nothing yet, so the ranges are computed on their own
    for _ in range(4):
        first = data.draw(st.integers(0, len(whole)))
        stop = data.draw(st.integers(first, len(whole)))
        part = reader.packs(epoch, first, stop)
        segments = slice(whole.offsets[first], whole.offsets[stop])
        assert np.array_equal(part.sample_ids, whole.sample_ids[segments])
        assert np.array_equal(part.lengths, whole.lengths[segments])
        assert np.array_equal(part.offsets, whole.offsets[first : stop + 1] - whole.offsets[first])
        assert np.array_equal(part.canonical_nodes, whole.canonical_nodes[first:stop])


def test_more_blocks_than_a_plan_keeps_in_memory_are_read_again_alike() -> None:
    block_size, num_blocks = 1 << 20, 9  # one block of a canonical node is kept
    lengths = np.ones(num_blocks * block_size, np.uint8)
    order = OrderConfig(shuffle=False, num_canonical_nodes=1, shuffle_block_size=block_size)
    packing = PackingConfig(packing_length=block_size, strategy="next_fit")
    plan = PackPlan(lengths, [len(lengths)], order=order, packing=packing)
    assert plan.num_packs(0) == num_blocks
    for number in [*range(num_blocks), 0, 1, num_blocks - 1]:
        sample_ids = plan.packs(0, number, number + 1).sample_ids
        assert np.array_equal(sample_ids, np.arange(number * block_size, (number + 1) * block_size))


def test_epochs_may_be_read_in_any_order() -> None:
    expected = [digest(small_plan(), epoch) for epoch in range(4)]
    assert len(set(expected)) == 4
    plan = small_plan()
    for epoch in (3, 0, 2, 1, 0, 3):
        assert digest(plan, epoch) == expected[epoch]


@examples(80)
@given(case=plan_cases(), epoch=st.integers(0, 3))
def test_canonical_nodes_take_turns_and_those_with_packs_left_go_on_alone(case: PlanCase, epoch: int) -> None:
    plan = case.plan()
    packs = all_packs(plan, epoch)
    order = EpochOrder(case.sizes, config=plan.order, epoch=epoch)
    node_of = {
        int(sample_id): node
        for node in range(order.num_canonical_nodes)
        for block in range(order.num_blocks(node))
        for sample_id in order.block(node, block)
    }
    # Counted from the samples, not from what the plan says of its nodes.
    nodes = [{node_of[sample_id] for sample_id in sample_ids} for sample_ids in sample_packs(packs)]
    assert all(len(homes) == 1 for homes in nodes)
    flat = [next(iter(homes)) for homes in nodes]
    packs_per_node = [flat.count(node) for node in range(plan.num_canonical_nodes)]
    assert flat == naive_round_robin(packs_per_node)
    assert packs.canonical_nodes.tolist() == flat


@examples(60)
@given(case=plan_cases(), epoch=st.integers(0, 3))
def test_the_packs_of_a_canonical_node_follow_its_blocks(case: PlanCase, epoch: int) -> None:
    packs = all_packs(case.plan(), epoch)
    order = EpochOrder(case.sizes, config=case.plan().order, epoch=epoch)
    for node in range(order.num_canonical_nodes):
        block_of = {
            int(sample_id): block for block in range(order.num_blocks(node)) for sample_id in order.block(node, block)
        }
        own = [ids for ids, home in zip(sample_packs(packs), packs.canonical_nodes, strict=True) if home == node]
        blocks = [block_of[sample_id] for sample_ids in own for sample_id in sample_ids]
        assert blocks == sorted(blocks)


def test_nodes_of_unequal_packs_are_interleaved_in_rounds() -> None:
    # Shards of 10, 4 and 10 samples as canonical nodes of 8: 8, then 2 + 4 + 2, then 8 samples in packs of one
    # sample (6 tokens) or two (3 tokens).
    lengths = np.array([6] * 10 + [3] * 4 + [6] * 10)
    in_order = next(
        seed for seed in range(100) if np.random.default_rng([seed, 0]).permutation(3).tolist() == [0, 1, 2]
    )
    order = OrderConfig(seed=in_order, num_canonical_nodes=3)
    plan = PackPlan(lengths, [10, 4, 10], order=order, packing=PackingConfig(packing_length=8))
    assert all_packs(plan, 0).canonical_nodes.tolist() == [0, 1, 2] * 6 + [0, 2] * 2


@examples(80)
@given(case=plan_cases(), epoch=st.integers(0, 3))
def test_num_tokens_num_overlong_and_efficiency_agree_with_the_packs(case: PlanCase, epoch: int) -> None:
    plan = case.plan()
    packs = all_packs(plan, epoch)
    assert plan.num_packs(epoch) == len(packs)
    assert plan.num_tokens(epoch) == packs.lengths.sum()
    assert plan.num_overlong(epoch) == np.count_nonzero(case.lengths > case.packing.packing_length)
    expected = packs.lengths.sum() / (len(packs) * case.packing.packing_length) if len(packs) else 0.0
    assert plan.efficiency(epoch) == pytest.approx(expected)
    assert 0 <= plan.efficiency(epoch) <= 1


def test_an_empty_dataset_has_an_empty_epoch() -> None:
    plan = PackPlan(np.empty(0, np.uint32), [], order=OrderConfig(), packing=PackingConfig(packing_length=8))
    assert (plan.num_packs(0), plan.num_tokens(0), plan.num_overlong(0), plan.efficiency(0)) == (0, 0, 0, 0.0)
    assert len(plan.packs(0, 0, 0)) == 0


@pytest.mark.parametrize(("first", "stop"), [(-1, 2), (3, 2), (0, None)])
def test_packs_outside_the_epoch_are_refused(first: int, stop: int | None) -> None:
    plan = small_plan()
    total = plan.num_packs(1)
    stop = total + 1 if stop is None else stop
    with pytest.raises(
        PackingError, match=rf"^packs \[{first}, {stop}\) requested from epoch 1, which has packs \[0, {total}\)$"
    ):
        plan.packs(1, first, stop)


def test_lengths_that_do_not_match_the_shards_are_refused() -> None:
    with pytest.raises(
        LengthsError,
        match=(
            r"^the lengths index has 5 entries and the shards hold 7 samples: "
            r"write it again with lmms-stream index$"
        ),
    ):
        PackPlan(np.ones(5, np.int64), [3, 4], order=OrderConfig(), packing=PackingConfig(packing_length=8))


def test_overlong_samples_are_an_error_when_packs_are_counted() -> None:
    packing = PackingConfig(packing_length=8)
    plan = PackPlan(np.array([3, 9, 4]), [3], order=OrderConfig(), packing=packing)
    with pytest.raises(PackingError, match="1 of 3 samples are longer than packing_length 8"):
        plan.num_packs(0)


def test_pack_counts_are_cached_by_epoch_and_used() -> None:
    cache: dict[str, NDArray[np.int64]] = {}
    first = small_plan(counts_cache=cache)
    expected = [(first.num_packs(epoch), first.num_tokens(epoch)) for epoch in (0, 1)]
    assert sorted(cache) == [f"{first.fingerprint}-0", f"{first.fingerprint}-1"]
    assert all(counts.shape == (15, 3) and counts.dtype == np.int64 for counts in cache.values())

    again = small_plan(counts_cache=cache)
    assert [(again.num_packs(epoch), again.num_tokens(epoch)) for epoch in (0, 1)] == expected
    cache[f"{first.fingerprint}-0"] = cache[f"{first.fingerprint}-0"] + np.array([0, 7, 0])
    assert small_plan(counts_cache=cache).num_tokens(0) == expected[0][1] + 15 * 7


@pytest.mark.parametrize("shape", [(0, 3), (14, 3), (15, 2), (45,)])
def test_cached_counts_of_the_wrong_shape_are_counted_again(shape: tuple[int, ...]) -> None:
    expected = digest(small_plan(), 0)
    key = f"{small_plan().fingerprint}-0"
    cache = {key: np.zeros(shape, np.int64)}
    assert digest(small_plan(counts_cache=cache), 0) == expected
    assert cache[key].shape == (15, 3)


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"shuffle": False},
        {"num_canonical_nodes": 3},
        {"shuffle_block_size": 63},
        {"reshuffle": False},
        {"packing_length": 513},
        {"strategy": "next_fit"},
        {"window": 100},
        {"overlong": "drop"},
        {"max_samples_per_pack": 9},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_fingerprint_changes_with_each_setting(change: dict[str, Any]) -> None:
    lengths = chat_lengths(300, limit=512, seed=4)
    order = OrderConfig(num_canonical_nodes=2, shuffle_block_size=64)
    packing = PackingConfig(packing_length=512)
    settings = {field.name for config in (order, packing) for field in dataclasses.fields(config)}
    settings.remove("later_lengths")  # a cursor keeps the changes that were made
    assert settings == {
        "seed",
        "shuffle",
        "num_canonical_nodes",
        "shuffle_block_size",
        "reshuffle",
        "packing_length",
        "strategy",
        "window",
        "overlong",
        "max_samples_per_pack",
    }, "a new setting needs a case of its own here"
    in_order = next(iter(change)) in {field.name for field in dataclasses.fields(order)}
    changed = PackPlan(
        lengths,
        [300],
        order=dataclasses.replace(order, **change) if in_order else order,
        packing=packing if in_order else dataclasses.replace(packing, **change),
    )
    assert changed.fingerprint != PackPlan(lengths, [300], order=order, packing=packing).fingerprint


def test_the_fingerprint_changes_with_the_lengths_and_the_shards() -> None:
    lengths = chat_lengths(300, limit=512, seed=4)
    longer = lengths.copy()
    longer[7] += 1

    def fingerprint(values: Lengths, sizes: list[int]) -> str:
        order, packing = OrderConfig(), PackingConfig(packing_length=1024)
        return PackPlan(values, sizes, order=order, packing=packing).fingerprint

    fingerprints = {
        fingerprint(lengths, [300]),
        fingerprint(lengths, [200, 100]),
        fingerprint(lengths, [100, 200]),
        fingerprint(longer, [300]),
        fingerprint(lengths[::-1].copy(), [300]),
    }
    assert len(fingerprints) == 5


def test_the_fingerprint_does_not_change_with_the_epoch_or_the_dtype_of_the_lengths() -> None:
    lengths = chat_lengths(300, limit=512, seed=4)
    order, packing = OrderConfig(), PackingConfig(packing_length=512)
    plan = PackPlan(lengths, [300], order=order, packing=packing)
    before = plan.fingerprint
    assert digest(plan, 0) != digest(plan, 1)
    assert plan.fingerprint == before
    for dtype in (np.uint16, np.uint32, np.int32):
        same = PackPlan(lengths.astype(dtype), [300], order=order, packing=packing)
        assert (same.fingerprint, digest(same, 1)) == (before, digest(plan, 1))


def test_naming_the_default_number_of_canonical_nodes_changes_nothing() -> None:
    lengths = np.full(1 << 18, 1000, np.uint32)
    packing = PackingConfig(packing_length=4096)
    chosen = PackPlan(lengths, [1 << 18], order=OrderConfig(), packing=packing)
    named = PackPlan(lengths, [1 << 18], order=OrderConfig(num_canonical_nodes=2), packing=packing)
    assert chosen.num_canonical_nodes == named.num_canonical_nodes == 2
    assert chosen.fingerprint == named.fingerprint


def test_a_lengths_index_gives_the_same_plan_as_its_array(tmp_path: Path) -> None:
    lengths = chat_lengths(300, limit=512, seed=4)
    index = LengthIndex.from_array(lengths, fingerprint="f")
    array_name, description_name = index.write(tmp_path)
    mapped = LengthIndex.open(tmp_path / array_name, (tmp_path / description_name).read_bytes(), fingerprint="f")
    order, packing = OrderConfig(num_canonical_nodes=2), PackingConfig(packing_length=512)
    plans = [PackPlan(source, [300], order=order, packing=packing) for source in (lengths, index, mapped)]
    assert len({plan.fingerprint for plan in plans}) == 1
    assert len({digest(plan, 2) for plan in plans}) == 1


def test_another_process_with_another_random_state_builds_the_same_plan() -> None:
    script = (
        "import numpy as np; np.random.seed(99); np.random.rand(5)\n"
        "from tests.plan.test_pack_plan import digest, small_plan\n"
        "plan = small_plan()\n"
        "print(plan.fingerprint, digest(plan, 0), digest(plan, 1))\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        env={"PYTHONHASHSEED": "31"},
        capture_output=True,
        text=True,
        timeout=PROCESS_TIMEOUT_S,
        check=False,
    )
    plan = small_plan()
    assert finished.stdout.split() == [plan.fingerprint, digest(plan, 0), digest(plan, 1)], finished.stderr


def test_the_packs_of_a_plan_version_never_change() -> None:
    # Checkpoints name packs by number. When this fails, old checkpoints no longer resume: raise PLAN_VERSION,
    # and only then write the new digests here.
    plan = small_plan()
    streams = streams_digest()
    assert plan.fingerprint == f"2-7bb7411063df4bef-c1359816a45df046-0d98acbef052877c-eca03c76a98fec87-{streams}"
    assert (PLAN_VERSION, digest(plan, 0), digest(plan, 1)) == (2, "fe657e0ae25db616", "6b45746fe61fa746")
    assert streams == "20d2c795f26c64ed"
    of_windows = small_plan(packing=dataclasses.replace(plan.packing, strategy="window_64"))
    assert of_windows.fingerprint.startswith("4-")  # version 3 placed the samples of window_N longest first
    # Version 1 had the same packs where samples are shuffled, and others where they are not.
    stored = small_plan(order=dataclasses.replace(plan.order, shuffle=False))
    assert digest(stored, 0) == "cd5f1be1ff8bc419"
    assert digest(stored, 0) != "58608d86b6b755bd"


@pytest.mark.parametrize("num_canonical_nodes", [None, 1, 8])
def test_without_shuffle_packs_come_in_stored_order_at_any_size(num_canonical_nodes: int | None) -> None:
    order = OrderConfig(shuffle=False, num_canonical_nodes=num_canonical_nodes)
    packing = PackingConfig(packing_length=4, strategy="next_fit")
    plan = PackPlan(np.ones(300_000, np.uint8), [150_000, 150_000], order=order, packing=packing)
    assert plan.num_canonical_nodes == 1
    assert np.array_equal(all_packs(plan, 0).sample_ids, np.arange(300_000))
    assert np.array_equal(all_packs(plan, 1).sample_ids, np.arange(300_000))


def test_other_random_streams_are_another_plan_and_the_error_says_so() -> None:
    plan = small_plan()

    def fingerprint(streams: str | None) -> str:
        hashed = plan.index.content_hash
        return plan_fingerprint(
            "2", hashed, plan.samples_per_shard, order=plan.order, packing=plan.packing, streams=streams
        )

    built, other = fingerprint(None), fingerprint("0123456789abcdef")
    assert built == plan.fingerprint != other
    with pytest.raises(CursorError, match=r"they differ in the random streams \(the NumPy that is installed\)"):
        Cursor(sources={"data": SourceCursor(plan=other)}).check_plans({"data": built})


def assert_alike(packs: PackRange, expected: PackRange) -> None:
    for field in dataclasses.fields(PackRange):
        found, wanted = (np.asarray(getattr(each, field.name)) for each in (packs, expected))
        assert found.tolist() == wanted.tolist()


@examples(100)
@given(case=plan_cases(overlongs=("drop", "truncate", "split")), kept=st.integers(1, 300), data=st.data())
def test_packs_are_the_same_however_few_of_them_are_kept(case: PlanCase, kept: int, data: st.DataObject) -> None:
    whole, plan = case.plan(), case.plan(kept_segments=kept)
    assert_alike(all_packs(plan, 0), all_packs(whole, 0))
    for _ in range(3):  # also backwards
        first, stop = sorted(data.draw(st.tuples(*[st.integers(0, whole.num_packs(0))] * 2)))
        assert_alike(plan.packs(0, first, stop), whole.packs(0, first, stop))


@pytest.mark.parametrize(
    ("strategy", "overlong"),
    [
        *product(("best_fit", "first_fit", "next_fit", "window_300"), rounds(["split"], ["drop", "truncate", "split"])),
        ("even_fit", "split"),
    ],
)
def test_blocks_of_many_windows_are_replayed_in_stretches_alike(strategy: str, overlong: Overlong) -> None:
    rng = np.random.default_rng(1)
    case = PlanCase(
        np.minimum(rng.geometric(1 / 150, 60_000), 3000),
        [20_000] * 3,
        OrderConfig(num_canonical_nodes=2, shuffle_block_size=25_000),
        PackingConfig(packing_length=1024, strategy=strategy, window=2500, overlong=overlong),
    )
    expected = all_packs(case.plan(), 0)
    for kept in (4500, 30_000):
        plan = case.plan(kept_segments=kept)
        assert_alike(all_packs(plan, 0), expected)
        middle = plan.num_packs(0) // 2
        resumed = case.plan(kept_segments=kept).packs(0, middle, middle + 500)
        assert_alike(resumed, expected.take(np.arange(middle, middle + 500)))


def test_a_step_of_64_canonical_nodes_needs_little_memory_and_no_whole_blocks(tmp_path: Path) -> None:
    """In a process of its own, whose private memory is measured."""
    script = (
        "import numpy as np\n"
        "from lmms_stream.plan.order import OrderConfig\n"
        "from lmms_stream.plan.pack_plan import PackPlan\n"
        "from lmms_stream.plan.packing import PackingConfig\n"
        "def private_mib():\n"
        "    lines = open('/proc/self/smaps_rollup').read().splitlines()\n"
        "    return sum(int(line.split()[1]) for line in lines if line.startswith('Private_')) / 1024\n"
        "def plan(num_samples, **settings):\n"
        "    lengths = np.arange(num_samples, dtype=np.uint32) ** 2 % 1009 + 1\n"
        "    order, packing = OrderConfig(num_canonical_nodes=64), PackingConfig(packing_length=4096)\n"
        "    return PackPlan(lengths, [num_samples], order=order, packing=packing, **settings)\n"
        "plan(640).packs(0, 0, 64)\n"
        "counts = {}\n"
        "plan(64 << 18, counts_cache=counts).num_packs(0)\n"
        "resumed = plan(64 << 18, counts_cache=counts)\n"
        "middle = resumed.num_packs(0) // 2\n"
        "before = private_mib()\n"
        "resumed.packs(0, middle, middle + 1024)\n"
        "print(private_mib() - before)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PROCESS_TIMEOUT_S, check=False
    )
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) <= 64


@given(case=plan_cases(overlongs=("drop", "truncate", "split")), epoch=st.integers(0, 3), fixed=st.booleans())
@examples(60)
def test_each_sample_is_found_in_the_packs_that_hold_it(case: PlanCase, epoch: int, fixed: bool) -> None:
    case = case._replace(order=dataclasses.replace(case.order, reshuffle=not fixed))
    plan = case.plan()
    packs = all_packs(plan, epoch)
    numbers = np.repeat(np.arange(len(packs)), np.diff(packs.offsets))
    expected: dict[int, list[tuple[int, ...]]] = {}
    for sample_id, start, number in zip(
        packs.sample_ids.tolist(), packs.starts.tolist(), numbers.tolist(), strict=True
    ):
        expected.setdefault(sample_id, []).append((start, number))
    for sample_id in range(0, plan.num_samples, max(1, plan.num_samples // 50)):
        found = plan.packs_of(epoch, sample_id).tolist()
        assert found == [number for _, number in sorted(expected.get(sample_id, []))]


@pytest.mark.parametrize("sample_id", [-1, 1200])
def test_a_sample_that_is_not_there_is_in_no_pack(sample_id: int) -> None:
    with pytest.raises(PackingError, match=rf"sample {sample_id} asked of a dataset with samples \[0, 1200\)"):
        small_plan().packs_of(0, sample_id)


@examples(60)
@given(
    case=plan_cases(overlongs=("drop", "truncate", "split")),
    epoch=st.integers(0, 3),
    fixed=st.booleans(),
    share=st.floats(0, 1),
)
def test_amounts_are_those_of_the_first_packs(case: PlanCase, epoch: int, fixed: bool, share: float) -> None:
    plan = case._replace(order=dataclasses.replace(case.order, reshuffle=not fixed)).plan()
    for num_packs in {0, int(share * plan.num_packs(epoch)), plan.num_packs(epoch)}:
        packs = plan.packs(epoch, 0, num_packs)
        expected = (len(set(packs.sample_ids.tolist())), int(packs.lengths.sum()))
        assert plan.amounts(epoch, num_packs) == expected
    assert plan.amounts(epoch, plan.num_packs(epoch)).tokens == plan.num_tokens(epoch)


def test_amounts_of_packs_that_are_not_there_are_refused() -> None:
    plan = small_plan()
    with pytest.raises(PackingError, match=rf"the first {plan.num_packs(0) + 1} packs requested from epoch 0"):
        plan.amounts(0, plan.num_packs(0) + 1)


@pytest.mark.parametrize(("overlong", "number"), [("drop", 1), ("truncate", 2), ("split", 2), ("keep", 2)])
def test_samples_that_are_packed_longer_than_some_length_are_counted(overlong: Overlong, number: int) -> None:
    packing = PackingConfig(packing_length=8, overlong=overlong)
    plan = PackPlan(np.array([3, 7, 20, 5]), [4], order=OrderConfig(), packing=packing)
    assert plan.num_longer_than(5) == number
    assert plan.num_longer_than(8) == (overlong == "keep")
    assert plan.num_longer_than(20) == 0
