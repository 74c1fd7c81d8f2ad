from __future__ import annotations

import ast
import doctest
import importlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import lmms_stream
import pytest

from .arrows import files

ROOT = Path(__file__).parent.parent


def test_every_public_name_is_imported_from_its_home() -> None:
    assert len(set(lmms_stream.__all__)) == len(lmms_stream.__all__)
    for name in lmms_stream.__all__:
        value = getattr(lmms_stream, name)
        assert name == "__version__" or value.__name__ == name
    assert dir(lmms_stream) == sorted(lmms_stream.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Smell'"):
        _ = lmms_stream.Smell


LAZY = [module for module, path in files().items() if "\n_HOME = {" in path.read_text()]


@pytest.mark.parametrize("module", LAZY)
def test_what_type_checkers_see_is_what_is_exported(module: str) -> None:
    tree = ast.parse(files()[module].read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    homes: dict[str, str] = importlib.import_module(module)._HOME
    if module == "lmms_stream.train":  # the core imports no door
        homes = {name: home for name, home in homes.items() if name != "FSDP2SFTTrainer"}
    assert seen == homes


def test_public_classes_and_functions_have_docstrings() -> None:
    for name in lmms_stream.__all__:
        value = getattr(lmms_stream, name)
        if not isinstance(value, str):
            assert value.__doc__, name
            assert not value.__doc__.startswith(f"{name}("), f"{name} has a dataclass's default docstring"


def test_a_public_name_is_the_first_thing_that_can_be_imported() -> None:
    names = ("FSDP2SFTTrainer", "PackedStreamingDataset", "PackPlan", "convert")
    run_in_forks([f"from lmms_stream import {name}; assert {name}.__name__ == {name!r}" for name in names])


def test_examples_of_docstrings_print_what_they_say() -> None:
    """All of them: the names in them change like any other."""
    results = [
        doctest.testmod(importlib.import_module(module), optionflags=doctest.NORMALIZE_WHITESPACE)
        for module, path in files().items()
        if ">>> " in path.read_text()
    ]
    assert sum(result.attempted for result in results) > 100
    assert sum(result.failed for result in results) == 0


FORMER = {
    "lmms_engine.launch.cli": "doors.lmms_engine.launch.cli",
    "relax.utils.data.data": "doors.relax.utils.data.data",
    "trl": "doors.trl",
    "datasets": "doors.lmms_engine.datasets",
    "datasets.names": "doors.lmms_engine.datasets.names",
    "datasets.multimodal": "doors.lmms_engine.datasets.naive",
    "rl": "doors.relax",
    "rl.sample": "doors.relax.sample",
    "converters.stored.inspect.summary": "tools.inspect.summary",
    "mds.peers": "plugins.peers.nodes",
    "simulate": "tools.simulate",
    "simulate.cluster": "tools.simulate.cluster",
    "ledger.run": "tools.ledger.run",
    "watch.source": "tools.watch.source",
    "demo.corpus": "tools.demo.corpus",
    "train.tasks.dft": "plugins.tasks.dft",
    "train.tasks.flow_matching": "plugins.tasks.flow_matching",
    "plugins.tasks.sampling": "plugins.tasks.flow_matching",
    "plan.pack_range": "plan.packing",
    "converters.engines.engine": "processes.engine",
    "train.habits.table": "doors.huggingface.table",
    "datasets.table": "doors.lmms_engine.datasets.table",
}
# Statements of the pages and examples of the release before, from modules that have other names now.
TYPED = """
from lmms_stream.datasets import DatasetConfig, MultiModalDataset
from lmms_stream.demo.charts import write_charts
from lmms_stream.demo.corpus import build_corpus, train_tokenizer
from lmms_stream.demo.tiny_vlm import model_fields, save_processor
from lmms_stream.ledger.run import Ledger
from lmms_stream.processors.blocks import visible
from lmms_stream.rl import RolloutDataSourceWithBuffer, Sample, add_data_arguments
from lmms_stream.simulate import Cluster, DescribedSource, describe, simulate
from lmms_stream.train.model.block_attention import BlockLayout, attend
from lmms_stream.train.tasks.bagel import Bagel
from lmms_stream.train.tasks.bagel_model import BlockInputs, BlockOutput
from lmms_stream.train.tasks.dft import DynamicFineTuning
from lmms_stream.train.tasks.dpo import DPO
from lmms_stream.train.tasks.flow_matching import FlowMatching
from lmms_stream.train.tasks.reconstruction import Reconstruction
from lmms_stream.train.tasks.sampling import sample_images
from lmms_stream.train.tasks.terms import L1, Adversary, HingeGAN, Perceptual
"""


def test_a_module_under_its_former_name_is_the_same_module() -> None:
    run_in_forks([
        f"""
import importlib, pickle, sys
for pair in {list(FORMER.items())}:
    first, second = pair if {former_first} else reversed(pair)
    first = importlib.import_module("lmms_stream." + first)
    assert importlib.import_module("lmms_stream." + second) is first, pair
    assert first.__name__ == first.__spec__.name == "lmms_stream." + pair[1], pair
import lmms_stream.simulate
from lmms_stream.simulate import Cluster
assert all(hasattr(lmms_stream.simulate, name) for name in lmms_stream.simulate.__all__)
assert lmms_stream.simulate.Cluster is Cluster is pickle.loads(pickle.dumps(Cluster))
homes = [module for name, module in sys.modules.items() if name.endswith("simulate.cluster")]
assert all(home is homes[0] for home in homes)
{TYPED}"""
        for former_first in (True, False)
    ])  # fmt: skip


def test_a_module_runs_under_its_former_name() -> None:
    command = [sys.executable, "-m", "lmms_stream.lmms_engine.launch.cli", "config_yaml=absent.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "absent.yaml" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_absent_module_below_a_former_name_is_absent() -> None:
    script = "import lmms_stream.simulate.absent"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert "No module named 'lmms_stream.simulate.absent'" in done.stderr


def run_in_forks(scripts: Sequence[str]) -> None:
    """Run each script in a fork of one interpreter, which has imported torch and no module of the project."""
    program = f"""
import os, torch
for script in {list(scripts)}:
    if not (child := os.fork()):
        exec(script, {{}})
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, script
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240)
