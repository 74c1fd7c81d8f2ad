"""A trainer's datasets around MosaicML's: of stored token ids in two forms, and of conversations in turns.

Their keywords, what they override and what they call is what llm-foundry's datasets do.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from streaming import MDSWriter, Stream, StreamingDataLoader, StreamingDataset

LONGEST = 12
KEYWORDS: dict[str, Any] = {
    "split": None, "download_retry": 2, "download_timeout": 60, "validate_hash": None, "keep_zip": False,
    "epoch_size": None, "predownload": None, "cache_limit": None, "partition_algo": "relaxed",
    "num_canonical_nodes": 2, "shuffle": True, "shuffle_algo": "py1e", "shuffle_seed": 17, "shuffle_block_size": 16,
    "sampling_method": "balanced", "sampling_granularity": 1, "batching_method": "random",
    "allow_unsafe_types": False, "replication": None, "stream_name": "stream", "stream_config": None,
}  # fmt: skip


class Tokens(StreamingDataset):
    """Stored token ids as tensors, from bytes of int64 or arrays."""

    def __init__(self, *, token_encoding_type: str = "int64", max_seq_len: int = LONGEST, **keywords: Any):
        super().__init__(**keywords)
        self.token_encoding_type, self.max_seq_len = token_encoding_type, max_seq_len

    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]
        tokens = super().__getitem__(index)["tokens"]
        if not isinstance(tokens, np.ndarray):
            tokens = np.frombuffer(tokens, dtype=getattr(np, self.token_encoding_type))
        return torch.from_numpy(tokens[: self.max_seq_len].copy()).to(torch.int64)


class Turns(StreamingDataset):
    """Conversations whose samples are packed by a collator, so that a batch stands for more samples than it has."""

    def __init__(self, *, packing_ratio: float | None = None, **keywords: Any):
        super().__init__(**keywords)
        self.packing_ratio = packing_ratio

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        sample: dict[str, Any] = super().__getitem__(index)
        if "turns" in sample:
            return sample
        return {"turns": [{name: sample[name][:LONGEST].tolist() for name in ("input_ids", "labels")}]}

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        if self.packing_ratio is not None:
            num_samples = int(self.packing_ratio * num_samples)
        return super().state_dict(num_samples=num_samples, from_beginning=from_beginning)


def write(root: Path) -> None:
    rng = np.random.default_rng(3)
    ids = [rng.integers(0, 99, length) for length in rng.integers(9, 20, 40)]
    with MDSWriter(columns={"tokens": "bytes"}, out=str(root / "bytes"), compression="zstd") as writer:
        for each in ids:
            writer.write({"tokens": each.astype(np.int64).tobytes()})
    with MDSWriter(columns={"tokens": "ndarray:int32"}, out=str(root / "arrays"), size_limit=500) as writer:
        for each in ids:
            writer.write({"tokens": each.astype(np.int32)})
    out = (str(root / "written"), str(root / "turns"))
    with MDSWriter(columns={"turns": "json"}, out=out, keep_local=True, hashes=["sha1"], size_limit=2000) as writer:
        for each in ids:
            writer.write({"turns": [{"input_ids": each.tolist(), "labels": each.tolist()}] * 2})
    columns = {"input_ids": "ndarray:int32", "labels": "ndarray:int32"}
    with MDSWriter(columns=columns, out=str(root / "old")) as writer:
        for each in ids:
            writer.write({"input_ids": each.astype(np.int32), "labels": each.astype(np.int32)})


def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
    """The token ids of each sample, of all its turns, filled up to the longest."""
    ids = [each.tolist() if isinstance(each, torch.Tensor) else each["turns"][-1]["input_ids"] for each in samples]
    longest = max(map(len, ids))
    return {"input_ids": torch.tensor([each + [0] * (longest - len(each)) for each in ids])}


def show(dataset: Any, *, workers: int) -> None:
    print(type(dataset).__name__, len(dataset), dataset.num_samples, dataset.batch_size, dataset.shuffle)
    loader = StreamingDataLoader(dataset, batch_size=4, num_workers=workers, collate_fn=collate)
    batches = iter(loader)
    for _ in range(3):
        print(next(batches)["input_ids"].tolist())
    state: Any = loader.state_dict()
    print({name: state[name] for name in ("epoch", "sample_in_epoch", "num_canonical_nodes", "shuffle_seed")})
    print([batch["input_ids"].tolist() for batch in batches])


def main(root: Path) -> None:
    write(root / "foundry")
    remote = root / "foundry"
    streams = [
        Stream(remote=str(remote / name), local=str(root / "local" / name), proportion=share)
        for name, share in (("bytes", 0.25), ("arrays", 0.75))
    ]
    show(Tokens(streams=streams, batch_size=4, **KEYWORDS), workers=2)
    for name, ratio in (("turns", 1.5), ("old", None)):
        local = str(root / "local" / name)
        where: dict[str, Any] = {"streams": [], "remote": str(remote / name), "local": local}
        dataset = Turns(**where, batch_size=4, packing_ratio=ratio, **KEYWORDS)
        show(dataset, workers=0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
