"""LMMS Engine's tables of datasets, processors and models, and functions to register more."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ...errors import ConfigError, DataError
from ...processes.own_code import class_source
from ...processors.base import Processor
from ...processors.media.facts import media_part
from ...processors.media.images import decode_image
from ...types import Processed, Sample
from .datasets import processor as theirs
from .datasets.iterable import MultiModalIterableDataset
from .datasets.naive import MultiModalDataset
from .datasets.names import OWN_PROCESSORS, OWN_TYPES, PROCESSORS, TYPES, DatasetType

C = TypeVar("C", bound=type)

DATASET_MAPPING: dict[str, type] = {
    name: MultiModalIterableDataset if each.is_iterable else MultiModalDataset for name, each in TYPES.items()
}
DATAPROCESSOR_MAPPING: dict[str, type] = {
    **dict.fromkeys(PROCESSORS, theirs.DataProcessor),
    "bagel": theirs.BagelDataProcessor,
    "sit": theirs.SitDataProcessor,
    "rae_siglip": theirs.RaeSiglipDataProcessor,
}
AUTO_REGISTER_MODEL_MAPPING: dict[str, Any] = {
    "causal_lm": transformers.AutoModelForCausalLM,
    "masked_lm": transformers.AutoModelForMaskedLM,
    "image_text_to_text": transformers.AutoModelForImageTextToText,
    "general": transformers.AutoModel,
}
_MEMBERS = ("columns", "schema", "description", "measure", "process")


def register_dataset(dataset_type: str) -> Callable[[C], C]:
    """Return a decorator: configs with this dataset_type use the class, a subclass of our datasets.

    Its row_kind is "text" or "image"; without row_kind, rows are rows of `vision`. ConfigError for an existing type,
    and for a class not derived from ours.
    """

    def add(made_by: C) -> C:
        _check_new(dataset_type, {**TYPES, **OWN_TYPES}, "dataset_type")
        if not issubclass(made_by, MultiModalDataset | MultiModalIterableDataset):
            raise ConfigError(
                f"{made_by.__name__} is not a dataset of packs: inherit from BaseDataset or a class of lmms_stream "
                "derived from it"
            )
        is_iterable = issubclass(made_by, MultiModalIterableDataset)
        kind: Any = getattr(made_by, "row_kind", "messages")
        OWN_TYPES[dataset_type] = DatasetType(kind, is_iterable, f"rows of {made_by.__name__}", made_by)
        DATASET_MAPPING[dataset_type] = made_by
        return made_by

    return add


def register_processor(processor_type: str) -> Callable[[C], C]:
    """Return a decorator: a processor_config with this processor_type uses the class.

    The class is called with the ProcessorConfig, then build() if it exists. The class is a Processor like ours
    (processors/base.py), or has LMMS Engine's process(images, hf_messages) with Pillow images, returning input_ids,
    labels and the model's other inputs; for process(images, hf_messages), processing measures the lengths.
    """

    def add(made_by: C) -> C:
        _check_new(processor_type, {**PROCESSORS, **OWN_PROCESSORS}, "processor_type")

        def make(said: Mapping[str, Any]) -> Processor:
            made = made_by(theirs.ProcessorConfig(**said))
            if hasattr(made, "build"):
                made.build()
            return made if all(hasattr(made, name) for name in _MEMBERS) else EngineProcessor(made, said)

        OWN_PROCESSORS[processor_type] = make
        DATAPROCESSOR_MAPPING[processor_type] = made_by
        return made_by

    return add


class EngineProcessor:
    """Adapter from LMMS Engine's process(images, hf_messages) to our Processor. said: its processor_config."""

    columns = ("messages", "media")
    schema = "messages"

    def __init__(self, made: Any, said: Mapping[str, Any]):
        if not hasattr(made, "process"):
            raise ConfigError(f"{type(made).__name__} has no process: write process(images, hf_messages)")
        self._made, self._said = made, dict(said)

    @property
    def description(self) -> Mapping[str, Any]:
        """The class, its source code, and its config."""
        kind = type(self._made)
        return {"class": kind.__qualname__, "code": class_source(kind, asked=kind.__name__), "config": self._said}

    def measure(self, sample: Sample) -> int:
        return len(self.process(sample)["input_ids"])

    def process(self, sample: Sample) -> Processed:
        from PIL import Image

        messages, images = json.loads(sample["messages"]), []
        for message in messages:
            for part in message["content"] if isinstance(message["content"], list) else ():
                if part["type"] == "text":
                    continue
                if part["type"] != "image":
                    raise DataError(
                        f"a message holds media of type {part['type']}, and registered processors read images"
                    )
                images.append(Image.fromarray(decode_image(media_part(part, sample["media"]).data)))
        made = dict(self._made.process(images or None, messages))
        made.pop("attention_mask", None)
        try:
            made = {name: np.asarray(value) for name, value in made.items()}
            ids = made.pop("input_ids").astype(np.int64).reshape(-1)
            tokens = {"input_ids": ids, "labels": made.pop("labels").astype(np.int64).reshape(ids.shape)}
            positions = made.pop("position_ids", np.arange(len(ids))).reshape(-1, len(ids))
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise DataError(
                f"{type(self._made).__name__}.process returned values that cannot be read ({error}): return input_ids "
                "and labels of the same length, position_ids of [axes, tokens] if at all, and tensors that NumPy reads"
            ) from error
        if len(positions) > 1:
            tokens["position_ids"] = positions
        elif (positions != np.arange(len(ids))).any():
            raise DataError(
                f"{type(self._made).__name__}.process returned position_ids that do not count from 0: leave them out; "
                "only positions of several axes are read"
            )
        return {**tokens, "media": made}


def register_model(
    model_type: str,
    model_config: type[transformers.PretrainedConfig],
    model_class: type[transformers.PreTrainedModel],
    model_general_type: str = "causal_lm",
) -> None:
    """Register a model with transformers, for configs with this model_type."""
    transformers.AutoConfig.register(model_type, model_config, exist_ok=True)
    _auto_class(model_general_type).register(model_config, model_class, exist_ok=True)


def create_model_from_pretrained(
    load_from_pretrained_path: str, model_general_type: str | None = None, trust_remote_code: bool = False
) -> Any:
    """Return the class of transformers that loads the model of a folder or hub id."""
    config = transformers.AutoConfig.from_pretrained(load_from_pretrained_path, trust_remote_code=trust_remote_code)
    return _class_of(config, model_general_type)


def create_model_from_config(
    model_type: str, config: Mapping[str, Any], model_general_type: str | None = None
) -> tuple[Any, transformers.PretrainedConfig]:
    """Return the class of transformers that builds a model of this type, and the model's config."""
    if model_type not in CONFIG_MAPPING:
        raise ConfigError(f"model_type {model_type!r} is unknown to the installed transformers: correct it")
    made = CONFIG_MAPPING[model_type](**config)
    return _class_of(made, model_general_type), made


def _class_of(config: transformers.PretrainedConfig, general_type: str | None) -> Any:
    if general_type is not None:
        return _auto_class(general_type)
    for name in ("causal_lm", "image_text_to_text", "masked_lm", "general"):
        if type(config) in AUTO_REGISTER_MODEL_MAPPING[name]._model_mapping:
            return AUTO_REGISTER_MODEL_MAPPING[name]
    raise ConfigError(f"transformers has no model of a {type(config).__name__}: register it with register_model")


def _auto_class(general_type: str) -> Any:
    if general_type not in AUTO_REGISTER_MODEL_MAPPING:
        raise ConfigError(
            f"model_general_type {general_type!r} is not one of {', '.join(AUTO_REGISTER_MODEL_MAPPING)}: choose one"
        )
    return AUTO_REGISTER_MODEL_MAPPING[general_type]


def _check_new(name: str, known: Mapping[str, Any], what: str) -> None:
    if name in known:
        raise ConfigError(f"{what} {name!r} is already registered: choose another name")
