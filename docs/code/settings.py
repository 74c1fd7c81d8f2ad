"""Every setting of a run's YAML file, from the code: `python docs/code/settings.py > docs/settings.md`.

What a setting is stands beside its field as a comment; a comment below an empty line that begins with a capital is the
heading of those that follow.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

from lmms_stream.mds.dataset_config import DatasetConfig
from lmms_stream.processors import ProcessorConfig
from lmms_stream.storage.fetch_config import FetchConfig
from lmms_stream.train.model.build import ModelConfig
from lmms_stream.train.run.settings import (
    AlertsConfig,
    BadSamplesConfig,
    BestConfig,
    FsdpConfig,
    TrainConfig,
)

HEAD = """# Settings of a run

A run is one YAML file with the sections `dataset` (or `datasets`, by name), `model`, `train`, and where they are wanted
`eval_dataset` and `task`. Any of them is set on the command line, too: `lmms-stream train run.yaml train.max_steps=20`.
A key that is not in a table is an error that names the nearest one. This page is made from the code.

Numbers are those of YAML 1.2, and so of JSON: `1e-5` and `1E3` are numbers, `010` is 10, `0o17` is 15; `1_000` is 1000,
too. `yes`, `no`, `on` and `off` are truth values, as in YAML 1.1. Dates and times are text. A text that looks like a
number is written in quotes: `revision: "1e5"`. Lists of sources are read by the same rules.

A `dataset` with a `dataset_type` is made of sources and has the settings of
[LMMS Engine's `DatasetConfig`](datasets.md) besides.
"""
SECTIONS = {
    "model": (ModelConfig, "What is trained."),
    "train": (TrainConfig, "How it is trained."),
    "train.bad_samples": (BadSamplesConfig, "Samples that are left out; more in [left_out](left_out.md)."),
    "train.fsdp": (FsdpConfig, "How the model is sharded; more in [speed](speed.md)."),
    "train.best": (BestConfig, "Which evaluation is the best, and what becomes of its checkpoint."),
    "train.alerts": (AlertsConfig, "What the log warns of; more in [watching](watching.md)."),
    "dataset": (DatasetConfig, "Shards, and how they become packs; of sources see [datasets](datasets.md)."),
    "dataset.processor": (ProcessorConfig, "What makes tokens of samples; more in [processors](processors.md)."),
    "dataset.fetch": (FetchConfig, "How shards come to a node."),
}


@dataclass(frozen=True)
class Setting:
    name: str
    kind: str
    default: str
    text: str


def markdown() -> str:
    """The page."""
    parts = [HEAD]
    for section, (config, what) in SECTIONS.items():
        parts.append(f"## {section}\n\n{what}\n")
        for group, settings in grouped(config):
            if group:
                parts.append(f"### {group}\n")
            parts.append("| setting | default | what it is |\n|---|---|---|")
            parts += [f"| `{each.name}` | {each.default} | {each.text} |" for each in settings]
            parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def grouped(config: type[Any]) -> Iterator[tuple[str, list[Setting]]]:
    """The settings of a dataclass, by the headings between its fields, in their order."""
    groups: dict[str, list[Setting]] = {}
    documented = {name: entry for each in config.__mro__[:-1] for name, entry in _documented(each).items()}
    for each in sorted(fields(config), key=lambda field: list(documented).index(field.name)):
        heading, kind, text = documented[each.name]
        if not text:
            raise SystemExit(f"{config.__name__}.{each.name} has no words beside it: say what the setting is")
        groups.setdefault(heading, []).append(Setting(each.name, kind, _default(each), text))
    yield from groups.items()


def _documented(config: type[Any]) -> dict[str, tuple[str, str, str]]:
    """Of the fields that a class itself has: the heading above, the type, and what is said of it."""
    source = textwrap.dedent(inspect.getsource(config))
    lines = source.splitlines()
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    found, heading = {}, ""
    for node in body.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        first = node.lineno - 1
        above = []
        while lines[first - 1].lstrip().startswith("#"):
            first -= 1
            above.insert(0, lines[first].lstrip(" #"))
        if above and above[0][:1].isupper() and not lines[first - 1].strip() and not above[0].endswith("."):
            heading = above.pop(0)
        assert node.end_lineno is not None
        beside = lines[node.end_lineno - 1].partition("  # ")[2]
        text = " ".join([*above, beside]).strip()
        found[node.target.id] = heading, ast.unparse(node.annotation), _cell(text)
    return found


def _default(field: Field[Any]) -> str:
    if field.default is MISSING and field.default_factory is MISSING:
        return "needed"
    value = field.default if field.default is not MISSING else field.default_factory()  # type: ignore[misc]
    return "" if value is None else f"`{value!r}`".replace("True", "true").replace("False", "false")


def _cell(text: str) -> str:
    """Words for a cell of a table."""
    return re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", text.replace("|", "\\|"))


if __name__ == "__main__":
    sys.stdout.write(markdown())
