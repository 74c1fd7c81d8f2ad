"""The pictures of docs/how/, drawn by the code that they show: `python docs/code/pictures.py docs/how` writes them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from lmms_stream.plan.assign import assign_steps
from lmms_stream.plan.order import EpochOrder, OrderConfig
from lmms_stream.plan.pack_plan import PackPlan
from lmms_stream.plan.packing import PackingConfig, pack

sys.path.insert(0, str(Path(__file__).parent))
from drawing import COLOURS, Drawing

SHARDS, SAMPLES_PER_SHARD = 8, 12


def way() -> str:
    """From files of rows to steps of training, and which parts are arithmetic alone."""
    d = Drawing(820, 300, title="The way of a sample")
    d.box(20, 30, 120, 50, fill="#fff3e0", text="rows\njsonl, parquet, …")
    d.box(210, 30, 150, 50, fill="#e3f2fd", text="MDS shards\nfolder or store")
    d.box(430, 30, 150, 50, fill="#e8f5e9", text="packs\nin loader workers")
    d.box(650, 30, 150, 50, fill="#f3e5f5", text="steps\nFSDP2 trainer")
    d.box(210, 150, 150, 50, fill="#e3f2fd", text="lengths\n4 bytes a sample")
    d.box(430, 150, 150, 50, fill="#e8f5e9", text="plan\norder, packing")
    d.box(650, 150, 150, 50, fill="#f3e5f5", text="checkpoint\nwith a cursor")
    for x, to in ((140, 210), (360, 430), (580, 650)):
        d.arrow(x, 55, to, 55)
    d.words(146, 48, "convert", faint=True, size=11)
    d.words(366, 48, "stream", faint=True, size=11)
    d.words(586, 48, "batches", faint=True, size=11)
    d.arrow(285, 80, 285, 150)
    d.words(291, 120, "index", faint=True, size=11)
    d.arrow(360, 175, 430, 175)
    d.arrow(505, 150, 505, 80)
    d.words(511, 120, "what is in a pack", faint=True, size=11)
    d.arrow(725, 80, 725, 150, both=True)
    d.words(731, 120, "save, resume", faint=True, size=11)
    d.arrow(650, 175, 580, 175)
    d.words(590, 168, "cursor", faint=True, size=11)
    d.words(
        20,
        250,
        "The lower row is arithmetic: which samples lie in pack 731,204 and which rank reads it follows from lengths,",
    )
    d.words(
        20, 270, "a seed and settings. Nothing of it is stored but the cursor: how many packs of each source were read."
    )
    return d.svg


def order() -> str:
    """Shards as stored, permuted, cut into canonical nodes, and shuffled block by block; a colour a shard."""
    config = OrderConfig(seed=3, num_canonical_nodes=2, shuffle_block_size=24)
    epoch = EpochOrder([SAMPLES_PER_SHARD] * SHARDS, config=config, epoch=0)
    unshuffled = EpochOrder(
        [SAMPLES_PER_SHARD] * SHARDS, config=OrderConfig(seed=3, num_canonical_nodes=1, shuffle=False), epoch=0
    )
    stored = unshuffled.block(0, 0)
    shuffled = np.concatenate(
        [epoch.block(node, block) for node in range(2) for block in range(epoch.num_blocks(node))]
    )
    by_shard = np.concatenate([_first_seen(epoch, node) for node in range(2)])
    d = Drawing(820, 250, title="The order of an epoch")
    rows = (("stored", stored), ("shards permuted", by_shard), ("blocks shuffled", shuffled))
    for number, (name, ids) in enumerate(rows):
        y = 40 + 60 * number
        d.words(14, y + 20, name)
        for position, sample in enumerate(ids):
            d.cell(130 + 7 * position, y, 6, 30, fill=COLOURS[int(sample) // SAMPLES_PER_SHARD])
    for x in (130 + 7 * 24 - 0.5, 130 + 7 * 72 - 0.5):
        d.line(x, 152, x, 198)
    d.line(130 + 7 * 48 - 0.5, 88, 130 + 7 * 48 - 0.5, 206)
    d.words(130 + 7 * 24, 228, "canonical node 0, two shuffle blocks", middle=True, faint=True)
    d.words(130 + 7 * 72, 228, "canonical node 1, two shuffle blocks", middle=True, faint=True)
    d.words(130, 26, "a colour is a shard, a stroke a sample", faint=True)
    return d.svg


def packing() -> str:
    """The same 40 samples by next_fit, first_fit and best_fit; grey: padding."""
    lengths = np.random.default_rng(5).gamma(1.6, 190, 40).astype(np.int64).clip(20, 1000)
    d = Drawing(820, 285, title="Three ways to make packs")
    for column, strategy in enumerate(("next_fit", "first_fit", "best_fit")):
        packs = pack(lengths, config=PackingConfig(packing_length=1024, strategy=strategy))
        x = 20 + 270 * column
        d.words(x, 30, f"{strategy}: {len(packs)} packs, {packs.num_tokens / (1024 * len(packs)):.1%} full")
        for number in range(len(packs)):
            left = x
            d.cell(x, 45 + 16 * number, 240, 13, fill="#cbd2d9")
            for position in packs.order[packs.offsets[number] : packs.offsets[number + 1]]:
                width = 240 * lengths[position] / 1024
                d.cell(left, 45 + 16 * number, width - 1, 13, fill=COLOURS[int(position) % len(COLOURS)])
                left += width
    return d.svg


def steps() -> str:
    """The packs of four steps on two ranks and on four: the same steps, dealt otherwise."""
    sizes = [400, 400]
    lengths = np.random.default_rng(2).gamma(1.2, 120, 800).astype(np.uint32).clip(8, 1000)
    plan = PackPlan(
        lengths, sizes, packing=PackingConfig(packing_length=1024), order=OrderConfig(seed=1, num_canonical_nodes=1)
    )
    packs = plan.packs(0, 0, 32)
    d = Drawing(820, 290, title="Steps on two and on four ranks")
    d.words(
        20, 28, "a row is a rank, a number a pack; which packs make a step does not depend on the ranks", faint=True
    )
    y = 50
    for world_size in (2, 4):
        dealt = assign_steps(packs, global_batch=8, nodes=(world_size,))
        for rank in range(world_size):
            d.words(14, y + 20, f"rank {rank} of {world_size}")
            for step in range(4):
                for place, number in enumerate(dealt[step, rank]):
                    width = 168 / (8 // world_size)
                    d.box(105 + 178 * step + place * width, y, width - 4, 28, fill=_light(step), text=str(int(number)))
            y += 32
        y += 14
    for step in range(4):
        d.words(105 + 178 * step + 84, y + 10, f"step {step}", middle=True)
    return d.svg


def _first_seen(epoch: EpochOrder, node: int) -> np.ndarray:
    """The samples of a canonical node, shard after shard, as they lie before blocks are shuffled."""
    first, stop = epoch.node_bounds(node)
    return epoch._ids(first, stop)


def _light(step: int) -> str:
    return ("#e3f2fd", "#fff3e0", "#e8f5e9", "#f3e5f5")[step % 4]


PICTURES: Mapping[str, Callable[[], str]] = {"way": way, "order": order, "packing": packing, "steps": steps}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        Path(sys.argv[1], f"{name}.svg").write_text(draw(), encoding="utf-8")
