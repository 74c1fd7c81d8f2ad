"""Compile the project's loops once, before several processes of tests need them: each would compile them for itself.

What numba compiles is kept beside the code, where those processes find it: `python -m tests.compiled`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors.media.patches import to_patches
from lmms_stream.processors.media.resize import resize
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.tools.simulate import Cluster, simulate

from .conftest import write_tokens

STRATEGIES = ("best_fit", "even_fit", "first_fit", "next_fit")


def compile_plans(folder: Path) -> None:
    """What packs, mixtures, their reading and their simulation use."""
    datasets = {}
    for name in STRATEGIES:
        write_tokens(folder / name, num_samples=60)
        packing = PackingConfig(packing_length=128, strategy=name)
        datasets[name] = PackedStreamingDataset(
            folder / name, folder / "copies" / name, processor=TokensProcessor(), packing=packing
        )
    weights = dict.fromkeys(STRATEGIES, 1.0)
    next(iter(PackedLoader(datasets, global_batch=len(datasets), weights=weights)))
    next(iter(PackedLoader(datasets["best_fit"], global_batch=2)))
    for cache in (None, "1gb"):
        cluster = Cluster(num_nodes=2, gpus_per_node=1, bandwidth="1gbit", cache=cache)
        simulate(datasets["best_fit"], cluster, global_batch=2)


def compile_images() -> None:
    image = resize(np.zeros((30, 40, 3), np.uint8), width=56, height=28)
    to_patches(image[None], patch_size=14, merge_size=2, temporal_patch_size=2, mean=[0.5] * 3, std=[0.5] * 3)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        compile_plans(Path(name))
    compile_images()
