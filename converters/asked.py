"""All that decides what a conversion writes, by which it is known again; and whether it changed meanwhile."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import ConfigError, DataError, StorageError
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
from .writing.carried import carried_fingerprints
from .writing.dropped_rows import DroppedRows
from .writing.work import place_of


def asked_of(sources: Sequence[Source], options: ConvertOptions, dropped: DroppedRows | None = None) -> dict[str, Any]:
    """All that decides what is written, as JSON values: a run goes on where another was ended if these are equal.

    dropped: the rows that its drop list leaves out.
    """
    values = {each.name: getattr(options, each.name) for each in fields(options)}
    schemas = schemas_of(sources, options)
    values["schema"] = options.schema.asked
    values["drop_tail"] = options.drop_tail or None  # as in datasets of earlier versions, which do not have it
    # The source knows the ids, the rows are what is dropped, the processor is what was chosen, repeats are sources.
    for name in ("ids", "drop", "drop_sources", "choice", "allow_repeats"):
        values.pop(name)
    if dropped is not None:  # datasets of earlier versions do not have it
        values["drop"] = dropped.digest
    values["processor"] = options.processor and dict(options.processor.description)
    versions: dict[str, Any] = {"units": CUT_VERSION, "rows": ROWS_VERSION, "version of lmms_stream": VERSION}
    packages = {FORMATS.origin(name) for name in FORMATS.others} | {KINDS.origin(name) for name in KINDS.others}
    if packages:  # of other people, whose releases may read rows in another way
        versions["packages"] = sorted(map(str, packages))
    return {**values, "sources": described(sources), "code": code_of(schemas), **versions}


def described(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """What tells sources, their content, and slices of them apart, as JSON values."""
    slices = ({"rows": [each.rows.start, each.rows.stop]} if each.rows != slice(None) else {} for each in sources)
    return [{**each.identity, "name": each.name, **rows} for each, rows in zip(sources, slices, strict=True)]


def content_of(said: Mapping[str, Any]) -> dict[str, Any]:
    """Of a source as `described` or a dataset.json tells it, what changes with its content alone."""
    return {name: value for name, value in said.items() if name not in ("name", "at", "rows", "limit", "sample")}


def check_unchanged(sources: Sequence[Source], now: Sequence[Source]) -> None:
    """DataError for a source that was written to while it was read: some of its rows may be old and some new."""
    then, after = described(sources), described(now)
    known = {json.dumps(each, sort_keys=True) for each in after}
    changed = [each for each in then if json.dumps(each, sort_keys=True) not in known] or after[len(then) :]
    if changed:
        raise DataError(f"{changed[0]['name']} was changed while it was read: start again once nobody writes to it")


def check_code(code: Mapping[str, str], sources: Sequence[Source], options: ConvertOptions) -> None:
    """DataError for code of the user's that was changed meanwhile: some rows may have been given to the old one."""
    changed = [name for name, now in code_of(schemas_of(sources, options)).items() if code[name] != now]
    if changed:
        raise DataError(f"the code of {changed[0]} was changed while rows were given to it: start again once it stays")


def schemas_of(sources: Sequence[Source], options: ConvertOptions) -> list[SchemaOptions]:
    """How rows are read: of all sources, then of each that has settings of its own; ConfigError for wrong ones."""
    schemas = [options.schema]
    for source in sources:
        try:
            schemas += [options.schema.changed(source.settings)] if source.settings else []
        except ConfigError as error:
            raise ConfigError(f"{source.name}: {error}") from error
    return schemas


# Whether stored samples can be copied unchanged, with their lengths.


def check_targets(sources: Sequence[Source], targets: Sequence[Storage]) -> None:
    """ConfigError for a dataset that would be read and replaced at once."""
    for source in sources:
        for target in targets:
            if isinstance(source, StoredSource) and place_of(target.url) == place_of(source.dataset.storage.url):
                raise ConfigError(f"{source.name} is a source and the target: choose another target")


def carried_over(sources: Sequence[Source], options: ConvertOptions) -> list[str]:
    """Fingerprints of lengths indexes that are carried over, because samples are stored as they are."""
    is_again = all(each == SchemaOptions() for each in schemas_of(sources, options)) and not options.stores_tokens
    return carried_fingerprints(sources) if is_again else []


def measures(options: ConvertOptions, carried: Sequence[str]) -> bool:
    """Whether samples are measured: their lengths are not known, or decide which samples are stored."""
    if options.processor is None or options.shortest is not None or options.longest is not None:
        return True
    return processor_fingerprint(options.processor) not in carried


# All datasets of LLaMA-Factory's dataset_info.json -> those that can be read, by the kind of their rows.
#
# A stored dataset has rows of one schema, so that conversations, pairs, judged answers and texts become datasets of
# their own.

logger = logging.getLogger("lmms_stream")
NO_ANSWERS = 2
Opens = Callable[[Spec], object]  # raises what is wrong with a dataset


def described_kinds(sources: object, *, opens: Opens) -> Mapping[str, Sequence[Spec]]:
    """The datasets of dataset_info.json#*, if that is the only source, by the kind of their rows; {} otherwise.

    Those of hubs that cannot be read are left out, and a warning names each. After NO_ANSWERS without an answer, which
    take half a minute each, the hub is asked no more. DataError where none is left.
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
