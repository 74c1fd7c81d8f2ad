"""A list whose entries have weights -> a dataset for each entry, and the weights in a run's YAML.

Weights are shares of the training tokens. Training mixes separate datasets: in one dataset the entries could not be
told apart, and their weights could not change later.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..errors import ConfigError
from ..processors.not_shown import added
from ..storage.failures import disk_errors
from ..storage.local import LocalStorage
from ..storage.storage import open_storage
from ..yaml_text import write_yaml
from .options import ConvertOptions
from .report import ConvertReport, SplitReport
from .sources.lists import is_list, yaml_specs
from .sources.specs import Spec, glob_base, has_wildcard, parse_spec
from .stored.row_counts import RowCounts, joined_unread

RUN_NAME = "datasets.yaml"


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightedEntry:
    """An entry with a weight. name: of the entry's dataset below the target, unique among the entries."""

    name: str
    spec: Spec
    weight: float


def weighted_parts(sources: object, options: ConvertOptions) -> list[WeightedEntry]:
    """Return the entries of the list that is the only source, if they have weights; [] otherwise.

    ConfigError if weights are combined with splits, a drop list or a limit for all sources.
    """
    named = [sources] if isinstance(sources, str | Path) else sources
    if not isinstance(named, Sequence) or len(named) != 1 or not isinstance(named[0], str | Path):
        return []
    spec = parse_spec(str(named[0]), format=options.format)
    if not is_list(spec) or not Path(spec.path).is_file():
        return []
    entries = yaml_specs(Path(spec.path), format=None if spec.format == "yaml" else spec.format, chosen=spec.key)
    if entries[0].settings.weight is None:
        return []
    wrong = [
        name
        for name, value in {"splits": options.splits, "limit": options.limit, "drop": options.drop}.items()
        if value
    ]
    if wrong:
        raise ConfigError(
            f"{spec.path}: its entries have weights, so each entry becomes a separate dataset, and {wrong[0]} cannot "
            "apply to all together: set limit in each entry, or leave out the weights"
        )
    parts: dict[str, WeightedEntry] = {}
    for entry in entries:
        name = base = _name(entry)
        number = 1
        while name in parts:
            number += 1
            name = f"{base}-{number}"
        parts[name] = WeightedEntry(name=name, spec=entry, weight=entry.settings.weight or 0.0)
    return list(parts.values())


def convert_parts(
    parts: Sequence[WeightedEntry],
    target: str,
    *,
    convert: Callable[[Spec, str], ConvertReport],
    say: Callable[[str], None],
) -> ConvertReport:
    """Write a dataset per part below the target, and RUN_NAME; return a report with each part in `splits`.

    Parts that an earlier run finished stay unchanged.
    """
    base = target.rstrip("/")
    reports = {part.name: convert(part.spec, f"{base}/{part.name}") for part in parts}
    storage = open_storage(target)
    home = str(storage.folder.absolute()) if isinstance(storage, LocalStorage) else storage.url
    run = {
        "datasets": {part.name: {"remote": f"{home}/{part.name}"} for part in parts},
        "train": {"weights": {part.name: part.weight for part in parts}},
    }
    with disk_errors(f"{base}/{RUN_NAME}"):
        storage.write(RUN_NAME, write_yaml(run).encode())
    say(f"{base}/{RUN_NAME}: the datasets and weights of a run; add packing_length and processor to each, and a model")
    return joint(reports)


def _name(spec: Spec) -> str:
    """Name of an entry's folder: the name of its file or folder, without extensions."""
    path = spec.path.removeprefix("hf:").partition("?")[0]
    path = glob_base(path)[0] if has_wildcard(path) and not spec.is_literal else path
    name = spec.key or PurePosixPath(path).name.partition(".")[0]
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-") or "part"


def joint(reports: Mapping[str, ConvertReport]) -> ConvertReport:
    """Return one report of several datasets, each by name in its `splits`."""
    each = list(reports.values())
    tokens = [report.num_tokens for report in each if report.num_tokens is not None]
    splits = {
        name: SplitReport(num_rows=report.num_rows, num_tokens=report.num_tokens, num_shards=report.num_shards)
        for name, report in reports.items()
    }
    return ConvertReport(
        kind="; ".join(dict.fromkeys(report.kind for report in each)),
        schema=each[0].schema,
        num_rows=sum(report.num_rows for report in each),
        **RowCounts.total(each).as_dict(),
        not_shown=added(report.not_shown for report in each),
        num_tokens=sum(tokens) if tokens else None,
        num_shards=sum(report.num_shards for report in each),
        num_bytes=sum(report.num_bytes for report in each),
        seconds=sum(report.seconds for report in each),
        splits=splits,
        was_there=all(report.was_there for report in each),
        unread=joined_unread(report.unread for report in each),
    )
