"""Lists of samples that a run is told to leave out: their lines -> sources and ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import ConfigError
from ..mds.listed_samples import ListedSample, listed_samples
from ..plan.left_out import LeftOut, LeftOutSample


@dataclass(frozen=True, kw_only=True, slots=True)
class DropList:
    """A file of samples to leave out from a step on, of the steps that the cursor counts from 0."""

    file: str
    from_step: int = 0

    def __post_init__(self) -> None:
        if self.from_step < 0:
            raise ConfigError(f"from_step of the drop list {self.file} must be 0 or more, got {self.from_step}")


class Samples(Protocol):
    """A dataset whose samples are named: a PackedDataset."""

    @property
    def num_samples(self) -> int: ...

    @property
    def identity(self) -> str: ...

    def samples_of(self, file: str, row: int) -> list[int]:
        """Ids of the samples that a row of a file was made into; ConfigError where it was not made of this file."""
        ...


Drop = str | Sequence[DropList | Mapping[str, Any]]


def drop_lists(drop: Drop | None) -> list[DropList]:
    """The lists of a setting; ConfigError for entries of another form."""
    if drop is None:
        return []
    if isinstance(drop, str):
        return [DropList(file=drop)]
    try:
        return [each if isinstance(each, DropList) else DropList(**each) for each in drop]
    except TypeError as error:
        raise ConfigError(f"drop must be a file, or a list of {{file, from_step}}: {error}") from error


def dropped(drop: Drop | None, datasets: Mapping[str, Samples]) -> LeftOut:
    """The samples of drop lists.

    A line is `SOURCE:ID` or the `ID` of the only source; `FILE:ROW`, a row of a converted file, rows counted from 1; or
    JSON with source and sample_id, as the list that a run writes. Empty lines and those that begin with # say nothing.
    ConfigError for a file that cannot be read, for names that are not known, and for a line that a run wrote of another
    dataset.
    """
    found = LeftOut()
    for each in drop_lists(drop):
        for listed in listed_samples(each.file):
            for source, sample_id in _named(listed, datasets):
                reason = f"listed in {each.file}"
                found.add(LeftOutSample(source, sample_id, reason, each.from_step, "dropped"))
    return found


def _named(listed: ListedSample, datasets: Mapping[str, Samples]) -> list[tuple[str, int]]:
    name, number, where = listed.name, listed.number, listed.where
    if not name and not listed.is_id and len(datasets) == 1:
        return [_checked(next(iter(datasets)), number, datasets, where=where)]
    if listed.is_id:
        _check_dataset(listed, datasets)
    if listed.is_id or name in datasets:
        return [_checked(name, number, datasets, where=where)]
    return _of_row(name, number, datasets, where=where)


def _checked(source: str, sample_id: int, datasets: Mapping[str, Samples], *, where: str) -> tuple[str, int]:
    if source not in datasets:
        raise ConfigError(f"{where}: there is no source {source!r}: the sources are {', '.join(datasets)}")
    num_samples = datasets[source].num_samples
    if not 0 <= sample_id < num_samples:
        raise ConfigError(f"{where}: {source} has no sample {sample_id}: it has {num_samples}, counted from 0")
    return source, sample_id


def _check_dataset(listed: ListedSample, datasets: Mapping[str, Samples]) -> None:
    """ConfigError where a line is of a dataset that is not read as its source."""
    source = listed.name
    if listed.dataset is None or source not in datasets or (identity := datasets[source].identity) == listed.dataset:
        return
    raise ConfigError(
        f"{listed.where}: the sample is of a dataset {listed.dataset}, and {source} is {identity}, whose numbers name "
        "other samples: name the rows of the files that they were made of (FILE:ROW), or leave out the list"
    )


def _of_row(file: str, row: int, datasets: Mapping[str, Samples], *, where: str) -> list[tuple[str, int]]:
    found, reasons = [], []
    for source, dataset in datasets.items():
        try:
            found += [(source, sample_id) for sample_id in dataset.samples_of(file, row)]
        except ConfigError as error:
            reasons.append(f"{source}: {error}")
    if not found:
        raise ConfigError(
            f"{where}: {file}:{row} is no sample: the sources are {', '.join(datasets)}, and as a row of a file "
            f"{'; '.join(reasons) or 'it was made into none'}"
        )
    return found
