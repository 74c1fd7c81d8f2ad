"""The memory in which the media of batches lie on their way from a worker."""

from __future__ import annotations

import gc
import multiprocessing
import os
from contextlib import suppress
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from pickle import loads
from typing import Any

import numpy as np
import pytest
import torch
from lmms_stream.errors import WorkerError
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.loader.media_memory import FREE, PackMemory, SharedBlocks
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors.base import Measured, Memory
from lmms_stream.processors.media.types import new_memory
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.types import Batch, Processed, Sample

from ..conftest import write_tokens

ROW_VALUES = 8_000  # of a patch, so that a sample's patches are 32 kB each


class Seeing(TokensProcessor):
    """Every sample has a patch for each ten tokens, and every third one a video of as many, too."""

    fill_packs = None  # type: ignore[assignment]

    def process(self, sample: Sample) -> Processed:
        return self.process_into(sample, new_memory)

    def process_into(self, sample: Sample, memory: Memory) -> Processed:
        tokens = super().process(sample)
        rows, first = 1 + len(tokens["input_ids"]) // 10, int(tokens["input_ids"][0])
        names = ("pixel_values", "pixel_values_videos")[: 1 + (first % 3 == 0)]
        media: dict[str, Any] = {"image_grid_thw": np.array([[1, 1, rows]])}
        for name in names:
            media[name] = memory(name, (rows, ROW_VALUES), np.float32)
            media[name][...] = first + np.arange(rows)[:, None]
        return {**tokens, "media": media}

    def measure_media(self, samples: list[Sample]) -> list[Measured]:
        made = [self.process(sample) for sample in samples]
        patches = [sum(len(rows) for name, rows in each["media"].items() if "pixel" in name) for each in made]
        return [Measured(tokens=len(each["input_ids"]), patches=rows) for each, rows in zip(made, patches, strict=True)]


class Owning(Seeing):
    """The same from memory of its own."""

    def process(self, sample: Sample) -> Processed:
        return super().process_into(sample, new_memory)

    def measure_media(self, samples: list[Sample]) -> list[Measured]:
        return super().measure_media(samples)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    write_tokens(folder, num_samples=400)
    return folder


def loader_of(folder: Path, processor: Any, **settings: Any) -> PackedLoader:
    packing = PackingConfig(packing_length=256, overlong="drop")
    order = OrderConfig(num_canonical_nodes=1)
    dataset = PackedStreamingDataset(folder, processor=processor, packing=packing, order=order)
    return PackedLoader(dataset, global_batch=2, timeout_s=60, **settings)


def sent(tensor: torch.Tensor, blocks: SharedBlocks) -> torch.Tensor:
    """As another process gets it."""
    received: torch.Tensor = loads(bytes(ForkingPickler.dumps(blocks.sendable(tensor))))
    return received


def addresses(blocks: SharedBlocks) -> set[int]:
    return {each.data.ctypes.data for each in blocks._blocks}


def test_a_block_is_lent_again_when_the_last_tensor_in_it_is_gone() -> None:
    blocks = SharedBlocks()
    received = sent(torch.arange(1000), blocks)
    view = received.reshape(10, 100)[3:, 1]
    first = addresses(blocks)
    del received
    assert blocks.take(8).data.ctypes.data not in first
    assert view.tolist() == [301, 401, 501, 601, 701, 801, 901]
    del view
    gc.collect()
    assert blocks.take(8000).data.ctypes.data in first


def test_a_tensor_that_was_received_leaves_no_file_open() -> None:
    blocks, counts = SharedBlocks(), []
    for _ in range(2):
        received = sent(torch.arange(1000), blocks)
        assert received.sum() == 499_500
        del received
        gc.collect()
        memory, opened = os.fstat(blocks._blocks[0].file), []
        for file in list(Path("/proc/self/fd").iterdir()):
            with suppress(FileNotFoundError):  # one that a thread of another test has closed
                opened.append(os.path.samestat(file.stat(), memory))
        counts.append(sum(opened))
    assert counts[0] == counts[1] > 0


def test_a_block_that_is_too_small_makes_way_for_a_larger_one() -> None:
    blocks = SharedBlocks()
    for size in (1000, 5000, 3000, 5000):
        received = sent(torch.zeros(size, dtype=torch.uint8), blocks)
        del received
    assert [len(each.data) for each in blocks._blocks] == [5000]
    small = blocks.take(5000), blocks.take(1000)
    for each in small:
        each.state[0] = FREE
    assert len(blocks.take(8000).data) == 8000
    assert sorted(len(each.data) for each in blocks._blocks) == [1000, 8000]


def test_a_fork_of_the_process_that_got_a_tensor_does_not_free_its_block() -> None:
    blocks = SharedBlocks()
    held = [sent(torch.arange(100), blocks)]
    child = os.fork()
    if not child:
        held.clear()
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert blocks._blocks[0].state[0] == 1
    held.clear()
    gc.collect()
    assert blocks._blocks[0].state[0] == 0


def test_memory_of_a_worker_that_has_ended_is_a_lost_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    pickled = bytes(ForkingPickler.dumps(SharedBlocks().sendable(torch.arange(100))))
    with pytest.raises(ConnectionError, match=r"worker \d+ has ended before its batch was received"):
        loads(pickled)  # its blocks are gone
    blocks = SharedBlocks()
    pickled = bytes(ForkingPickler.dumps(blocks.sendable(torch.arange(100))))

    def refuse(path: str, flags: int) -> int:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(WorkerError, match=r"memory of worker \d+ cannot be opened \(.*Permission denied.*\): let proc"):
        loads(pickled)


def test_arrays_of_a_name_lie_one_after_another_and_are_joined_without_a_copy() -> None:
    memory = PackMemory(SharedBlocks(), 10)
    images = [memory("pixel_values", (rows, 3), np.float32) for rows in (2, 3)]
    video = memory("pixel_values_videos", (4, 3), np.float32)
    images.append(memory("pixel_values", (1, 3), np.float32))
    joined = memory.joined("pixel_values", images)
    assert joined is not None
    joined[:] = np.arange(18).reshape(6, 3)
    assert [each[0, 0] for each in images] == [0, 6, 15]
    assert memory.joined("pixel_values", images[:2]) is None
    assert memory.joined("image_grid_thw", [np.zeros((1, 3))]) is None
    assert (found := memory.joined("pixel_values_videos", [video])) is not None
    assert found.shape == (4, 3)


def test_arrays_beyond_what_was_measured_have_memory_of_their_own() -> None:
    memory = PackMemory(SharedBlocks(), 3)
    arrays = [memory("pixel_values", (2, 5), np.float32) for _ in range(3)]
    assert [each.shape for each in arrays] == [(2, 5)] * 3
    assert memory.joined("pixel_values", arrays) is None


@pytest.mark.parametrize("processor", [Seeing(), Owning()], ids=["into the block", "copied"])
def test_batches_that_are_kept_keep_what_they_hold_while_workers_go_on(tokens: Path, processor: Any) -> None:
    here = list(loader_of(tokens, processor))
    kept: list[tuple[Batch, Batch]] = []
    most_shared = 0
    others = multiprocessing.active_children()
    loader = loader_of(tokens, processor, num_workers=1, persistent_workers=True)
    for number, (made, received) in enumerate(zip(here, loader, strict=True)):
        assert made.inputs.keys() == received.inputs.keys()
        if number % 7 == 0:
            kept.append((made, received))
        (worker,) = set(multiprocessing.active_children()) - {*others}
        most_shared = max(most_shared, _shared_bytes(worker.pid or 0))
        assert all(
            torch.equal(one.inputs[name], two.inputs[name])
            for one, two in (*kept[-3:], (made, received))
            for name in one.inputs
        )
        del made, received
        kept = kept[-3:]
    assert len(here) > 40
    assert most_shared <= 12 * max(sum(each.nbytes for each in batch.inputs.values()) for batch in here)


def test_an_iteration_that_is_left_gives_back_what_was_on_its_way(tokens: Path) -> None:
    largest = max(sum(each.nbytes for each in batch.inputs.values()) for batch in loader_of(tokens, Seeing()))
    others = multiprocessing.active_children()
    loader = loader_of(tokens, Seeing(), num_workers=1, persistent_workers=True)
    for _ in range(12):
        list(islice(loader, 2))
    (worker,) = set(multiprocessing.active_children()) - {*others}
    assert _shared_bytes(worker.pid or 0) <= 8 * largest  # 12 iterations ask for 4 batches or more each


def _shared_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssShmem"))
