"""Imports follow the data: each module may import only what stands before it."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PURE = {
    "order", "packing", "packing_kernels", "bitmap", "first_fit", "measured_block", "pack_range", "plan", "mixture",
    "assign", "assign_kernels", "cursor", "shares", "sample_order", "lanes", "lane_cursor",
}  # fmt: skip
PURE_LIBRARIES = {"numpy", "numba"}

# module (or package) -> what of this project it may import; a package's own modules may import each other
ALLOWED = {
    "errors": set(),
    "types": {"errors"},
    "config": {"errors"},
    "threads": set(),
    "signals": set(),
    "locks": set(),
    "retry": {"errors", "threads"},
    "s3": {"errors", "retry", "types"},
    "figure": {"errors", "retry"},
    "storage": {"errors", "retry", "s3", "types"},
    "decoding": {"errors"},
    "shards": {"errors", "decoding"},
    "lengths": {"errors"},
    "order": {"errors"},
    "shares": {"errors"},
    "sample_order": {"errors", "order"},
    "bitmap": set(),
    "packing_kernels": {"bitmap"},
    "first_fit": set(),
    "packing": {"errors", "first_fit", "packing_kernels"},
    "measured_block": {"errors", "packing"},
    "plan": {"errors", "lengths", "order", "pack_range", "packing"},
    "pack_range": set(),
    "assign_kernels": set(),
    "assign": {"errors", "assign_kernels", "pack_range"},
    "cursor": {"errors"},
    "lanes": {"errors", "order", "packing", "measured_block"},
    "lane_cursor": {"errors", "cursor", "lanes"},
    "room": {"errors", "locks"},
    "tally": set(),
    "worker_counts": {"tally"},
    "worker_start": {"errors", "signals"},
    "cache": {"errors", "decoding", "locks", "retry", "room", "shards", "storage", "tally"},
    "prefetch": {"errors", "retry", "room", "threads"},
    "reader": {"errors", "types", "cache", "order", "prefetch", "shards"},
    "processors": {"errors", "types", "shards"},
    "rows": set(),
    "collate": {"types", "processors", "rows"},
    "streams": {"errors", "cache", "lengths", "prefetch", "processors", "room", "shards", "storage"},
    "epochs": set(),
    "dataset": {
        "errors", "types", "cache", "epochs", "lanes", "lengths", "order", "packing", "plan", "prefetch", "processors",
        "reader", "room", "sample_order", "shards", "shares", "storage", "streams",
    },
    "dataset_config": {"types", "dataset", "order", "packing", "prefetch", "processors"},
    "mixture": {"errors", "cursor", "pack_range", "plan"},
    "batch_maker": {"errors", "types", "collate", "dataset", "processors", "rows"},
    "ahead": {"types", "assign", "dataset", "mixture"},
    "wire": {"types", "collate", "rows"},
    "worker": {
        "errors", "types", "ahead", "assign", "assign_kernels", "batch_maker", "collate", "cursor", "dataset",
        "lane_cursor", "lanes", "mixture", "pack_range", "wire", "worker_counts",
    },
    "place": {
        "errors", "types", "batch_maker", "cursor", "dataset", "lane_cursor", "lanes", "mixture", "plan", "processors",
        "worker",
    },
    "loader": {
        "errors", "types", "assign", "batch_maker", "collate", "cursor", "dataset", "lane_cursor", "lanes", "mixture",
        "place", "processors", "signals", "tally", "wire", "worker", "worker_counts", "worker_start",
    },
    "train": {
        "__version__", "errors", "signals", "types", "assign", "batch_maker", "config", "collate", "dataset",
        "dataset_config", "figure", "loader", "processors", "retry", "storage", "tally",
    },
    "converters": {
        "__version__", "errors", "types", "retry", "storage", "decoding", "shards", "lengths", "locks", "cache",
        "processors",
    },
    "report": {"types", "assign", "figure", "mixture", "order", "pack_range", "plan"},
    "console": {"report"},
    "console_datasets": {"console", "converters"},
    "cli_datasets": {"console", "console_datasets", "converters", "processors"},
    "demo": {"errors", "types", "config", "console", "converters", "mixture", "processors", "report", "train"},
    "cli_convert": {"errors", "console", "converters", "processors", "room"},
    "cli": {
        "__version__", "errors", "types", "cli_convert", "cli_datasets", "console", "converters", "dataset", "demo",
        "figure", "mixture", "order", "packing", "plan", "processors", "report", "train",
    },
    "__main__": {"cli"},
}  # fmt: skip


def files() -> list[tuple[str, Path]]:
    """(module or package, file), once for each file of the distribution."""
    found = [(path.stem, path) for path in (ROOT / "lmms_stream").glob("*.py") if path.stem != "__init__"]
    for package in ("processors", "train", "demo"):
        found += [(package, path) for path in (ROOT / "lmms_stream" / package).glob("*.py")]
    return found + [("converters", path) for path in (ROOT / "converters").glob("*.py")]


def imports(path: Path, *, in_package: bool) -> tuple[set[str], set[str]]:
    """Top names of this project, and of other libraries, that a file imports anywhere."""
    ours, theirs = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            if node.level == (2 if in_package else 1):
                names = [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]
                ours |= set(names)
        elif isinstance(node, ast.ImportFrom):
            theirs.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Import):
            theirs |= {alias.name.split(".")[0] for alias in node.names}
    return ours, theirs


def test_no_import_points_downstream() -> None:
    assert {name for name, _ in files()} == set(ALLOWED)
    for name, path in files():
        ours, theirs = imports(path, in_package=path.parent.name != "lmms_stream")
        assert ours - {name} <= ALLOWED[name], f"{path} imports {ours - ALLOWED[name]}"
        assert "lmms_stream" not in theirs, f"{path}: imports inside the package are relative"


def test_the_pure_modules_import_no_input_or_output() -> None:
    pure = [(name, path) for name, path in files() if name in PURE]
    assert {name for name, _ in pure} == PURE
    for _, path in pure:
        theirs = imports(path, in_package=False)[1]
        assert theirs <= PURE_LIBRARIES | set(sys.stdlib_module_names), f"{path} imports {theirs}"
        assert not theirs & {"pathlib", "io", "time", "random", "socket", "shutil", "tempfile"}, path


def test_only_the_dataset_and_the_writers_touch_mosaicml() -> None:
    users = {
        f"{name}/{path.name}"
        for name, path in files()
        if "streaming" in imports(path, in_package=path.parent.name != "lmms_stream")[1]
    }
    # Encodings, compressions and clouds are the parent's; internals are touched by the dataset alone.
    assert users == {
        "dataset/dataset.py", "converters/encoding.py", "decoding/decoding.py", "storage/storage.py",
    }  # fmt: skip


def test_files_stay_small() -> None:
    for _, path in files():
        assert len(path.read_text().splitlines()) <= 340, path
