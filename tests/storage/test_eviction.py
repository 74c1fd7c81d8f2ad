from __future__ import annotations

import fcntl
import math
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from lmms_stream.checks import parse_bytes
from lmms_stream.errors import ConfigError, StorageError
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.mds.shard import fetch_shard
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.storage.cache import LocalCache
from lmms_stream.storage.eviction import CacheQuota, least_quota
from lmms_stream.storage.fetch_config import FetchConfig
from lmms_stream.storage.record import Record
from lmms_stream.storage.storage import open_storage

from ..conftest import write_tokens
from ..proxy import fault_proxy
from ..rounds import rounds
from .counting import OBJECT_BYTES, Remote, held, limited_cache, object_wanted


def upload_tokens(url: str, folder: Path, *, num_samples: int, compression: str | None = None) -> None:
    """A dataset of tokenized samples in shards of 16 KiB, with a lengths index."""
    write_tokens(folder, num_samples=num_samples, compression=compression)
    store = open_storage(url)
    for path in folder.rglob("*"):
        if path.is_file():
            store.upload(path, str(path.relative_to(folder)))


def open_limited(url: str, cache: Path, *, cache_limit: int | None = None) -> PackedStreamingDataset:
    return PackedStreamingDataset(
        url,
        cache,
        processor=TokensProcessor(),
        packing=PackingConfig(packing_length=256),
        order=OrderConfig(seed=3, num_canonical_nodes=1, shuffle_block_size=600),
        fetch=FetchConfig(cache_limit=cache_limit, timeout_s=60, ahead=4),
    )


def cached_bytes(folder: Path) -> int:
    """Bytes of finished files in a cache folder at one moment, in which nothing is deleted or reserved."""
    if not (folder / ".room.lock").exists():
        return 0
    with (folder / ".room.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return sum(entry.stat().st_size for entry in os.scandir(folder) if is_shard(entry))


def is_shard(entry: os.DirEntry[str]) -> bool:
    return entry.is_file() and not entry.name.startswith(".") and ".mds" in entry.name


@pytest.mark.parametrize(
    ("text", "expected"),
    [(1, 1), ("12", 12), ("2kb", 2048), ("1.5 MB", 3 << 19), ("10gb", 10 << 30), ("1tb", 1 << 40), ("7b", 7)],
)
def test_limits_are_written_as_numbers_of_bytes(text: int | str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "much", "-1gb", 0, "0.1b", "infgb", "nan"])
def test_a_limit_that_is_no_number_of_bytes_is_refused(text: int | str) -> None:
    with pytest.raises(ConfigError, match=r"cache_limit .* is not a number of bytes: write it as 500mb or 1\.5gb"):
        FetchConfig(cache_limit=text)


def test_the_least_room_holds_the_shards_of_any_order() -> None:
    rng = np.random.default_rng(0)
    samples = rng.integers(1, 50, 40)
    sizes = samples * rng.integers(5, 90, 40)
    for span in (1, 30, 200, 5000):
        least = least_quota(sizes, samples, num_spans=1, span=span)
        for _ in range(50):
            order = rng.permutation(40)
            ends = np.cumsum(samples[order])
            first = int(rng.integers(0, max(1, ends[-1] - span + 1)))
            touched = (ends > first) & (ends - samples[order] < first + span)
            assert sizes[order][touched].sum() <= least
    assert least_quota(sizes, samples, num_spans=3, span=5000) == sizes.sum()


@pytest.mark.timeout(250)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("num_workers", [2, 0][: rounds(1, 2)])
def test_under_a_limit_shards_give_way_and_each_is_still_fetched_once(
    s3_folder: str, tmp_path: Path, num_workers: int
) -> None:
    upload_tokens(s3_folder, tmp_path / "made", num_samples=12000)
    free = open_limited(s3_folder, tmp_path / "free")
    expected = [batch.sample_ids.tolist() for batch in PackedLoader(free, global_batch=4)]
    with pytest.raises(ConfigError, match=r"cache_limit is 20000 bytes, and this order reads from \d+ bytes") as error:
        PackedLoader(open_limited(s3_folder, tmp_path / "cache", cache_limit=20000), global_batch=4, num_workers=2)
    least = int(str(error.value).split("raise it to ")[1].split(",")[0])
    total = sum(info.size for info in free.core.shard_infos)
    assert 20000 < least < total * 0.8

    most, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            most[0] = max(most[0], cached_bytes(tmp_path / "cache"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with fault_proxy(os.environ["S3_ENDPOINT_URL"]) as proxy:
            limited = open_limited(s3_folder, tmp_path / "cache", cache_limit=least)
            loader = PackedLoader(limited, global_batch=4, num_workers=num_workers, timeout_s=60)
            found = [batch.sample_ids.tolist() for batch in loader]
            traffic = proxy.traffic()
    finally:
        done.set()
        watcher.join()
    assert found == expected
    assert most[0] <= least
    names = [info.name for info in limited.core.shard_infos]
    assert [traffic.num_requests("GET", name) for name in names] == [1] * len(names)


def test_the_files_used_least_recently_give_way(tmp_path: Path) -> None:
    cache = limited_cache(tmp_path, objects=3)
    for name in ("a", "b", "c"):
        cache.fetch(name, object_wanted(name))
    cache.touch(tmp_path / "a")
    cache.fetch("d", object_wanted("d"))
    assert held(tmp_path) == ["a", "c", "d"]
    cache.fetch("e", object_wanted("e"))
    assert held(tmp_path) == ["a", "d", "e"]
    assert sorted(path.name for path in tmp_path.glob(".*.lock")) == [".a.lock", ".d.lock", ".e.lock", ".room.lock"]


class Foretold:
    """Next uses of files by name; inf of all others."""

    def __init__(self, **uses: float):
        self.uses = uses
        self.version = 0
        self.since_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def next_uses(self, folder: Path, names: list[str]) -> list[float]:
        return [self.uses.get(name[1 : -len(".lock")], math.inf) for name in names]


def test_what_is_foretold_to_be_needed_last_gives_way_first(tmp_path: Path) -> None:
    cache = limited_cache(tmp_path, objects=3)
    for name in ("a", "b", "c"):
        cache.fetch(name, object_wanted(name))
    assert cache.quota is not None
    foretold = cache.quota.outlook = Foretold(a=0.0, b=0.7, c=0.5, d=0.1, e=0.6, f=0.0)
    cache.fetch("d", object_wanted("d"))
    assert held(tmp_path) == ["a", "c", "d"]
    foretold.uses |= {"d": 0.9}
    foretold.version += 1
    foretold.since_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    cache.fetch("e", object_wanted("e"))
    assert held(tmp_path) == ["a", "c", "e"]
    cache.quota.outlook = None
    cache.fetch("f", object_wanted("f"))
    assert held(tmp_path) == ["c", "e", "f"]


def test_a_folder_that_another_room_fills_meanwhile_is_counted(tmp_path: Path) -> None:
    def cache_of(folder: str, name: str) -> LocalCache:
        return LocalCache(Remote(), tmp_path / folder, quota=CacheQuota([tmp_path / name, shared], 10 * OBJECT_BYTES))

    class FilledMeanwhile(Foretold):
        """Another room takes of the shared folder while this one looks for what gives way."""

        def next_uses(self, folder: Path, names: list[str]) -> list[float]:
            if "meanwhile" not in held(shared):
                theirs.fetch("meanwhile", object_wanted("meanwhile"))
            return super().next_uses(folder, names)

    shared = tmp_path / "shared"
    ours, theirs = cache_of("shared", "one"), cache_of("shared", "another")
    beside = LocalCache(Remote(), tmp_path / "one", quota=ours.quota)
    for cache in (beside, ours):
        for number in range(5):
            cache.fetch(f"a{number}", object_wanted(f"a{number}"))
    assert ours.quota is not None
    ours.quota.outlook = FilledMeanwhile(a0=0.1, a1=0.1)
    ours.fetch("b", object_wanted("b"))
    assert "meanwhile" in held(shared)
    assert len(held(tmp_path / "one")) + len(held(shared)) == 10


def test_what_is_in_use_stays_whatever_is_foretold(tmp_path: Path) -> None:
    cache = limited_cache(tmp_path, objects=3)
    for name in ("a", "b", "c"):
        cache.fetch(name, object_wanted(name))
    assert cache.quota is not None
    cache.quota.outlook = Foretold(a=0.2, d=0.3)
    cache.touch(tmp_path / "b")  # by a rank that is behind, say
    cache.fetch("d", object_wanted("d"))
    assert held(tmp_path) == ["a", "b", "d"]
    cache.fetch("e", object_wanted("e"))
    assert held(tmp_path) == ["b", "d", "e"]
    cache.fetch("f", object_wanted("f"))  # all are in use: what was used longest ago
    assert held(tmp_path) == ["d", "e", "f"]


def test_files_that_were_there_before_are_never_deleted(tmp_path: Path) -> None:
    for name in ("mine", "a"):
        (tmp_path / name).write_bytes(name.encode().ljust(OBJECT_BYTES))
    cache = limited_cache(tmp_path, objects=2)
    for name in ("a", "b", "c", "d"):
        cache.fetch(name, object_wanted(name))
    assert held(tmp_path) == ["a", "c", "d", "mine"]


def test_a_file_that_was_put_in_place_of_a_download_is_not_deleted(tmp_path: Path) -> None:
    cache = limited_cache(tmp_path, objects=1)
    cache.fetch("a", object_wanted("a"))
    (tmp_path / "theirs").write_bytes(b"x" * OBJECT_BYTES)
    (tmp_path / "theirs").replace(tmp_path / "a")
    cache.fetch("b", object_wanted("b"))
    assert held(tmp_path) == ["a", "b"]


def test_a_clock_that_jumps_does_not_change_what_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = limited_cache(tmp_path, objects=2)
    now = time.time()
    for name, jump in (("a", 0), ("b", -(10**6)), ("c", 10**7), ("d", 5)):
        monkeypatch.setattr(time, "time", lambda jump=jump: now + jump)
        cache.fetch(name, object_wanted(name))
    assert held(tmp_path) == ["c", "d"]


def test_records_of_another_boot_or_with_stamps_of_the_future_give_way_first(tmp_path: Path) -> None:
    cache = limited_cache(tmp_path, objects=2)
    cache.fetch("a", object_wanted("a"))
    cache.fetch("b", object_wanted("b"))
    future = time.time_ns() + 10**18
    os.utime(tmp_path / ".b.lock", ns=(future, future))
    cache.fetch("c", object_wanted("c"))
    assert held(tmp_path) == ["a", "c"]


def test_room_that_a_dead_download_reserved_is_free(tmp_path: Path) -> None:
    cache = limited_cache(tmp_path, objects=1, timeout_s=1)
    with (tmp_path / ".dead.lock").open("wb") as file:
        Record(size=OBJECT_BYTES, boot="x", ours=True).write(file)
    cache.fetch("a", object_wanted("a"))
    assert held(tmp_path) == ["a"]


def test_more_than_the_limit_and_room_that_others_hold_are_errors_in_bounded_time(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cache_limit is 0 bytes and a takes 1000: raise it"):
        limited_cache(tmp_path, objects=0).fetch("a", object_wanted("a"))
    cache = limited_cache(tmp_path, objects=1, timeout_s=0.3)
    with (tmp_path / ".busy.lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        Record(size=OBJECT_BYTES, boot="x", ours=True).write(file)
        with pytest.raises(
            StorageError, match=r"downloads under way hold all of cache_limit \(1000 bytes\) for 0\.3 s"
        ):
            cache.fetch("a", object_wanted("a"))


def test_damaged_records_are_no_records(tmp_path: Path) -> None:
    cache = limited_cache(tmp_path, objects=5)
    cache.fetch("a", object_wanted("a"))
    for damage in (b"", b"{", b"[1]", b'{"size": 3, "other": 1}', b"\xff"):
        (tmp_path / ".a.lock").write_bytes(damage)
        assert cache.fetch("a", object_wanted("a")) == tmp_path / "a"


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_compressed_shards_are_kept_decompressed_and_within_the_limit(
    s3_folder: str, tmp_path: Path, compression: str | None
) -> None:
    upload_tokens(s3_folder, tmp_path / "made", num_samples=500, compression=compression)
    dataset = open_limited(s3_folder, tmp_path / "cache", cache_limit="1mb")  # type: ignore[arg-type]
    assert [int(sample["input_ids"][0]) for sample in dataset[:]] == list(range(500))
    names = [info.name for info in dataset.core.shard_infos]
    assert held(tmp_path / "cache") == sorted(names)
    assert fetch_shard(dataset.core.one.cache, dataset.core.shard_infos[0]) == tmp_path / "cache" / names[0]
