"""A stored MDS dataset -> a datasets.IterableDataset, or a dataset of the Hugging Face hub with a card."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...converters.exporting.export import arrow_type, plain_value
from ...converters.stored.catalog import Catalog, read_catalog
from ...errors import ConfigError
from ...extras import need
from ...mds.core import PackedDataset
from ...mds.decoding import IMAGES
from ...mds.streams import StreamConfig
from ...storage.storage import open_storage

_SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"))  # the hub's names


def iterable_dataset(remote: str | Path, local: str | Path | None = None) -> Any:
    """Return the samples of a dataset in stored order as a datasets.IterableDataset, with features and exact states.

    remote: a folder or a URL; local: folder for copies of its shards. Each MDS shard is a shard of the result for
    shuffle, split_dataset_by_node and the workers of a DataLoader. After load_state_dict the result continues after the
    last sample, and first reads samples of one shard again. Columns of the encoding json are JSON text; images keep
    their stored bytes.
    """
    datasets = need("datasets", by="datasets.IterableDatasets")
    catalog = read_catalog(open_storage(str(remote)))
    features = datasets.Features(
        {name: _feature(encoding, datasets) for name, encoding in catalog.shards[0].encodings.items()}
    )
    parts, first = [], 0
    for info in catalog.shards:
        if info.num_samples:
            parts.append((first, first + info.num_samples))
        first += info.num_samples
    samples = _Samples(str(remote), None if local is None else str(local))
    return datasets.IterableDataset.from_generator(
        samples, features=features, gen_kwargs={"parts": parts}, split=datasets.Split.TRAIN
    )


class _Samples:
    """Generator of the samples of some shards; each process opens the dataset for itself."""

    def __init__(self, remote: str, local: str | None):
        self._remote, self._local = remote, local
        self._dataset: PackedDataset | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_dataset": None}

    def __call__(self, parts: Sequence[tuple[int, int]]) -> Iterator[dict[str, Any]]:
        if self._dataset is None:
            self._dataset = PackedDataset([StreamConfig(remote=self._remote, local=self._local)])
        encodings = self._dataset.shard_infos[0].encodings
        for start, stop in parts:
            for sample in self._dataset.reader.samples(np.arange(start, stop)):
                yield {name: _value(encodings[name], value) for name, value in sample.items()}


def _feature(encoding: str, datasets: Any) -> Any:
    import pyarrow

    if encoding in IMAGES:
        one = datasets.Image()
        return datasets.List(one) if encoding.startswith("list") else one
    if encoding == "json":
        return datasets.Value("string")
    if encoding.startswith("ndarray"):
        return _array_feature(encoding, datasets)
    kind = str(arrow_type(encoding, pyarrow))
    return datasets.Value({"double": "float64", "halffloat": "float16"}.get(kind, kind))


def _array_feature(encoding: str, datasets: Any) -> Any:
    _, *told = encoding.split(":")
    if not told:
        raise ConfigError(
            f"a column of encoding {encoding} may hold arrays of any type, and a feature has one: convert the dataset "
            "with --keep NAME:ndarray:DTYPE"
        )
    feature = datasets.Value(told[0])
    for _ in told[1].split(",") if len(told) > 1 else ("any",):
        feature = datasets.List(feature)
    return feature


def _value(encoding: str, value: Any) -> Any:
    if encoding in IMAGES:
        return [_file(image) for image in value] if isinstance(value, list) else _file(value)
    return json.dumps(value, ensure_ascii=False) if encoding == "json" else plain_value(value)


def _file(image: Any) -> Any:
    """Return the stored bytes of an image, not decoded; an image stored as pixels has no file, and is returned."""
    file = getattr(image, "fp", None)
    return image if file is None else {"bytes": file.getvalue(), "path": None}


def push_to_hub(dataset: str | Path, repo_id: str, *, token: str | None = None, private: bool | None = None) -> str:
    """Upload the folder of a dataset to a dataset of the hub, with a card (README.md); return its hf:// URL.

    The card tells samples, columns and sources from index.json and _lmms/dataset.json; a README.md of the folder is
    kept. Files of _lmms/ are uploaded, too, with the paths of the sources. The upload continues after an interruption.
    Raises the errors of huggingface_hub.
    """
    from huggingface_hub import HfApi

    folder = Path(dataset)
    catalog = read_catalog(open_storage(str(folder)))
    api = HfApi(token=token)
    api.create_repo(repo_id, repo_type="dataset", private=private, exist_ok=True)
    if not (folder / "README.md").exists():
        card = card_of(catalog, repo_id).encode()
        api.upload_file(path_or_fileobj=card, path_in_repo="README.md", repo_id=repo_id, repo_type="dataset")
    api.upload_folder(folder_path=folder, repo_id=repo_id, repo_type="dataset", ignore_patterns=[".*", "*.tmp"])
    return f"hf://datasets/{repo_id}"


def card_of(catalog: Catalog, repo_id: str) -> str:
    """Return the card of a dataset: Markdown with the hub's YAML header."""
    size = next((name for most, name in _SIZES if catalog.num_samples < most), "n>1M")
    header = f"size_categories:\n- {size}\ntags:\n- mds\n- lmms_stream\n"
    told = catalog.dataset or {}
    columns = "".join(f"| `{name}` | {kind} |\n" for name, kind in catalog.shards[0].encodings.items())
    sources = "".join(f"- {each['name'].rsplit('/', 1)[-1]}\n" for each in told.get("source") or [])
    made = f"\nMade by {told['converter']} of\n\n{sources}" if sources else ""
    return (
        f"---\n{header}---\n\n# {repo_id.rsplit('/', 1)[-1]}\n\n"
        f"{catalog.num_samples:,} samples in {len(catalog.shards):,} MDS shards.\n\n"
        f"| column | encoding |\n| --- | --- |\n{columns}{made}\n"
        "```python\nfrom lmms_stream import StreamingDataset\n\n"
        f'dataset = StreamingDataset(remote="hf://datasets/{repo_id}", local="copies")\n```\n'
    )
