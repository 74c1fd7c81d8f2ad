"""Programs written for MosaicML Streaming run with the import changed and nothing else; in long rounds beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from streaming import MDSWriter

from ..conftest import last_words
from ..jobs.launcher import run_job
from ..processes import run_module
from ..rounds import LONG

PROGRAMS = Path(__file__).parent / "programs"
NUM_TEXTS = 33
TRIES = 3  # another program may take the name that MosaicML's class was about to take


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders "text", "more" and "images"."""
    root = tmp_path_factory.mktemp("programs")
    for name in ("text", "more"):
        with MDSWriter(columns={"text": "str"}, out=str(root / name), size_limit=300) as writer:
            for number in range(NUM_TEXTS):
                writer.write({"text": f"{name} {number}" + " and more" * (number % 5)})
    rng = np.random.default_rng(0)
    with MDSWriter(columns={"image": "png", "label": "int"}, out=str(root / "images"), size_limit=2000) as writer:
        for label in range(NUM_TEXTS):
            writer.write({"image": Image.fromarray(rng.integers(0, 255, (9, 11, 3), np.uint8)), "label": label})
    return root


def prepare(program: str, data: Path, folder: Path, *, ours: bool) -> list[str]:
    """The arguments of run_program for a program as it is, or with the import changed, in a folder with the data."""
    folder.mkdir()
    text = (PROGRAMS / f"{program}.py").read_text()
    assert text.count("from streaming import") == 1
    path = folder / f"{program}.py"
    path.write_text(text.replace("from streaming import", "from lmms_stream import") if ours else text)
    for each in data.iterdir():
        (folder / each.name).symlink_to(each)
    return [str(path), str(folder)]


@pytest.mark.timeout(250)
@pytest.mark.parametrize("program", ["resumption", "text", "images", "mixing", "foundry"])
def test_a_program_says_the_same_with_the_import_changed(program: str, data: Path, tmp_path: Path) -> None:
    said = []
    for ours in (False, True)[0 if LONG else 1 :]:
        arguments = prepare(program, data, tmp_path / str(ours), ours=ours)
        for _ in range(1 if ours else TRIES):
            done = run_module("tests.mds.run_program", *arguments, timeout_s=60)
            if "FileExistsError" not in done.stderr:
                break
        assert done.returncode == 0, last_words(done.stderr)
        said.append(done.stdout)
    assert said[-1] == said[0]
    assert len(said[-1].splitlines()) > 10


@pytest.mark.timeout(200)
def test_a_program_of_two_ranks_trains_the_same_with_the_import_changed(data: Path, tmp_path: Path) -> None:
    said = []
    for ours in (False, True)[
        0 if LONG else 1 :
    ]:  # in short rounds ours alone: equally many steps on both ranks, or they would wait for ever
        folder = tmp_path / str(ours)
        done = run_job(2, "tests.mds.run_program", *prepare("ddp", data, folder, ours=ours), timeout_s=90)
        assert done.returncode == 0, last_words(done.stderr)
        said.append([(folder / f"rank-{rank}.txt").read_text() for rank in range(2)])
    assert said[-1] == said[0]
    assert all(len(lines.splitlines()) == 2 * (5 + 1) for lines in said[-1])
