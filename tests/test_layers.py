"""Imports follow the data: each room (see arrows.py) may import only from those above it."""

from __future__ import annotations

import sys

from .arrows import arrows, circles, files, imports, reached_from, room_of

PURE_ROOMS = ("plan", "plan/kernels")
PURE_LIBRARIES = {"cython", "numpy"}
STARTED = ("__main__", "run_config", "trainer")  # modules that a run imports first
LIBRARIES_OF_A_START = {
    "cython", "huggingface_hub", "jinja2", "numpy", "orjson", "rich", "safetensors", "torch", "transformers", "xxhash",
    "yaml",
}  # fmt: skip
BASE = {"checks", "errors", "extras", "registry", "types"}

# room -> the rooms that it may import from; a room's own files may import each other, but not in circles
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "extras": {"errors"},
    "registry": {"errors"},
    "version": set(),
    "versions": set(),
    "checks": {"errors"},
    "types": {"checks", "errors"},
    "yaml_text": {"errors"},
    "config": {"checks", "errors", "yaml_text"},
    "signals": set(),
    "lazy": set(),
    "freed_memory": set(),
    "plan/kernels": set(),
    "plan": {*BASE, "freed_memory", "plan/kernels"},
    "storage": BASE,
    "processors/media": {*BASE, "versions"},
    "processors/families": {*BASE, "versions", "processors/media"},
    "processors": {*BASE, "config", "version", "versions", "processors/media", "processors/families"},
    "processes": {"errors", "registry", "signals", "processors"},
    "mds": {*BASE, "config", "plan", "storage", "processors", "processes"},
    "converters/rows": {*BASE, "storage", "processors", "processors/media", "processes", "converters/sources"},
    "converters/sources": {*BASE, "yaml_text", "storage", "processors", "processors/media", "mds"},
    "converters/stored": {
        *BASE, "version", "storage", "processors", "processors/media", "processes", "mds", "converters/rows",
    },
    "converters/writing": {
        *BASE, "storage", "processors", "processes", "mds", "converters/rows", "converters/sources",
        "converters/stored",
    },
    "converters/exporting": {
        *BASE, "storage", "processors/media", "mds", "converters/rows", "converters/sources", "converters/stored",
    },
    "converters": {
        *BASE, "version", "config", "yaml_text", "lazy", "storage", "processors", "processes", "mds",
        "converters/rows", "converters/sources", "converters/stored",
        "converters/writing",
    },
    "loader": {*BASE, "version", "signals", "plan", "plan/kernels", "storage", "processes", "processors", "mds"},
    "doors": {
        "errors", "extras", "types", "storage", "mds", "processors", "loader", "converters/rows", "converters/sources",
    },
    "train/run": {"config", "loader", *BASE, "mds"},
    "train/model": {
        *BASE, "versions", "freed_memory", "processors", "processors/families", "processes", "loader", "train/run",
    },
    "train/tasks": {*BASE, "storage", "processors", "loader", "train/run", "train/model"},
    "train/checkpoint": {
        *BASE, "config", "version", "versions", "freed_memory", "storage", "mds", "train/run", "train/model",
    },
    "train/report": {*BASE, "extras", "signals", "plan", "storage", "processes", "loader", "train/run", "train/model"},
    "train": {
        *BASE, "config", "lazy", "signals", "processes", "processors", "mds", "loader", "train/run", "train/model",
        "train/tasks", "train/checkpoint", "train/report",
    },
    "doors/huggingface": {
        *BASE, "versions", "config", "plan", "storage", "processors", "mds", "loader", "converters", "converters/rows",
        "converters/stored", "converters/exporting", "train/run", "train/model", "train/checkpoint", "train/tasks",
        "train", "doors/lmms_engine/datasets",
    },
    "doors/lmms_engine": {
        "errors", "types", "processes", "processors", "processors/media", "doors/huggingface",
        "doors/lmms_engine/datasets", "doors/lmms_engine/launch",
    },
    "doors/lmms_engine/datasets": {
        *BASE, "config", "yaml_text", "lazy", "plan", "storage", "processes", "processors", "processors/families",
        "processors/media", "mds", "converters", "converters/rows", "converters/sources", "loader", "train/run",
        "doors/huggingface",
    },
    "doors/lmms_engine/launch": {
        *BASE, "versions", "config", "mds", "processes", "processors", "train", "train/run", "train/model",
        "train/report",
        "train/tasks", "doors/huggingface", "doors/lmms_engine", "doors/lmms_engine/datasets",
    },
    "doors/trl": {"errors", "extras", "lazy", "train/tasks", "doors/huggingface"},
    "doors/relax": {
        *BASE, "lazy", "storage", "processors", "processors/families", "processors/media", "mds",
        "converters/rows", "converters/sources",
    },
    "doors/relax/utils": {"doors/relax"},
    "doors/relax/utils/data": {"errors", "doors/relax", "doors/relax/utils"},
    "doors/relax/utils/multimodal": {"doors/relax"},
    "doors/relax/engine": set(),
    "doors/relax/engine/rollout": {"doors/relax"},
    "cli": {
        *BASE, "config", "version", "signals", "plan", "storage", "processes", "processors", "mds", "converters",
        "converters/rows", "converters/exporting", "converters/stored", "loader", "train", "train/run",
        "train/checkpoint", "train/report",
    },
    "__main__": {"cli"},
    "plugins": set(),
    "plugins/families": {*BASE, "versions", "processors/media", "processors/families"},
    "plugins/tasks": {
        *BASE, "processors", "loader", "train/run", "train/model", "train/tasks",
    },
    "plugins/parallel": {"errors", "versions", "train/run", "train/model"},
    "plugins/peers": {*BASE, "storage", "mds"},
    "plugins/stores": {*BASE, "storage"},
    "plugins/engines": {"errors", "version", "storage", "processes"},
    "tools": set(),
    "tools/inspect": {"errors", "storage", "processors", "mds", "converters/stored", "cli"},
    "tools/audit": {
        *BASE, "config", "plan", "storage", "processes", "processors", "mds", "converters/stored", "train", "cli",
        "tools/inspect", "tools/ledger", "tools/plan", "versions",
    },
    "tools/profile": {*BASE, "processes", "loader", "train/run", "train/report", "train", "cli"},
    "tools/watch": {
        "errors", "config", "storage", "mds", "train/checkpoint", "train/report", "cli", "tools/inspect",
    },
    "tools/ledger": {
        *BASE, "config", "plan", "storage", "mds", "loader", "train", "train/run",
        "train/checkpoint", "train/report", "cli", "tools/inspect", "doors/lmms_engine/launch",
    },
    "tools/plan": {
        *BASE, "config", "plan", "processors", "mds", "converters/stored", "loader",
        "train/run", "train/checkpoint", "cli", "tools/ledger",
    },
    "tools/simulate": {
        *BASE, "versions", "config", "lazy", "plan", "plan/kernels", "storage", "processors", "mds",
        "cli", "tools/ledger", "tools/plan",
    },
    "tools/demo": {
        *BASE, "versions", "config", "yaml_text", "plan", "processors", "mds", "converters", "cli", "train",
        "train/report", "tools/plan",
    },
}  # fmt: skip


def test_no_import_points_downstream() -> None:
    assert {room_of(module) for module in files()} == {*ALLOWED, "__init__"}
    for room, other in arrows():
        assert room == "__init__" or other in ALLOWED[room], f"{room} imports from {other}"


def test_the_core_imports_no_door_tool_or_plugin() -> None:
    around = ("doors", "tools", "plugins")
    for room, other in arrows():
        names_them = room.startswith(around) or room == "__init__"  # which has the public names of all
        assert names_them or not other.startswith(around), f"{room} imports from {other}"


def test_converters_reach_neither_the_order_of_samples_nor_the_loader() -> None:
    reached = {other for name in files() if name.startswith("lmms_stream.converters") for other in reached_from(name)}
    assert len(reached) > 50
    others = ("lmms_stream.plan", "lmms_stream.loader", "lmms_stream.train")
    assert [name for name in sorted(reached) if name.startswith(others)] == ["lmms_stream.plan.lengths"]


def test_no_files_import_each_other() -> None:
    assert circles() == []


def test_imports_inside_the_package_are_relative() -> None:
    for module in files():
        assert "lmms_stream" not in imports(module)[1], module


def test_the_arithmetic_of_plans_imports_no_input_or_output() -> None:
    pure = [module for module in files() if room_of(module) in PURE_ROOMS]
    assert len(pure) > 15
    for module in pure:
        theirs = imports(module)[1]
        assert theirs <= PURE_LIBRARIES | set(sys.stdlib_module_names), f"{module} imports {theirs}"
        assert not theirs & {"pathlib", "io", "time", "random", "socket", "shutil", "tempfile"}, module


def test_a_run_starts_with_few_libraries() -> None:
    started = set.union(*(reached_from(f"lmms_stream.train.{name}", at_start=True) for name in STARTED))
    assert len(started) > 150
    theirs = frozenset.union(*(imports(module, at_start=True)[1] for module in started))
    assert theirs - set(sys.stdlib_module_names) == LIBRARIES_OF_A_START


def test_few_modules_touch_mosaicmls_package() -> None:
    users = {module.removeprefix("lmms_stream.") for module in files() if "streaming" in imports(module)[1]}
    # The door; where a program has imported it: its streams, encodings and readers; and other clouds.
    assert users == {
        "doors.mosaicml", "mds.mosaic_shards", "mds.mosaic_streams", "mds.hooked_streams", "mds.decoding",
        "converters.writing.encoding", "plugins.stores.clouds",
    }  # fmt: skip


def test_a_single_module_reads_and_writes_yaml() -> None:
    assert [module for module in files() if "yaml" in imports(module)[1]] == ["lmms_stream.yaml_text"]


def test_files_stay_small() -> None:
    for module, path in files().items():
        assert len(path.read_text().splitlines()) <= 600, module
