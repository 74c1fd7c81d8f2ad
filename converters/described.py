"""All datasets of LLaMA-Factory's dataset_info.json -> those that can be read, by the kind of their rows.

A stored dataset has rows of one schema, so that conversations, pairs, judged answers and texts become datasets of
their own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from ..errors import ConfigError, DataError, StorageError
from .sources.dataset_info import ALL, dataset_info_specs, is_dataset_info
from .sources.specs import Spec, parse_spec

logger = logging.getLogger("lmms_stream")
Opens = Callable[[Spec], object]  # raises what is wrong with a dataset


def described_kinds(sources: object, *, opens: Opens) -> Mapping[str, Sequence[Spec]]:
    """The datasets of dataset_info.json#*, if that is the only source, by the kind of their rows; {} otherwise.

    Those of hubs that cannot be read are left out, and a warning names each. DataError where none is left.
    """
    named = [sources] if isinstance(sources, str | Path) else sources
    if not isinstance(named, Sequence) or len(named) != 1 or not isinstance(named[0], str | Path):
        return {}
    spec = parse_spec(str(named[0]))
    if spec.key != ALL or not is_dataset_info(Path(spec.path)):
        return {}
    found: dict[str, list[Spec]] = {}
    for each in dataset_info_specs(Path(spec.path), ALL, refused=partial(logger.warning, "left out: %s")):
        if each.is_hub:
            try:
                opens(each)
            except (DataError, StorageError, ConfigError) as error:
                logger.warning("left out: %s: %s", each.text, " ".join(str(error).split()))
                continue
        found.setdefault(str(each.settings.rows["kind"]), []).append(each)
    if not found:
        raise DataError(f"{spec.text}: none of its datasets can be read: download them, and name files by file_name")
    return found
