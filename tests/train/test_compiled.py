"""Blocks are compiled for packs of any number and length of samples, not for each pack again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from shutil import which

import numpy as np
import pytest
import torch
from lmms_stream.doors.huggingface.trainer import FSDP2SFTTrainer
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.train.model.sharding import compile_blocks
from lmms_stream.train.report.metrics import MOST_GRAPHS, Compilations
from lmms_stream.train.report.train_log import read_log
from lmms_stream.train.run.distributed import init_distributed
from lmms_stream.train.run.settings import TrainConfig
from torch._dynamo.utils import counters

from ..conftest import write_samples, write_tokens
from ..jobs.test_vision_runs import write_vision_run
from ..rounds import in_long_rounds, rounds
from .runs import trainer_of, write_run
from .vision import Processor, build, source_of

NUM_PACKS = rounds(16, 50)
NUM_PACKS_OF_MEDIA = 12
NUM_PACKS_IN_ALL, NUM_WARM_PACKS = 200, 20
needs_compiler = pytest.mark.skipif(which("g++") is None, reason="torch.compile needs g++ on the CPU")


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


@in_long_rounds
@needs_compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's compiler looks at FSDP's parameters
def test_blocks_are_not_compiled_again_for_each_pack_and_give_the_same_losses(tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", num_samples=400)
    losses: dict[bool, list[float]] = {}
    for is_compiled in (False, True):
        out = tmp_path / f"compiled-{is_compiled}"
        run = write_run(
            tmp_path / "run.yaml", tmp_path / "data", output_dir=str(out), max_steps=NUM_PACKS, global_batch=1,
            torch_compile=is_compiled, async_save=False,
        )  # fmt: skip
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            trainer = trainer_of(run, "model.attention=sdpa_varlen")
            trainer.build()
            num_proven = counters["stats"]["unique_graphs"]
            trainer.train()
        losses[is_compiled] = [record["loss"] for record in read_log(out / "train_log.jsonl")]
        records = read_log(out / "train_log.jsonl")
        assert len({len(record["sample_ids"]) for record in records}) > 2  # packs have different numbers of samples
    assert len(losses[False]) == NUM_PACKS
    assert losses[True] == pytest.approx(losses[False], rel=1e-4)
    # In training there is dropout to ask for, and the positions of a loader's packs have other strides: once each.
    num_graphs = counters["stats"]["unique_graphs"]
    assert 0 < num_proven <= 6
    assert num_graphs - num_proven <= 4, dict(counters["stats"])


def trainer_of_media(folder: Path, *, is_compiled: bool) -> FSDP2SFTTrainer:
    """Packs of one to five samples, of which every second has a video and an image."""
    model = build("qwen2_5_vl", attention="sdpa_varlen")
    if not (folder / "data").exists():
        samples = [
            (each["input_ids"].astype(np.int32), np.array([[0, 1]], np.int32)) for each in source_of(model, "both")
        ]
        write_samples(folder / "data", samples)
    world, _ = init_distributed(60.0)
    packing = PackingConfig(packing_length=96)
    dataset = PackedStreamingDataset(folder / "data", processor=Processor(model, "both"), packing=packing, world=world)
    args = TrainConfig(
        output_dir=str(folder / f"compiled-{is_compiled}"), global_batch=1, max_steps=NUM_PACKS_OF_MEDIA,
        num_workers=0, torch_compile=is_compiled, log_sample_ids=True, async_save=False, timeout_s=60.0,
    )  # fmt: skip
    return FSDP2SFTTrainer(model, args, dataset)


def test_the_blocks_of_a_tower_are_not_compiled(tmp_path: Path) -> None:
    trainer = trainer_of_media(tmp_path, is_compiled=False)
    compile_blocks(trainer.model)
    is_compiled = {
        name: module._compiled_call_impl is not None
        for name, module in trainer.model.model.named_modules()
        if type(module).__name__.endswith(("DecoderLayer", "VisionBlock"))
    }
    assert len(is_compiled) == 5
    assert all(found == ("visual" not in name) for name, found in is_compiled.items())


@needs_compiler
@in_long_rounds
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_model_reads_packs_of_any_number_of_media_and_gives_the_same_losses(tmp_path: Path) -> None:
    losses: dict[bool, list[float]] = {}
    for is_compiled in (False, True):
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            trainer = trainer_of_media(tmp_path, is_compiled=is_compiled)
            trainer.build()
            num_proven = counters["stats"]["unique_graphs"]
            trainer.train()
        records = read_log(tmp_path / f"compiled-{is_compiled}" / "train_log.jsonl")
        losses[is_compiled] = [record["loss"] for record in records]
        assert len({sum(number % 2 == 0 for number in record["sample_ids"]) for record in records}) > 1  # have media
    assert len(losses[False]) == NUM_PACKS_OF_MEDIA
    assert losses[True] == pytest.approx(losses[False], rel=1e-4)
    num_graphs = counters["stats"]["unique_graphs"]
    assert 0 < num_proven <= 8
    assert num_graphs - num_proven <= 4, dict(counters["stats"])


@needs_compiler
@in_long_rounds
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("kind", ["texts", "images"])
def test_nothing_is_compiled_again_after_the_first_packs(kind: str, tmp_path: Path) -> None:
    """Packs of texts of any lengths; packs of chats, some with images and videos of any sizes, of a Qwen2.5-VL."""
    if kind == "texts":
        write_tokens(tmp_path / "data", num_samples=400)
        run = write_run(tmp_path / "run.yaml", tmp_path / "data")
    else:
        run = write_vision_run(tmp_path)
    settings = {"torch_compile": "true", "max_steps": NUM_PACKS_IN_ALL, "global_batch": 1, "num_workers": 0}
    settings |= {"log_sample_ids": "true", "save_steps": '"no"', "output_dir": tmp_path / "out"}
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        trainer_of(run, *(f"train.{name}={value}" for name, value in settings.items())).train()
    records = read_log(tmp_path / "out")
    graphs = [record["perf/num_graphs"] for record in records]
    assert len(graphs) == NUM_PACKS_IN_ALL
    assert len({len(record["sample_ids"]) for record in records[NUM_WARM_PACKS:]}) > 2
    assert graphs[NUM_WARM_PACKS - 1] <= MOST_GRAPHS
    assert graphs[-1] == graphs[NUM_WARM_PACKS - 1], graphs


def test_more_graphs_than_packs_explain_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    counters["stats"]["unique_graphs"] = 5
    found = Compilations(tells=True, most=3)
    counters["stats"]["unique_graphs"] = 8
    assert found.figures() == {"perf/num_graphs": 3}
    assert not caplog.records
    for number in (9, 10):
        counters["stats"]["unique_graphs"] = number
        assert found.figures() == {"perf/num_graphs": number - 5}
    (record,) = caplog.records
    assert record.getMessage().startswith("4 graphs were compiled since the steps began, and 3 are expected at most: ")
    assert "set train.torch_compile to false, or train.pad_to" in record.getMessage()


def test_compiled_blocks_run_their_own_forward_methods(tmp_path: Path) -> None:
    """transformers wraps those that took other keywords once by one function, whose graphs torch counts together."""
    trainer = trainer_of_media(tmp_path, is_compiled=False)
    compile_blocks(trainer.model)
    forwards = [
        module.forward.__func__
        for module in trainer.model.model.modules()
        if type(module).__name__.endswith(("VLDecoderLayer", "VLAttention"))
    ]
    assert len(forwards) == 4
    assert {each.__code__.co_filename.rpartition("/")[2] for each in forwards} == {"modeling_qwen2_5_vl.py"}
