"""What is asked of samples that are stored already -> whether they are stored again as they are, and what is known."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ConfigError
from ..processors.base import processor_fingerprint
from ..storage.storage import Storage
from .asked import schemas_of
from .options import ConvertOptions
from .rows.options import SchemaOptions
from .sources.mds import StoredSource
from .sources.units import Source
from .writing.carried import carried_fingerprints
from .writing.done import place_of


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
