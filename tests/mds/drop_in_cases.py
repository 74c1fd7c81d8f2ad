"""Keywords with which MosaicML's StreamingDataset and ours read the same; see drop_in_job.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SIZES = {"a": 33, "b": 48, "c": 21}  # samples; "zipped" is "a", compressed


@dataclass(frozen=True, kw_only=True)
class Case:
    """keywords: of both classes. streams: data by name, with their weights; none: the data of name_of_data alone."""

    keywords: Mapping[str, Any] = field(default_factory=dict)
    streams: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    name_of_data: str = "a"


THREE: dict[str, dict[str, Any]] = {"a": {}, "b": {}, "c": {}}
PROPORTIONS: dict[str, dict[str, Any]] = {"a": {"proportion": 0.5}, "b": {"proportion": 0.3}, "c": {"proportion": 0.2}}


def _case(streams: Mapping[str, Mapping[str, Any]] | None = None, **keywords: Any) -> Case:
    data = keywords.pop("name_of_data", "a")
    return Case(keywords={"batch_size": 4, **keywords}, streams=streams or {}, name_of_data=data)


# Four canonical nodes take 48 samples, which they divide: of 33 they make 36, and the parent refuses the epoch's end.
CASES: dict[str, Case] = {
    "defaults": _case(),
    "shuffled": _case(shuffle=True),
    "py1br": _case(shuffle=True, shuffle_algo="py1br", shuffle_block_size=16),
    "py1s": _case(shuffle=True, shuffle_algo="py1s", num_canonical_nodes=4, name_of_data="b"),
    "py2s": _case(shuffle=True, shuffle_algo="py2s", num_canonical_nodes=4, name_of_data="b"),
    "naive": _case(shuffle=True, shuffle_algo="naive"),
    "seed": _case(shuffle=True, shuffle_seed=7),
    "block": _case(shuffle=True, shuffle_block_size=8),
    "nodes": _case(shuffle=True, num_canonical_nodes=4, name_of_data="b"),
    "nodes unshuffled": _case(num_canonical_nodes=4, name_of_data="b"),
    "partition": _case(shuffle=True, partition_algo="orig", num_canonical_nodes=2),
    "batch size": _case(shuffle=True, batch_size=3),
    "streams": _case(THREE, shuffle=True),
    "repeat": _case({"a": {"repeat": 1.5}, "b": {"repeat": 0.3}, "c": {}}, shuffle=True),
    "choose": _case({"a": {"choose": 40}, "b": {"choose": 9}, "c": {"choose": 30}}, shuffle=True),
    "proportion": _case(PROPORTIONS, shuffle=True),
    "epoch size": _case(shuffle=True, epoch_size=50),
    "epoch size in words": _case(shuffle=True, epoch_size="0.06k"),
    "epoch size of streams": _case(PROPORTIONS, shuffle=True, epoch_size=77),
    "fixed": _case(shuffle=True, epoch_size=20, sampling_method="fixed"),
    "granularity": _case(shuffle=True, epoch_size=20, sampling_granularity=3),
    "stratified": _case(PROPORTIONS, shuffle=True, batching_method="stratified", batch_size=8),
    "per stream": _case(PROPORTIONS, shuffle=True, batching_method="per_stream"),
    "device per stream": _case(PROPORTIONS, shuffle=True, batching_method="device_per_stream"),
    "predownload": _case(shuffle=True, predownload=4),
    "cache limit": _case(shuffle=True, cache_limit="100kb"),
    "hash": _case(validate_hash="sha1"),
    "zipped": _case(name_of_data="zipped", shuffle=True),
    "kept zipped": _case(name_of_data="zipped", keep_zip=True),
    "split": _case(name_of_data="", split="b"),
    "retry and timeout": _case(download_retry=1, download_timeout=30),
    "stream name": _case(stream_name="for_tests"),
    "stream config": _case(stream_config={"repeat": 2}, shuffle=True),
    "replication": _case(shuffle=True, replication=2),
}
