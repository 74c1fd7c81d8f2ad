"""Datasets of a run: datasets of transformers' users converted, ours opened; and their tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError
from ...mds.core import PackedDataset, core_of, opens_loader
from ...mds.dataset_config import DatasetConfig
from ...plan.order import OrderConfig
from ...plan.packing import MAX_PACKING_LENGTH, Overlong, PackingConfig
from ...train.run.settings import Datasets, Packed
from ...types import World
from ..lmms_engine.datasets.names import EngineDatasetConfig, dataset_type_of, lacks_processor, with_processor
from .answer_rows import check_media, holds_media
from .arguments import TrainerInputs, device_batch, option
from .conversion import Conversion
from .models import name_of
from .rows import RowSettings
from .tokenizer import load_processing_class, prepared, tokenizer_of

if TYPE_CHECKING:
    from transformers import TrainingArguments

_OVERLONG: Mapping[str, Overlong] = {"bfd": "truncate", "bfd_split": "split"}  # TRL's packing_strategy -> ours


class GivenData:
    """Datasets of a run: transformers' converted, ours opened."""

    def __init__(self, given: TrainerInputs, arguments: TrainingArguments, world: World):
        self._given, self._arguments, self._world = given, arguments, world
        self._details = dict(option(arguments, "dataset_kwargs") or {})
        self._skips_preparing = bool(self._details.pop("skip_prepare_dataset", False))
        self._cache_folder = self._details.pop("cache_folder", None)
        if self._details:
            raise ConfigError(
                f"args.dataset_kwargs has {', '.join(self._details)}: set skip_prepare_dataset or cache_folder alone"
            )
        self.processing_class: Any = None

    def datasets(self) -> tuple[Datasets | None, Datasets | None]:
        """Return the training and the evaluation datasets."""
        train = self._dataset(self._given.train_dataset, "train_dataset", packs=option(self._arguments, "packing"))
        return train, self.open_rows(self._given.eval_dataset)

    def open_rows(self, given: Any) -> Datasets | None:
        """Open evaluation datasets; all ranks call this."""
        packs, packs_eval = option(self._arguments, "packing"), option(self._arguments, "eval_packing")
        return self._dataset(given, "eval_dataset", packs=packs if packs_eval is None else packs_eval)

    def token_ids(self) -> Mapping[str, int]:
        """Return the token ids set by the arguments, by their names in the model's config."""
        if self.processing_class is None:
            return {}
        tokenizer = tokenizer_of(self.processing_class)
        ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        asked = {
            "eos_token_id": option(self._arguments, "eos_token") or option(self._arguments, "chat_template_path"),
            "pad_token_id": True,
        }
        return {name: value for name, value in ids.items() if value is not None and asked[name]}

    def _dataset(self, given: Any, name: str, *, packs: bool) -> Datasets | None:
        if given is None:
            return None
        given = with_processor_of(self._given.model, given)
        if isinstance(given, DatasetConfig):
            return open_config(given, self._world)
        if opens_loader(given):
            return given
        if isinstance(given, PackedDataset) or hasattr(given, "core"):
            core_of(given)
            return given  # type: ignore[no-any-return]
        if isinstance(given, Mapping) and (
            name != "train_dataset" or type(given).__module__.partition(".")[0] != "datasets"
        ):
            return self._several(given, name, packs=packs)
        self._check_skipped(given, name)
        conversion = self._conversion(given, packs=packs)
        return conversion.opened(
            folder := conversion.stored(given, name=name),
            packing=self._packing(folder, conversion, packs=packs),
            order=self._order(),
        )

    def _several(self, given: Mapping[str, Any], name: str, *, packs: bool) -> Datasets:
        opened = {str(each): self._dataset(value, f"{name} {each}", packs=packs) for each, value in given.items()}
        if not opened:
            raise ConfigError(f"{name} has no dataset: pass one")
        return opened  # type: ignore[return-value]

    def _check_skipped(self, given: Any, name: str) -> None:
        columns = getattr(given, "column_names", None)
        if self._skips_preparing and isinstance(columns, list) and "input_ids" not in columns:
            raise ConfigError(
                f"args.dataset_kwargs skip_prepare_dataset is set, and {name} has no input_ids: tokenize it before, or "
                "leave skip_prepare_dataset out"
            )

    def _conversion(self, given: Any, *, packs: bool) -> Conversion:
        arguments, has_media = self._arguments, holds_media(given)
        if self.processing_class is None:
            self.processing_class = prepared(self._found_processing_class(), arguments)
        keeps = option(arguments, "truncation_mode")
        if keeps not in ("keep_start", "keep_end"):
            raise ConfigError(f"args.truncation_mode must be keep_start or keep_end, got {keeps!r}")
        completion_only = option(arguments, "completion_only_loss")
        if has_media:
            check_media(self.processing_class, self._given.formatting_func)
            if completion_only is None:
                completion_only = {"prompt", "completion"} <= {*given.column_names}
        settings = RowSettings(
            text_field=option(arguments, "dataset_text_field"),
            completion_only=completion_only,
            assistant_only=option(arguments, "assistant_only_loss"),
            max_length=None if packs or self._skips_preparing else option(arguments, "max_length"),
            keeps_end=keeps == "keep_end",
        )
        return Conversion(
            processing_class=self.processing_class,
            settings=settings,
            formatting_func=self._given.formatting_func,
            folder=Path(self._cache_folder or Path(str(arguments.output_dir)) / "datasets").expanduser(),
            num_proc=option(arguments, "dataset_num_proc"),
            world=self._world,
            objective=self._given.objective,
            has_media=has_media,
            trust_remote_code=self._trusts,
        )

    def _found_processing_class(self) -> Any:
        if self._given.processing_class is not None:
            return self._given.processing_class
        name = name_of(self._given.model)
        if not name:
            raise ConfigError(
                "processing_class is missing, and the model has no folder or name that may have a tokenizer: give one"
            )
        return load_processing_class(name, trust_remote_code=self._trusts)

    @property
    def _trusts(self) -> bool:
        options = option(self._arguments, "model_init_kwargs") or {}
        return bool(options.get("trust_remote_code", option(self._arguments, "trust_remote_code")))

    def _packing(self, folder: Path, conversion: Conversion, *, packs: bool) -> PackingConfig:
        """Return the packing config: packs of max_length; without packing, one sample per pack, already cut."""
        length = option(self._arguments, "max_length")
        if packs:
            strategy = option(self._arguments, "packing_strategy")
            if strategy not in _OVERLONG:
                raise ConfigError(
                    f"args.packing_strategy {strategy} is not {' or '.join(_OVERLONG)}: wrapped lets samples see each "
                    "other, and packs here never do; bfd_split loses no token either"
                )
            if length is None:
                raise ConfigError("args.packing needs args.max_length, the tokens of a pack: set it")
            return PackingConfig(packing_length=length, strategy=self._strategy(), overlong=_OVERLONG[strategy])
        # of a pack without packing: for KTO a batch, to pair prompts with answers of other prompts
        num_samples = device_batch(self._arguments, self._world) if self._given.objective == "kto" else 1
        num_answers = 2 if conversion.objective == "dpo" else 1
        if length is None or self._skips_preparing:
            whole = conversion.opened(
                folder, packing=PackingConfig(packing_length=MAX_PACKING_LENGTH), order=OrderConfig()
            )
            length, num_answers = int(whole.length_index().lengths.max()), 1
        return PackingConfig(
            packing_length=min(MAX_PACKING_LENGTH, length * num_answers * num_samples),
            strategy=self._strategy(),
            overlong="truncate" if conversion.objective is None else "drop",
            max_samples_per_pack=num_samples,
        )

    def _strategy(self) -> str:
        """Return the packing strategy: next_fit keeps the order of the rows."""
        return "best_fit" if self._order().shuffle else "next_fit"

    def _order(self) -> OrderConfig:
        arguments = self._arguments
        seed = int(arguments.seed if arguments.data_seed is None else arguments.data_seed)
        return OrderConfig(seed=seed, shuffle=getattr(arguments, "train_sampling_strategy", None) != "sequential")


def open_config(config: DatasetConfig, world: World) -> Packed:
    """Open the dataset of a config; with a dataset_type, convert its sources unless converted, or stream them."""
    if not isinstance(config, EngineDatasetConfig) or config.dataset_type is None:
        return config.open(world)
    found = dataset_type_of(config)
    if found.is_iterable:
        from ..lmms_engine.datasets.iterable import MultiModalIterableDataset

        streamed: MultiModalIterableDataset = (found.made_by or MultiModalIterableDataset)(config)
        return streamed
    from ..lmms_engine.datasets.naive import MultiModalDataset

    made: MultiModalDataset = (found.made_by or MultiModalDataset)(config)
    return made.opened(world)


def with_processor_of(model: Any, given: Any) -> Any:
    """Set the model's processor in a dataset or config that specifies only the processor's type.

    Other datasets are returned unchanged. ConfigError for a model without a folder or name.
    """
    if isinstance(given, EngineDatasetConfig) and given.dataset_type is not None:
        return with_processor(given, _model_name(model)) if lacks_processor(given) else given
    if getattr(given, "lacks_processor", False):
        given.take_processor(_model_name(model))
    return given


def _model_name(model: Any) -> str:
    name = name_of(model)
    if not name:
        raise ConfigError(
            "processor_config has no processor_name, and the model has no folder or name that may have a processor: "
            "give processor_name"
        )
    return name
