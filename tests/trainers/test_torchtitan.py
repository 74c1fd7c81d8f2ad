"""torchtitan's dataloader on packs, and torchdata's contract; `make test-torchtitan` installs both packages."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from lmms_stream import PackedLoader, PackedStreamingDataset, PackingConfig, TokensProcessor, World
from lmms_stream.errors import ConfigError

from tests.conftest import write_tokens
from tests.docs.pages import DOCS, Page
from tests.docs.test_pages import run

SEQ_LEN, GLOBAL_BATCH = 256, 4
with_torchtitan = pytest.mark.skipif(find_spec("torchtitan") is None, reason="make test-torchtitan installs torchtitan")
with_torchdata = pytest.mark.skipif(find_spec("torchdata") is None, reason="make test-torchtitan installs torchdata")
AS_TORCHTITAN = """
import json
from torchtitan.config import ConfigManager

config = ConfigManager().parse_args(["--module", "packed", "--config", "llama3_8b_packed"])
json.dumps(config.to_dict())
settings = config.training
loader = config.dataloader.build(
    dp_world_size=8, dp_rank=3, tokenizer=config.tokenizer.build(tokenizer_path=config.hf_assets_path),
    seq_len=settings.seq_len, local_batch_size=settings.local_batch_size,
    snapshot_every_n_steps=config.checkpoint.interval * settings.global_batch_size // (8 * settings.local_batch_size),
)
inputs, labels = next(iter(loader))
print([*inputs], *inputs["input"].shape, *labels.shape, loader.loader.global_batch == settings.global_batch_size)
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torchtitan") / "data"
    write_tokens(folder, num_samples=480)
    return folder


def open_dataset(data: Path, packing_length: int = SEQ_LEN, **options: Any) -> PackedStreamingDataset:
    packing = PackingConfig(packing_length=packing_length)
    return PackedStreamingDataset(data, processor=TokensProcessor(), packing=packing, **options)


def build(
    open_loader: Any,
    *,
    global_batch_size: int = GLOBAL_BATCH,
    local_batch_size: int = 2,
    ranks: int = 1,
    dp_rank: int | None = None,
    snapshot_every_n_steps: int | None = None,
) -> Any:
    """The dataloader, as torchtitan's Trainer makes it, of the last rank if none is named."""
    from lmms_stream.doors.torchtitan import PackedDataLoader

    return PackedDataLoader.Config(open_loader=open_loader, global_batch_size=global_batch_size).build(
        dp_world_size=ranks,
        dp_rank=ranks - 1 if dp_rank is None else dp_rank,
        tokenizer=None,
        seq_len=SEQ_LEN,
        local_batch_size=local_batch_size,
        snapshot_every_n_steps=snapshot_every_n_steps,
    )


@pytest.mark.skipif(find_spec("torchtitan") is not None, reason="torchtitan is installed")
def test_without_torchtitan_the_error_names_the_command_that_installs_it() -> None:
    with pytest.raises(
        ConfigError, match=r"need torchtitan, which is missing .*: pip install 'lmms-stream\[torchtitan\]'"
    ):
        import lmms_stream.doors.torchtitan  # noqa: F401


@with_torchtitan
def test_items_are_packs_with_positions_that_separate_samples_and_labels_of_the_next_token(data: Path) -> None:
    from torchtitan.models.common.attention import create_varlen_metadata_for_document

    packs = list(PackedLoader(open_dataset(data), global_batch=GLOBAL_BATCH, pad_to=SEQ_LEN))
    items = iter(build(lambda **options: PackedLoader(open_dataset(data), **options)))
    for first, second in zip(packs[::2], packs[1::2], strict=True):
        inputs, labels = next(items)
        assert torch.equal(inputs["input"], torch.cat([first.input_ids, second.input_ids]))
        assert labels.shape == inputs["positions"].shape == (2, SEQ_LEN)
        for row, pack in enumerate((first, second)):
            assert torch.equal(labels[row, :-1], pack.labels[0, 1:])
            assert (labels[row] != -100).sum() == pack.num_loss_tokens
            starts = create_varlen_metadata_for_document(inputs["positions"][row : row + 1]).cu_seq_q
            assert starts.tolist() == pack.cu_seqlens.tolist()  # padding, too, is a document
    assert next(items)[0]["input"].shape == (2, SEQ_LEN)  # of the next epoch


@with_torchtitan
def test_each_key_that_torchtitan_passes_has_an_effect_in_the_page(data: Path) -> None:
    import torchtitan.trainer
    from lmms_stream.doors.torchtitan import PASSED, PackedDataLoader

    source = ast.parse(Path(torchtitan.trainer.__file__).read_text())
    calls = [each for each in ast.walk(source) if isinstance(each, ast.Call)]
    passed = next(each for each in calls if ast.unparse(each.func) == "config.dataloader.build").keywords
    read = {*inspect.signature(PackedDataLoader.__init__).parameters} - {"self", "config", "others"}
    assert {str(each.arg) for each in passed} == read | {*PASSED}
    fields = {each.name for each in dataclasses.fields(PackedDataLoader.Config)}
    page = (DOCS / "other_trainers.md").read_text()
    for name in read | fields | {*PASSED}:
        assert re.search(rf"^\| `{name}` \| (honoured|moot|refused)", page, re.M), name

    def never(**_: Any) -> PackedLoader:
        raise AssertionError

    config = PackedDataLoader.Config(open_loader=never, dataset="c4")
    for others in ({}, {"infinite": True}):
        with pytest.raises(ConfigError, match=r"does not read dataset: leave it out, and name data in open_loader"):
            config.build(dp_world_size=1, dp_rank=0, tokenizer=None, seq_len=1, local_batch_size=1, **others)


@with_torchtitan
def test_ranks_share_a_step_and_have_one_state(data: Path) -> None:
    def open_loader(**options: Any) -> PackedLoader:
        return PackedLoader(open_dataset(data), **options)

    whole = build(open_loader)
    rank = build(open_loader, local_batch_size=1, ranks=2)
    assert rank.loader.world == World(rank=1, world_size=2)
    passes = iter(rank)
    next(passes)
    with pytest.raises(
        ConfigError, match=r"after 1 passes, within a step of 4 packs, .*: set it to the value of training\.g"
    ):
        rank.state_dict()
    next(passes)
    items = iter(whole)
    next(items), next(items)
    assert rank.state_dict() == whole.state_dict()
    whole.load_state_dict(build(open_loader).state_dict())
    assert whole.loader.step == 0
    assert build(open_loader, global_batch_size=-1).loader.global_batch == 2


@with_torchtitan
@pytest.mark.parametrize(
    ("dp_rank", "world"),
    [(2, World(rank=5, world_size=8, num_nodes=2, replication=2)), (1, World(rank=1, world_size=4))],
    ids=["tensor parallel", "pipeline"],
)
def test_ranks_of_one_replica_read_the_same_packs(
    dp_rank: int, world: World, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4, "GROUP_RANK": 1}.items():
        monkeypatch.setenv(name, str(value))
    built = build(
        lambda **options: PackedLoader(open_dataset(data), **options), ranks=4, dp_rank=dp_rank, global_batch_size=8
    )
    assert built.loader.world == world
    assert built.loader.micro_batches == 2


@with_torchtitan
def test_settings_that_would_train_on_other_packs_are_refused(data: Path) -> None:
    def check(open_loader: Callable[..., PackedLoader] | None, **settings: Any) -> str:
        with pytest.raises(ConfigError) as raised:
            next(iter(build(open_loader, **settings)))
        return str(raised.value)

    def with_packs(packing_length: int, **changes: Any) -> Callable[..., PackedLoader]:
        return lambda **options: PackedLoader(open_dataset(data, packing_length), **options | changes)

    assert "packing_length 512 of source 'data' is not training.seq_len 256: set both" in check(with_packs(512))
    assert "global_batch_size 6 is not a multiple of local_batch_size 2 times 2 data-parallel ranks: choose a" in check(
        with_packs(SEQ_LEN), global_batch_size=6, ranks=2
    )
    assert "has pad_to None, and torchtitan's settings need 256: return PackedLoader(dataset, **options)" in check(
        with_packs(SEQ_LEN, pad_to=None)
    )
    assert "has global_batch 8, and torchtitan's settings need 4" in check(with_packs(SEQ_LEN, global_batch=8))
    assert "torchtitan saves after 501 passes, within a step of 4 packs" in check(
        with_packs(SEQ_LEN), snapshot_every_n_steps=501
    )
    assert "has no function that opens a PackedLoader: set open_loader" in check(None)
    lanes = open_dataset(data, packing_mode="lanes")
    assert "packs of lanes have a state on each rank" in check(lambda **options: PackedLoader(lanes, **options))


@with_torchtitan
@pytest.mark.timeout(600)
def test_the_pages_config_gives_torchtitan_its_packs(tmp_path: Path) -> None:
    page = Page(DOCS / "other_trainers.md")
    (tmp_path / "examples").symlink_to(DOCS.parent / "examples")
    for command in page.setup:
        run(command, tmp_path)
    assets = tmp_path / "assets/hf/Llama-3.1-8B"
    assets.mkdir(parents=True)
    shutil.copy(tmp_path / "build/tokenizer/tokenizer.json", assets)
    (block,) = (block for block in page.blocks if block.title == "packed.py")
    (tmp_path / "packed.py").write_text(block.text)
    done = subprocess.run(
        [sys.executable, "-c", AS_TORCHTITAN], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.stdout == "['input', 'positions'] 1 1024 1 1024 True\n", done.stderr


# torchdata's StatefulDataLoader, and programs written for it.

of_torchdata = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # called by torchdata 0.11


def ids_of(item: Any) -> list[list[int]]:
    """The samples of an item: of torchdata's loader, of ours, or of a step."""
    if isinstance(item, list):
        return item
    batches: Iterable[Any] = getattr(item, "batches", [item])
    return [batch.sample_ids.tolist() for batch in batches]


@with_torchdata
@of_torchdata
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["StatefulDataLoader", "PackedLoader", "steps"])
def test_a_program_for_torchdatas_loader_runs_on_ours(kind: str, num_workers: int, data: Path) -> None:
    from torchdata.stateful_dataloader import Stateful, StatefulDataLoader

    packs = PackedLoader(open_dataset(data), global_batch=GLOBAL_BATCH)
    expected = [[pack.sample_ids.tolist()] for pack in packs]
    if kind == "steps":
        expected = [[*chain(*expected[at : at + GLOBAL_BATCH])] for at in range(0, len(expected), GLOBAL_BATCH)]

    def open_loader() -> Any:
        if kind == "StatefulDataLoader":
            return StatefulDataLoader(expected, batch_size=None, num_workers=num_workers)
        loader = PackedLoader(open_dataset(data), global_batch=GLOBAL_BATCH, num_workers=num_workers)
        return loader if kind == "PackedLoader" else loader.steps(until=len(expected))

    loader = open_loader()
    assert isinstance(loader, Stateful)
    assert len(loader) == len(expected)
    begin = loader.state_dict()
    items, read = iter(loader), []
    for stop in (4, 8):
        read += [ids_of(next(items)) for _ in range(4)]
        again = open_loader()
        again.load_state_dict(loader.state_dict())
        assert read == expected[:stop]
        assert [*read, *map(ids_of, again)] == expected
    assert [*read, *map(ids_of, items)] == expected  # a state changes nothing
    again = open_loader()
    again.load_state_dict(begin)
    assert [*map(ids_of, again)] == expected
    if kind != "steps":  # whose iteration is the whole run
        assert len([*again]) == len(expected)
        other = open_loader()
        other.load_state_dict(again.state_dict())  # of the end of an epoch
        assert len([*other]) == len(expected)


@with_torchdata
@of_torchdata
def test_ours_continues_where_torchdatas_loader_begins_again(data: Path) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    ours: Any = PackedLoader(open_dataset(data), global_batch=GLOBAL_BATCH)
    num_packs = len(ours)
    theirs = StatefulDataLoader([*range(num_packs)], batch_size=None)
    for loader in (ours, theirs):
        items = iter(loader)
        for _ in range(GLOBAL_BATCH + 1):
            next(items)
    state, within = ours.state_dict(), theirs.state_dict()
    assert len(ours) == len([*ours]) == num_packs - GLOBAL_BATCH  # the rest, from the beginning of the step on
    assert len(theirs) == len([*theirs]) == num_packs
    ours.load_state_dict(state)
    theirs.load_state_dict(within)
    assert [len([*ours]), len([*theirs])] == [num_packs - GLOBAL_BATCH, num_packs - GLOBAL_BATCH - 1]
