"""States of other projects' programs over the core: MosaicML's loader, LMMS Engine's readers of rows, Relax's rollouts.

Rows of Relax and LMMS Engine are the chats of sources/. Their states are read in a copy of the folder, with paths
relative to it. LMMS Engine's readers know a file by its path, size and time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any

from lmms_stream import StreamingDataLoader, StreamingDataset
from lmms_stream.datasets import MultiModalIterableDataset
from lmms_stream.rl import RolloutDataSourceWithBuffer

from .datasets import sample_digest
from .digests import array_digest, byte_digest

Begin = Callable[[], Any]  # reads to the middle of a run -> the state there
After = Callable[[Any], list[str]]  # a state -> what is read from there on
Case = Callable[[], tuple[Begin, After]]
ALGORITHMS = ("blocks", "py1s", "py1br", "py1e", "py2s", "naive")


def mosaic_loader(algorithm: str, method: str = "random") -> StreamingDataLoader:
    """Return MosaicML's loader over two streams of the current folder."""
    from lmms_stream import Stream

    streams = [Stream(local="datasets/numbers", repeat=0.5), Stream(local="datasets/others", repeat=1.5)]
    dataset = StreamingDataset(
        streams=streams, shuffle=True, shuffle_algo=algorithm, batch_size=4, num_canonical_nodes=2, shuffle_seed=11,
        shuffle_block_size=40, batching_method=method,
    )  # fmt: skip
    return StreamingDataLoader(dataset, batch_size=4, num_workers=0, collate_fn=_digests)


def _digests(samples: list[Any]) -> str:
    return " ".join(sample_digest(sample)[:8] for sample in samples)


def _mosaic(algorithm: str, method: str) -> tuple[Begin, After]:
    def after(state: Any) -> list[str]:
        loader = mosaic_loader(algorithm, method)
        loader.load_state_dict(state)
        return [*loader, "next epoch", *islice(loader, 3)]

    def begin() -> Any:
        loader = mosaic_loader(algorithm, method)
        list(loader)  # the first epoch
        list(islice(loader, 5))
        return loader.state_dict()

    return begin, after


def _engine(strategy: str) -> tuple[Begin, After]:
    config = {
        "dataset_type": "vision_iterable", "dataset_format": "jsonl", "dataset_path": "sources",
        "processor_config": {"processor_name": "processors/tokenizer", "processor_type": "qwen2"},
        "packing": True, "packing_strategy": strategy, "packing_length": 320, "filter_overlong": True,
        "num_canonical_nodes": 2, "cache_dir": "cache",
    }  # fmt: skip

    def after(state: Any) -> list[str]:
        dataset = MultiModalIterableDataset(config)
        dataset.load_state_dict(state)
        return [array_digest([batch.input_ids, batch.cu_seqlens]) for batch in dataset]

    def begin() -> Any:
        dataset = MultiModalIterableDataset(config)
        for batch in islice(dataset, 5):
            dataset.deliver(batch)
        return dataset.state_dict()

    return begin, after


def _relax(folder: str, **changes: Any) -> tuple[Begin, After]:
    """States are files in a folder that is stored, too."""
    values = {
        "prompt_data": "sources/chats-0.jsonl", "input_key": "messages", "rollout_seed": 7, "rollout_shuffle": True,
        "n_samples_per_prompt": 2, "save": folder, "load": folder, **changes,
    }  # fmt: skip

    def after(state: Any) -> list[str]:
        source = RolloutDataSourceWithBuffer(SimpleNamespace(**values))
        source.load(state["rollout_id"])
        groups = source.get_samples(40)
        return [f"{group[0].group_index} {group[0].index} {group[1].index} {_prompt_of(group)}" for group in groups]

    return partial(_save_relax, values), after


def _prompt_of(group: Any) -> str:
    return byte_digest(json.dumps(group[0].prompt, sort_keys=True).encode())[:8]


def _save_relax(values: Mapping[str, Any]) -> dict[str, int]:
    """Save a state after 17 groups of which two came back."""
    source = RolloutDataSourceWithBuffer(SimpleNamespace(**values))
    groups = source.get_samples(17)
    source.add_samples(groups[3:5])
    source.save(3)
    return {"rollout_id": 3}


CASES: dict[str, Case] = {
    **{f"MosaicML, {name}": partial(_mosaic, name, "random") for name in ALGORITHMS},
    "MosaicML, stratified": partial(_mosaic, "py1e", "stratified"),
    "MosaicML, per_stream": partial(_mosaic, "py1s", "per_stream"),
    "LMMS Engine, first_fit": partial(_engine, "first_fit"),
    "LMMS Engine, balanced": partial(_engine, "balanced"),
    "Relax": partial(_relax, "relax/whole"),
    "Relax, lazy": partial(_relax, "relax/lazy", use_streaming_dataset=True),
}


def door_states() -> dict[str, Any]:
    """Return the state of each case, and what it read from there on; in the current folder."""
    found = {}
    for name, case in CASES.items():
        begin, after = case()
        state = json.loads(json.dumps(begin()))
        found[name] = {"state": state, "following": after(state)}
    return found
