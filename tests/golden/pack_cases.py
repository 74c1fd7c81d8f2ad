"""Digests of packs: strategies, treatment of long samples, orders, epochs. Nothing but numbers comes in.

Lengths are drawn by `drawn` at the time of the test, so that nothing of them is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from lmms_stream.plan.lengths import Lengths, hash_lengths
from lmms_stream.plan.mosaic_order import (
    ALGORITHMS,
    BATCHING_METHODS,
    PARTITIONS,
    MosaicOrder,
    Readers,
    StreamSamples,
    mosaic_work,
)
from lmms_stream.plan.order import EpochOrder, OrderConfig
from lmms_stream.plan.pack_plan import PackPlan
from lmms_stream.plan.packing import Overlong, PackingConfig, PackRange, pack
from lmms_stream.plan.sample_order import Reader, SampleOrder, Streams, StreamShare, samples_chosen
from numpy.typing import NDArray

from .digests import array_digest, drawn

STRATEGIES = ("best_fit", "even_fit", "first_fit", "next_fit", "window_7", "window_64", "window_1000")
OVERLONG: tuple[Overlong, ...] = ("drop", "truncate", "split", "keep")
SHORT, LONG = 1_500, 9_000  # samples; an epoch of up to 8192 samples has compiled loops of its own


def chat_lengths(count: int, *, limit: int, seed: int) -> NDArray[np.int64]:
    """Return many short and few long lengths, from 1 to `limit`: the product of two uniform numbers."""
    numbers = drawn(seed, 2 * count) % np.uint64(4096)
    return (1 + numbers[:count] * numbers[count:] * np.uint64(limit) // np.uint64(4096 * 4096)).astype(np.int64)


def uniform_lengths(count: int, *, least: int, most: int, seed: int) -> NDArray[np.int64]:
    return (least + (drawn(seed, count) % np.uint64(most - least + 1)).astype(np.int64)).astype(np.int64)


def distributions(limit: int) -> dict[str, NDArray[np.int64]]:
    """Return sequences of lengths for packs of `limit` tokens, by name; none is over the limit."""
    return {
        "chats": chat_lengths(2_000, limit=limit, seed=1),
        "short": uniform_lengths(2_000, least=1, most=limit // 16, seed=2),
        "uniform": uniform_lengths(800, least=1, most=limit, seed=3),
        "halves": uniform_lengths(600, least=limit // 2 - 9, most=limit // 2 + 9, seed=4),
        "equal": np.full(500, limit // 3, np.int64),
        "full": np.full(60, limit, np.int64),
        "single": np.array([limit // 2]),
        "none": np.empty(0, np.int64),
    }


def packed_digest(lengths: NDArray[np.int64], seed: int, patches: Any = None, **settings: Any) -> str:
    packs = pack(lengths, config=PackingConfig(**settings), seed=seed, patches=patches)
    counts = [packs.num_tokens, packs.num_overlong, packs.num_overlong_media]
    return array_digest([packs.order, packs.offsets, packs.pieces, counts])


def packings(strategy: str) -> Iterator[tuple[str, str]]:
    """Yield the digests of one sequence of samples, packed by a strategy."""
    for name, lengths in distributions(512).items():
        for window in (33, 16384) if strategy in ("best_fit", "even_fit", "next_fit") else (16384,):
            for seed in (0, 2**32 - 1) if strategy in ("best_fit", "window_64") else (7,):
                settings: dict[str, Any] = {"strategy": strategy, "packing_length": 512, "window": window}
                yield f"{name} window={window} seed={seed}", packed_digest(lengths, seed, **settings)
    long = chat_lengths(1_200, limit=2_000, seed=5)
    patches = np.where(drawn(6, 1_200) % np.uint64(5) == 0, 40, 0)
    for overlong in OVERLONG:
        settings = {"strategy": strategy, "packing_length": 700, "window": 256, "overlong": overlong}
        yield f"long samples overlong={overlong}", packed_digest(long, 3, **settings)
        yield f"long samples with media overlong={overlong}", packed_digest(long, 3, patches, **settings)
        yield (
            f"long samples overlong={overlong} max_samples_per_pack=3",
            packed_digest(long, 3, max_samples_per_pack=3, **settings),
        )
    for limit in (1, 63, 64, 65, 4095, 4096, 4097, 70_000):
        lengths = uniform_lengths(300, least=1, most=max(1, limit // 2), seed=limit)
        settings = {"strategy": strategy, "packing_length": limit, "window": 100}
        yield f"packing_length={limit}", packed_digest(lengths, 11, **settings)


ORDERS: dict[str, OrderConfig] = {
    "shuffled": OrderConfig(seed=3),
    "stored": OrderConfig(seed=3, shuffle=False),
    "three nodes, small blocks": OrderConfig(seed=9, num_canonical_nodes=3, shuffle_block_size=96),
    "stored, three nodes, small blocks": OrderConfig(
        seed=9, shuffle=False, num_canonical_nodes=3, shuffle_block_size=200
    ),
    "largest seed, eight nodes": OrderConfig(seed=2**32 - 1, num_canonical_nodes=8, shuffle_block_size=333),
    "fixed packs": OrderConfig(seed=5, num_canonical_nodes=2, shuffle_block_size=128, reshuffle=False),
    "stored, fixed packs": OrderConfig(seed=5, shuffle=False, shuffle_block_size=128, reshuffle=False),
}
LONG_ORDERS = ["three nodes, small blocks", "shuffled", "stored", "fixed packs"]


def shard_sizes(num_samples: int) -> list[int]:
    """Return the sizes of nine unequal shards, one of them empty."""
    shares = [num_samples // 9 + (37 * number) % 50 * num_samples // 1_000 for number in range(7)]
    sizes = [*shares[:3], 0, *shares[3:], num_samples - sum(shares)]
    assert min(sizes) >= 0
    return sizes


def range_digest(packs: PackRange) -> str:
    return array_digest(
        [packs.sample_ids, packs.starts, packs.lengths, packs.offsets, packs.canonical_nodes, packs.patches]
    )


def epoch_digests(plan: PackPlan, epochs: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Yield the digest of the packs, counts and blocks of each epoch."""
    for epoch in epochs:
        total = plan.num_packs(epoch)
        packs = plan.packs(epoch, 0, total)
        counts = [total, plan.num_tokens(epoch), plan.num_overlong(epoch), plan.num_overlong_media(epoch)]
        blocks = plan.blocks(epoch, np.arange(total))
        shards = [plan.shards_of_block(epoch, node, block) for _, _, node, block in blocks]
        facts = array_digest([counts, blocks, *shards, plan.canonical_nodes(epoch, np.arange(total))])
        yield f"epoch {epoch}", f"{range_digest(packs)} {facts}"


def plan_lengths(num_samples: int, *, with_patches: bool = False) -> Lengths:
    lengths = chat_lengths(num_samples, limit=1_400, seed=num_samples).astype(np.uint32)
    if not with_patches:
        return Lengths(lengths=lengths, content_hash=hash_lengths(lengths))
    numbers = drawn(num_samples + 1, num_samples)
    patches = np.where(numbers % np.uint64(3) == 0, numbers % np.uint64(200), 0).astype(np.uint32)
    return Lengths(
        lengths=lengths, content_hash=hash_lengths(lengths), patches=patches, patches_hash=hash_lengths(patches)
    )


def plan_of(
    num_samples: int,
    order: OrderConfig,
    *,
    strategy: str = "best_fit",
    overlong: Overlong = "drop",
    with_patches: bool = False,
) -> PackPlan:
    packing = PackingConfig(packing_length=1024, strategy=strategy, window=200, overlong=overlong)
    lengths = plan_lengths(num_samples, with_patches=with_patches)
    return PackPlan(lengths, shard_sizes(num_samples), order=order, packing=packing)


def plans(strategy: str) -> Iterator[tuple[str, str]]:
    """Yield the fingerprints of plans of few and of many samples, and the digests of their epochs 0 to 3."""
    short = (0, 1, 1000) if strategy == "even_fit" else (0, 1, 2, 3, 1000)  # even_fit takes several times as long
    long = (3,) if strategy == "even_fit" else (0, 3)
    for num_samples, epochs, names in ((SHORT, short, [*ORDERS]), (LONG, long, LONG_ORDERS)):
        for number, name in enumerate(names):
            order = ORDERS[name]
            overlong = OVERLONG[number % len(OVERLONG)]
            plan = plan_of(num_samples, order, strategy=strategy, overlong=overlong)
            label = f"{num_samples} samples, {name}, overlong={overlong}"
            yield f"{label}: fingerprint", plan.fingerprint
            for epoch, digest in epoch_digests(plan, epochs):
                yield f"{label}: {epoch}", digest


def other_plans() -> Iterator[tuple[str, str]]:
    """Yield digests of plans with media, of tiny plans, and of samples of several streams in a pack."""
    for num_samples in (SHORT, LONG):
        plan = plan_of(num_samples, ORDERS["three nodes, small blocks"], overlong="split", with_patches=True)
        for epoch, digest in epoch_digests(plan, (0, 1)):
            yield f"{num_samples} samples with media: {epoch}", digest
    for nodes, sizes in ((2, [1]), (2, [0, 2, 0]), (1, [2]), (1, [3, 4]), (2, [3, 1, 1, 30]), (2, [1] * 40)):
        num_samples = sum(sizes)
        lengths = uniform_lengths(num_samples, least=1, most=300, seed=num_samples)
        for strategy in STRATEGIES[:5]:
            packing = PackingConfig(packing_length=512, strategy=strategy)
            plan = PackPlan(lengths, sizes, order=OrderConfig(seed=1, num_canonical_nodes=nodes), packing=packing)
            for epoch, digest in epoch_digests(plan, (0, 1, 500, 2**32 + 5)):
                yield f"shards of {sizes}, {strategy}: {epoch}", digest
    sizes = [300, 200, 0, 400, 90, 600, 10]
    for counts in ((500, 490, 610), (250, 980, 100), (1_700, 0, 33)):
        for order in (ORDERS["three nodes, small blocks"], ORDERS["stored"]):
            plan = PackPlan(
                plan_lengths(sum(sizes)),
                sizes,
                order=order,
                packing=PackingConfig(packing_length=1024, window=200, overlong="truncate"),
                streams=Streams(("a", "b", "c"), (2, 3, 2), counts),
            )
            label = f"{counts} samples of three streams, {'shuffled' if order.shuffle else 'stored'}"
            yield f"{label}: fingerprint", plan.fingerprint
            for epoch, digest in epoch_digests(plan, (0, 1, 2)):
                yield f"{label}: {epoch}", digest


def sample_orders() -> Iterator[tuple[str, str]]:
    """Yield digests of orders of samples: of one dataset block by block, and of streams as readers share them."""
    for name, order in ORDERS.items():
        for epoch in (0, 1, 7):
            whole = EpochOrder(shard_sizes(SHORT), config=order, epoch=epoch)
            blocks = [
                whole.block(node, block)
                for node in range(whole.num_canonical_nodes)
                for block in range(whole.num_blocks(node))
            ]
            yield f"{name}: epoch {epoch}", array_digest(blocks)
    streams = [np.array([300, 0, 200]), np.array([77]), np.array([40] * 9)]
    for counts in ((500, 77, 360), (100, 300, 360)):
        config = OrderConfig(seed=4, num_canonical_nodes=4, shuffle_block_size=64)
        for epoch in (0, 1, 2):
            samples = SampleOrder(streams, counts=counts, config=config, epoch=epoch)
            ids = [samples.ids(0, samples.num_samples)]
            for num_groups, num_nodes in ((1, 1), (2, 2), (4, 2)):
                for group in range(num_groups):
                    reader = Reader(
                        batch_size=8, num_groups=num_groups, group=group, num_workers=2, worker=1, num_nodes=num_nodes
                    )
                    ids += samples.share(40, reader=reader)
            yield f"{counts} samples of three streams: epoch {epoch}", array_digest(ids)
    shares = {
        "proportions": [StreamShare(proportion=p) for p in (0.1, 0.2, 0.7)],
        "repeats": [StreamShare(repeat=r) for r in (0.29, 1.0, 2.5)],
        "mixed": [StreamShare(choose=9), StreamShare(), StreamShare(repeat=3)],
    }
    for name, settings in shares.items():
        yield f"samples chosen by {name}", array_digest([samples_chosen([100, 7, 5000], settings)])


def mosaic_orders() -> Iterator[tuple[str, str]]:
    """Yield digests of MosaicML's orders: each shuffle, partition and batching method, at the start and later."""
    streams = [
        StreamSamples(0, np.array([30, 7, 50]), 87, 0.4),
        StreamSamples(87, np.array([20] * 6), 150, 0.6),
    ]
    for algorithm in ALGORITHMS:
        for partition in PARTITIONS:
            for method in BATCHING_METHODS:
                order = MosaicOrder(
                    batching_method=method,
                    partition_algo=partition,
                    sampling_method="balanced" if partition == "orig" else "fixed",
                    sampling_granularity=3,
                    num_canonical_nodes=4,
                    initial_physical_nodes=2,
                    batch_size=4,
                    shuffle=True,
                    shuffle_algo=algorithm,
                    shuffle_seed=17,
                    shuffle_block_size=32,
                    epoch_seed_change=method == "random",
                )
                works = [
                    mosaic_work(order, streams, readers, epoch, position)
                    for readers in (Readers(1, 1, 1), Readers(2, 2, 3))
                    for epoch, position in ((0, 0), (1, 0), (2, 48))
                ]
                yield f"{algorithm} {partition} {method}", array_digest(works)


def pack_digests(group: str) -> dict[str, str]:
    """Return the digest of each case of a group."""
    kind, _, strategy = group.partition(" ")
    cases = {
        "packings": lambda: packings(strategy),
        "plans": lambda: plans(strategy),
        "other_plans": other_plans,
        "sample_orders": sample_orders,
        "mosaic_orders": mosaic_orders,
    }
    return dict(cases[kind]())


GROUPS = (
    *(f"packings {strategy}" for strategy in STRATEGIES),
    *(f"plans {strategy}" for strategy in STRATEGIES[:6]),
    "other_plans",
    "sample_orders",
    "mosaic_orders",
)
