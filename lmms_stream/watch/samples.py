"""One sample of a run's datasets as a page, as `inspect` shows it: escaped, and nothing of it is executed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import build_config
from ..converters.stored.inspect.page import render_note, render_sample
from ..converters.stored.inspect.summary import inspect_sample
from ..errors import ConfigError, LmmsStreamError


def sample_page(datasets: Mapping[str, Mapping[str, Any]], sample: str) -> str:
    """The page of a sample, named as in a log: its number, after its source where there are several datasets.

    datasets: settings of a run's datasets by name, that of one alone "". What cannot be shown is said on the page.
    """
    try:
        return _shown(datasets, sample)
    except LmmsStreamError as error:
        return render_note(f"sample {sample}", str(error))


def _shown(datasets: Mapping[str, Mapping[str, Any]], sample: str) -> str:
    from ..mds.dataset_config import DatasetConfig

    source, _, number = sample.rpartition(":")
    if source not in datasets:
        raise ConfigError(
            f"the datasets of sample {sample!r} are not known: watch the YAML file that the run is trained by"
        )
    if not number.isdecimal():
        raise ConfigError(f"{sample!r} is no sample: name its number, after its source where there are several")
    config = build_config(DatasetConfig, datasets[source], source=f"dataset {source}".strip())
    if config.dataset_type is not None:
        raise ConfigError(
            f"the samples of dataset_type {config.dataset_type!r} are rows of its sources: convert them to see samples"
        )
    view, num_samples = inspect_sample(config.remote, int(number), processor=config.processor.build())
    return render_sample(view, num_samples=num_samples, url=config.remote)
