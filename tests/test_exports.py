from __future__ import annotations

import ast
import doctest
import importlib

import lmms_stream
import pytest

from .arrows import files
from .forks import Ended, limited, run_forks

pytestmark = limited


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


FIRST = ("FSDP2SFTTrainer", "PackedStreamingDataset", "PackPlan", "convert")
SAME = """
import importlib, pickle, sys
for pair in {pairs}:
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
"""
RUNS = """
import runpy, sys
sys.argv[1:] = ["config_yaml=absent.yaml"]
runpy.run_module("lmms_stream.lmms_engine.launch.cli", run_name="__main__", alter_sys=True)
"""
SCRIPTS = {
    **{f"{name} first": f"from lmms_stream import {name}; assert {name}.__name__ == {name!r}" for name in FIRST},
    "former names first": SAME.format(pairs=list(FORMER.items()), former_first=True) + TYPED,
    "present names first": SAME.format(pairs=list(FORMER.items()), former_first=False) + TYPED,
    "run": RUNS,
    "absent": "import lmms_stream.simulate.absent",
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """The end of each script in a process that has imported libraries and no module of the project."""
    libraries = ("torch._dynamo", "transformers.trainer")
    return run_forks(SCRIPTS, tmp_path_factory.mktemp("scripts"), imports=libraries)


@pytest.mark.parametrize("name", FIRST)
def test_a_public_name_is_the_first_thing_that_can_be_imported(name: str, ends: dict[str, Ended]) -> None:
    end = ends[f"{name} first"]
    assert end.status == 0, end.stderr


@pytest.mark.parametrize("order", ["former names first", "present names first"])
def test_a_module_under_its_former_name_is_the_same_module(order: str, ends: dict[str, Ended]) -> None:
    assert ends[order].status == 0, ends[order].stderr


def test_a_module_runs_under_its_former_name(ends: dict[str, Ended]) -> None:
    assert "absent.yaml" in ends["run"].stderr
    assert "Traceback" not in ends["run"].stderr


def test_an_absent_module_below_a_former_name_is_absent(ends: dict[str, Ended]) -> None:
    assert "No module named 'lmms_stream.simulate.absent'" in ends["absent"].stderr
