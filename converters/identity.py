"""Identity of a conversion: all values that decide its output; checks that sources and code stayed the same."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, DataError, LengthsError, StorageError
from ..mds.lengths import LengthIndex, joint_index, patches_of_all
from ..mds.provenance import ROW_BITS, Provenance, packed_rows
from ..processors.base import processor_fingerprint
from ..storage.storage import Storage
from ..version import VERSION
from .options import ConvertOptions
from .rows.kinds import KINDS
from .rows.mapper import ROWS_VERSION
from .rows.options import SchemaOptions
from .rows.user_functions import code_of
from .sources.detect import FORMATS
from .sources.lists import dataset_info_specs, is_dataset_info
from .sources.mds import StoredSource
from .sources.specs import ALL, Spec, parse_spec
from .sources.units import CUT_VERSION, Source
from .stored.catalog import open_lengths, read_catalog
from .writing.dropped_rows import DroppedRows
from .writing.work import place_of


def identity_of(
    sources: Sequence[Source], options: ConvertOptions, dropped: DroppedRows | None = None
) -> dict[str, Any]:
    """Return all values that decide the output, as JSON values: a run resumes another run of the same identity.

    dropped: rows that the drop list leaves out.
    """
    values = {each.name: getattr(options, each.name) for each in fields(options)}
    schemas = schemas_of(sources, options)
    values["schema"] = options.schema.identity
    values["drop_tail"] = options.drop_tail or None  # None as in datasets of earlier versions
    # Covered by other values: ids and repeats by the sources, the drop list by its rows, the choice by the processor.
    for name in ("ids", "drop", "drop_sources", "choice", "allow_repeats"):
        values.pop(name)
    if options.header is None:  # datasets of earlier versions lack the key
        values.pop("header")
    if dropped is not None:  # datasets of earlier versions lack the key
        values["drop"] = dropped.digest
    values["processor"] = options.processor and dict(options.processor.description)
    versions: dict[str, Any] = {"units": CUT_VERSION, "rows": ROWS_VERSION, "version of lmms_stream": VERSION}
    packages = {*map(FORMATS.origin, FORMATS.others), *map(KINDS.origin, KINDS.others)}
    if packages:  # other people's packages: a release may change how rows are read
        versions["packages"] = sorted(map(str, packages))
    return {**values, "sources": described(sources), "code": code_of(schemas), **versions}


def described(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """Identities of sources, with their content and slices, in JSON values."""
    return [
        {
            **each.identity,
            "name": each.name,
            **({"rows": [each.rows.start, each.rows.stop]} if each.rows != slice(None) else {}),
        }
        for each in sources
    ]


def content_of(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a described source (see `described`, or dataset.json) that follow from its content."""
    others = ("name", "at", "rows", "limit", "sample", "status", "bytes")
    return {name: value for name, value in said.items() if name not in others}


def check_unchanged(sources: Sequence[Source], now: Sequence[Source]) -> None:
    """Raise DataError for a source that was written to during the conversion: some rows may be old and some new."""
    then, after = described(sources), described(now)
    known = {json.dumps(each, sort_keys=True) for each in after}
    changed = [each for each in then if json.dumps(each, sort_keys=True) not in known] or after[len(then) :]
    if changed:
        raise DataError(f"{changed[0]['name']} was changed during reading: start again after all writes to it")


def check_code(code: Mapping[str, str], sources: Sequence[Source], options: ConvertOptions) -> None:
    """Raise DataError for code of the user that was changed meanwhile: the old code may have had some rows."""
    changed = [name for name, now in code_of(schemas_of(sources, options)).items() if code[name] != now]
    if changed:
        raise DataError(f"the code of {changed[0]} was changed while rows were given to it: start again once it stays")


def schemas_of(sources: Sequence[Source], options: ConvertOptions) -> list[SchemaOptions]:
    """Return how rows are read: options of all sources, then of each with own settings; ConfigError if wrong."""
    schemas = [options.schema]
    for source in sources:
        try:
            schemas += [options.schema.changed(source.settings)] if source.settings else []
        except ConfigError as error:
            raise ConfigError(f"{source.name}: {error}") from error
    return schemas


# Whether stored samples can be copied unchanged, with their lengths.


def check_targets(sources: Sequence[Source], targets: Sequence[Storage]) -> None:
    """Raise ConfigError if a dataset would be read and replaced at once."""
    for source in sources:
        for target in targets:
            if isinstance(source, StoredSource) and place_of(target.url) == place_of(source.dataset.storage.url):
                raise ConfigError(f"{source.name} is a source and the target: choose another target")


def carried_over(sources: Sequence[Source], options: ConvertOptions) -> list[str]:
    """Return the fingerprints of the lengths indexes that stay valid because samples are copied unchanged."""
    schemas = schemas_of(sources, options)
    is_again = schemas == [SchemaOptions()] * len(schemas) and not options.stores_tokens
    return carried_fingerprints(sources) if is_again else []


def measures(options: ConvertOptions, carried: Sequence[str]) -> bool:
    """Return whether samples are measured: their lengths are unknown, or decide which samples are stored."""
    if options.processor is None or options.shortest is not None or options.longest is not None:
        return True
    return processor_fingerprint(options.processor) not in carried


# All datasets of LLaMA-Factory's dataset_info.json -> the readable datasets, by the kind of their rows.
#
# A stored dataset has rows of one schema: conversations, pairs, judged answers and texts become separate datasets.

logger = logging.getLogger("lmms_stream")
NO_ANSWERS = 2
Opens = Callable[[Spec], object]  # raises the error of an unreadable dataset


def described_kinds(sources: object, *, opens: Opens) -> Mapping[str, Sequence[Spec]]:
    """Return kind of rows -> readable datasets of dataset_info.json#*, if it is the only source; else {}.

    Datasets of hubs that cannot be read are left out, and a warning names each. After NO_ANSWERS datasets in a row
    without an answer, which take half a minute each, the hub is not asked again. DataError if no dataset is left.
    """
    named = [sources] if isinstance(sources, str | Path) else sources
    if not isinstance(named, Sequence) or len(named) != 1 or not isinstance(named[0], str | Path):
        return {}
    spec = parse_spec(str(named[0]))
    if spec.key != ALL or not is_dataset_info(Path(spec.path)):
        return {}
    found: dict[str, list[Spec]] = {}
    num_unanswered, unasked = 0, list[str]()
    for each in dataset_info_specs(Path(spec.path), ALL, refused=partial(logger.warning, "left out: %s")):
        if each.is_hub and num_unanswered == NO_ANSWERS:
            unasked.append(each.text)
            continue
        if each.is_hub:
            try:
                opens(each)
            except (DataError, StorageError, ConfigError) as error:
                logger.warning("left out: %s: %s", each.text, " ".join(str(error).split()))
                num_unanswered = num_unanswered + 1 if isinstance(error, StorageError) else 0
                continue
            num_unanswered = 0
        found.setdefault(str(each.settings.rows["kind"]), []).append(each)
    if unasked:
        logger.warning("left out: %s: the hub gave no answer for those before", ", ".join(unasked))
    if not found:
        raise DataError(f"{spec.text}: none of its datasets can be read: download them, and name files by file_name")
    return found


# Lengths and source rows of samples of stored datasets, carried over instead of measured again. The source rows of the
# new samples select them: in a stored dataset these rows are sample ids.


_CHUNK = 1 << 20  # samples looked at together


def carried_fingerprints(sources: Sequence[Source]) -> list[str]:
    """Fingerprints of the lengths indexes that all sources have; [] if a source is not a stored dataset."""
    stored = [source for source in sources if isinstance(source, StoredSource)]
    if len(stored) != len(sources):
        return []
    found = [read_catalog(source.dataset.storage).fingerprints for source in stored]
    return [fingerprint for fingerprint in found[0] if all(fingerprint in each for each in found)]


def carried_lengths(
    sources: Sequence[Source], fingerprints: Sequence[str], rows: Sequence[NDArray[np.int64]], *, folder: Path
) -> list[LengthIndex]:
    """Return the lengths indexes of samples. rows: packed source rows, int64[n] each. folder: for copies.

    An index counts the tokens of texts and of media over all its samples; the split is known only if all samples are
    kept. Raise LengthsError for a damaged index, and StorageError.
    """
    packed = np.concatenate(rows)
    found = []
    for fingerprint in fingerprints:
        indexes = [_opened(source, fingerprint, folder / f"carried-{n}") for n, source in enumerate(sources)]
        if any(index is None for index in indexes):  # listed, or known by its processor, but missing
            continue
        found.append(_selected([index for index in indexes if index is not None], packed))
    return found


def _opened(source: Source, fingerprint: str, folder: Path) -> LengthIndex | None:
    assert isinstance(source, StoredSource)
    dataset = source.dataset
    try:
        return open_lengths(dataset.storage, fingerprint, folder=folder, num_samples=dataset.num_samples)
    except LengthsError as error:
        raise LengthsError(f"{source.name}: {error}") from error


def _selected(indexes: Sequence[LengthIndex], packed: NDArray[np.int64]) -> LengthIndex:
    patches_of_sources = patches_of_all(indexes)
    lengths = _values([index.lengths for index in indexes], packed)
    is_all = len(packed) == sum(len(index.lengths) for index in indexes)  # sample ids are unique in a dataset
    patches = None if patches_of_sources is None else _values(patches_of_sources, packed)
    return joint_index(indexes, lengths=lengths, patches=patches, is_all=is_all)


def _values(arrays: Sequence[NDArray[np.integer[Any]]], packed: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Values of samples, uint32[n]. arrays: values of each source by sample id."""
    values = np.empty(len(packed), np.uint32)
    for at in range(0, len(packed), _CHUNK):
        sources, rows = np.divmod(packed[at : at + _CHUNK], 1 << ROW_BITS)
        for source in np.unique(sources).tolist():
            here = sources == source
            values[at : at + _CHUNK][here] = arrays[source][rows[here]]
    return values


@dataclass(frozen=True, slots=True)
class CarriedOrigins:
    """Source rows of samples by source names; a sample of a stored dataset has the stored source row."""

    names: tuple[str, ...]
    rows: list[NDArray[np.int64]]

    @staticmethod
    def of(sources: Sequence[Source], rows: Sequence[NDArray[np.int64]], *, folder: Path) -> CarriedOrigins:
        """rows: see carried_lengths. A stored dataset without provenance is a source itself."""
        known = {
            number: provenance
            for number, source in enumerate(sources)
            if isinstance(source, StoredSource)
            and (provenance := Provenance.of(source.dataset.storage, folder / f"origins-{number}")) is not None
        }
        if not known:
            return CarriedOrigins(tuple(source.name for source in sources), list(rows))
        lists = [known[n].sources if n in known else (source.name,) for n, source in enumerate(sources)]
        number_of = {name: n for n, name in enumerate(dict.fromkeys(name for each in lists for name in each))}
        numbers = [np.array([number_of[name] for name in each], np.int64) for each in lists]
        return CarriedOrigins(tuple(number_of), list(_composed(rows, known, numbers)))


def _composed(
    rows: Sequence[NDArray[np.int64]], known: dict[int, Provenance], numbers: Sequence[NDArray[np.int64]]
) -> Iterator[NDArray[np.int64]]:
    for packed in (part for array in rows for part in np.split(array, range(_CHUNK, len(array), _CHUNK))):
        sources, ids = np.divmod(packed, 1 << ROW_BITS)
        made = np.empty_like(packed)
        for source in np.unique(sources).tolist():
            here = sources == source
            if source in known:
                inner, inner_rows = np.divmod(known[source].rows[ids[here]].astype(np.int64), 1 << ROW_BITS)
                made[here] = (numbers[source][inner] << ROW_BITS) | inner_rows
            else:
                made[here] = packed_rows(int(numbers[source][0]), ids[here])
        yield made
