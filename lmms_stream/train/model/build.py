"""Build transformers models: from a folder, hub id or config, with an adapter if the run trains an adapter."""

from __future__ import annotations

import inspect
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import torch
import torch.distributed as dist
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ...checks import check_fields
from ...errors import (
    ConfigError,
    LmmsStreamError,
    did_you_mean,
    if_folder_of_lfs_pointers,
    nearest_name,
    num_unmatched,
)
from ...processes.own_code import own_code
from ...processors.families.family import AUTO_CLASS
from ...processors.families.registry import family_of_model
from .adapters import new_peft_model, take_adapter
from .attention import Attention, implementations, may_be_set
from .pretrained import WholeOnlyError, find_tensors, leave_unread

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


# Models of diffusers and of the user.

T = TypeVar("T")
DIFFUSERS_CLASS = "_class_name"  # in a config of diffusers


class PlainModel(torch.nn.Module):
    """Wrapper of a model for tasks that call parts of the model.

    FSDP takes each call of the wrapper for a forward pass: a task makes a single call for all packs of a batch, and
    runs parts of the model inside this call only.
    """

    family = None
    towers: ClassVar[Mapping[str, torch.nn.Module]] = {}

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[Any], T]) -> T:
        """Return the result of `run` for the model: tensors, no views, alone or in a mapping or tuple."""
        return run(self.model)

    def check_processor(self, processor: object) -> None:
        """Accept any processor: the task checks its inputs."""

    @property
    def kept_whole(self) -> list[torch.nn.Module]:
        """Blocks not sharded separately by FSDP, because the model calls parts of these blocks from outside.

        diffusers' DiT computes the condition of the last layer with a part of the first block.
        """
        if type(self.model).__name__ == "DiTTransformer2DModel":
            blocks: Any = self.model.transformer_blocks
            return [blocks[0]]
        return []


def config_of(model: torch.nn.Module) -> dict[str, Any]:
    """Return the config of a transformers or diffusers model as JSON values; {} for other models."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        return dict(config.to_dict())
    if hasattr(model, "to_json_string"):
        of_diffusers: Any = model
        described: dict[str, Any] = json.loads(of_diffusers.to_json_string())
        return {name: value for name, value in described.items() if name != "_diffusers_version"}
    return {}


def takes(call: Callable[..., Any], name: str) -> bool:
    """Return whether a function takes an argument of this name."""
    parameters: Mapping[str, inspect.Parameter] = inspect.signature(call).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


logger = logging.getLogger("lmms_stream")


_UNBUILT = (
    LookupError, ValueError, OSError, TypeError, ImportError, ArithmeticError, RuntimeError, StrictDataclassError,
)  # errors of transformers for invalid configs # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Model of a run: set exactly one of pretrained, config and class_path.

    pretrained and config name a causal language model, a model of images and text, or a diffusers model. A diffusers
    model has `_class_name` in config, or in config.json of the local folder `pretrained`.
    """

    pretrained: str | None = None  # a local folder or hub id
    # fields of a transformers config: `model_type` and arguments of its config class; the weights are random
    config: Mapping[str, Any] | None = None
    # your own class or function that returns a model, for tasks that take any model (flow_matching, reconstruction,
    # bagel): module:Class or path/to/file.py:Class; the weights are random
    class_path: str | None = None
    args: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of class_path
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the weights and their updates
    # "auto": the trainer chooses the fastest attention on this machine that keeps the samples of a pack apart
    # (docs/speed.md)
    attention: Attention = "auto"
    seed: int = 0  # of random weights
    # fields of a peft config (default peft_type: LORA): only the adapter is trained and saved
    adapter: Mapping[str, Any] | None = None
    trust_remote_code: bool = False  # run the Python files in the model's folder or repository
    # LLaVA-OneVision: frames from one slow frame of a video to the next, as processor.slow_every; adds a weight to the
    # model (None: the config's value)
    slow_every: int | None = None
    use_liger_kernel: bool = False  # fused kernels of liger-kernel for norms, rotary positions and MLPs; with CUDA

    def __post_init__(self) -> None:
        check_fields(self, prefix="model.", paths=("pretrained",))
        if sum(each is not None for each in (self.pretrained, self.config, self.class_path)) != 1:
            raise ConfigError("model needs exactly one of pretrained and config, or class_path")
        if not -(1 << 63) <= self.seed < 1 << 64:
            raise ConfigError(f"model.seed must be from -2^63 to 2^64 - 1, got {self.seed}")
        if self.args and self.class_path is None:
            raise ConfigError("model.args are arguments of model.class_path, which is not set: leave model.args out")
        if self.slow_every is not None and (self.slow_every < 1 or self.class_path is not None):
            raise ConfigError(
                f"model.slow_every must be at least 1, of a LLaVA-OneVision of transformers', got {self.slow_every!r}"
            )
        if self.class_path is not None and (self.adapter is not None or self.use_liger_kernel):
            name = "use_liger_kernel" if self.adapter is None else "adapter"
            raise ConfigError(
                f"model.{name} is for models of transformers, but class_path names another model: leave it out"
            )

    def build(self) -> PreTrainedModel:
        """Return the model, on the CPU of rank 0, and without weights on the meta device of other ranks.

        The trainer shards the model and gives each rank a part. Without a process group the model has weights.
        """
        is_empty = dist.is_initialized() and dist.get_rank() != 0
        return self._made(torch.device("meta") if is_empty else None)

    def build_unread(self) -> PreTrainedModel:
        """Return the model; weights of `pretrained` stay in files for now if tensors can be read separately.

        Then the parameters of rank 0 are on the meta device, too, and pretrained.unread_weights returns their places.
        Otherwise rank 0 loads all weights, and logs the reason if the run has several ranks.
        """
        if self.pretrained is None or (dist.is_initialized() and dist.get_rank() != 0):
            return self.build()
        try:
            return self._unread()
        except WholeOnlyError as reason:
            if dist.is_initialized() and dist.get_world_size() > 1:
                logger.info("rank 0 loads all of %s before ranks get their parts: %s", self.pretrained, reason)
            return self.build()

    def _unread(self) -> PreTrainedModel:
        """Return the model with unread weights; WholeOnlyError if the result would differ from `build`."""
        if reason := self._is_special():
            raise WholeOnlyError(reason)
        try:
            model = self._without_weights(self, self.pretrained)
        except ConfigError as error:
            raise WholeOnlyError(str(error)) from error  # `build` raises it again
        leave_unread(model, find_tensors(str(self.pretrained), model))
        return model

    def _is_special(self) -> str | None:
        """Return the reason against building the model before loading weights; None without a reason."""
        if self.class_path is not None or diffusers_config(self.pretrained, self.config) is not None:
            return "it is not built by transformers"
        return None if self.adapter is None else "it gets an adapter"

    def build_empty(self, saved: Path) -> PreTrainedModel | None:
        """Return the model without weights, for a checkpoint to fill; None for models that need their weights.

        Parameters are on the meta device. Buffers are on the CPU of rank 0, with from_pretrained's values: a checkpoint
        holds only some buffers. saved: folder with the checkpoint's generation config, and with a config if the config
        of `pretrained` is missing. None: models of class_path and of diffusers, and models with an adapter, because
        checkpoints lack the weights under an adapter.
        """
        if self._is_special():
            return None
        source = self
        if self.pretrained is not None and not _has_config(self.pretrained):
            source = replace(self, pretrained=str(saved))
        return self._without_weights(source, str(saved))

    def _without_weights(self, source: ModelConfig, generation: str | None) -> PreTrainedModel:
        """Return the model of a source's config. generation: folder or hub id of the generation config, if any."""
        from transformers import GenerationConfig

        is_first = not dist.is_initialized() or dist.get_rank() == 0
        model = source._made(parameters_on_meta() if is_first else torch.device("meta"))
        model.tie_weights()  # empty parameters were untied
        if self.pretrained is not None:  # from_pretrained writes dtype to all configs, from_config does not
            of_parts = (getattr(model.config, name, None) for name in model.config.sub_configs)
            for config in filter(None, (model.config, *of_parts)):
                config.dtype = getattr(torch, self.dtype)
        model.config._name_or_path = model.name_or_path = self.pretrained or ""
        if generation is not None and model.can_generate():
            with suppress(OSError):  # no generation config
                model.generation_config = GenerationConfig.from_pretrained(generation)
        return model

    def _made(self, empty: AbstractContextManager[object] | None) -> PreTrainedModel:
        """Return the model. empty: context for parameters without values; None: build the weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            try:
                with may_be_set(self.attention):
                    model = self._build(empty)
            except LmmsStreamError:
                raise
            except _UNBUILT as error:
                if "trust_remote_code" in str(error) and not self.trust_remote_code:
                    raise ConfigError(
                        f"model {self.pretrained} has its own Python files, which can run any code: read the files, "
                        "and set model.trust_remote_code to true if you trust the files"
                    ) from error
                raise ConfigError(f"model cannot be built: {' '.join(str(error).split())}") from error
            if self.use_liger_kernel:
                use_liger_kernels(model)
            if self.adapter is not None:
                with torch.device("cpu") if empty is None else empty:
                    model = take_adapter(new_peft_model(model, self.adapter))
        return model

    def _build(self, empty: AbstractContextManager[object] | None) -> PreTrainedModel:
        if self.class_path is not None:
            own_model = build_own(
                self.class_path, self.args, dtype=getattr(torch, self.dtype), is_empty=empty is not None
            )
            return own_model
        if (diffused := diffusers_config(self.pretrained, self.config)) is not None:
            dtype = getattr(torch, self.dtype)
            return build_diffusers(diffused, self.pretrained, dtype=dtype, is_empty=empty is not None)
        own = self._family_class()
        config = self._config(own)
        check_config(config)
        if self.slow_every is not None:
            import_module(".slow_fast", __package__).with_slow_frames(config, self.slow_every)
        own = own or class_of_slow_frames(config.to_dict())
        auto, model_class = (None, own) if own is not None else self._classes(config)
        unread = unread_keys(self.config or {}, config, model_class)
        if unread and (not dist.is_initialized() or dist.get_rank() == 0):
            logger.warning("fields of the published config that reach nothing: %s", ", ".join(unread))
        choices, left_out = implementations(self.attention, model_class, config)
        named = None if self.attention == "auto" else self.attention
        options: dict[str, Any] = {"attn_implementation": named, "dtype": getattr(torch, self.dtype)}
        if auto is not None:  # asks on stdin without it
            options["trust_remote_code"] = self.trust_remote_code
        from_config = model_class._from_config if auto is None else auto.from_config
        if empty is not None:
            with empty:
                model = from_config(config, **options)
        elif self.pretrained is not None:
            model = (auto or model_class).from_pretrained(self.pretrained, config=config, **options)
        else:
            model = from_config(config, **options)
        model.attention_choices, model.attention_left_out = choices if named is None else [], left_out
        built: PreTrainedModel = model
        return built

    def check_auto_class(self, name: str) -> None:
        """Raise ConfigError unless transformers' auto class of this name loads the model, or its family's own class."""
        if self.class_path is None and diffusers_config(self.pretrained, self.config) is None:
            own = self._family_class()
            auto = None if own is not None else self._classes(self._config(own))[0]
            if auto is not None and auto.__name__ != name:
                raise ConfigError(f"the model is loaded by {auto.__name__}, by its config, not by {name}")

    def _classes(self, config: PretrainedConfig) -> tuple[Any, Any]:
        """Return transformers' auto class for a config, and the model's class; ConfigError for a model without text."""
        import transformers
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        autos: tuple[Any, ...] = (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText)
        if config.sub_configs.keys() - {"text_config"}:  # a media model that is registered as a text model, too
            autos = autos[::-1]
        own = (getattr(config, "auto_map", None) or {}) if self.trust_remote_code else {}
        for auto in autos:
            if auto.__name__ in own:
                return auto, get_class_from_dynamic_module(own[auto.__name__], str(self.pretrained))
            if type(config) in auto._model_mapping:
                return auto, auto._model_mapping[type(config)]
        raise ConfigError(
            f"model type {config.model_type!r} does not generate text: name a causal language model or a model of "
            "images and text"
        )

    def _family_class(self) -> Any:
        """Return the transformers class named by the model's family; None if an auto class loads the model."""
        from transformers import PretrainedConfig

        said = PretrainedConfig.get_config_dict(self.pretrained)[0] if self.pretrained is not None else self.config
        return class_of_family(str((said or {}).get("model_type", "")))

    def _config(self, own: Any) -> PretrainedConfig:
        import transformers

        if self.pretrained is not None:
            if problem := if_folder_of_lfs_pointers(self.pretrained, "*.safetensors"):
                raise ConfigError(problem)
            options = {} if own is not None else {"trust_remote_code": self.trust_remote_code}
            configs = transformers.AutoConfig if own is None else own.config_class
            found: PretrainedConfig = configs.from_pretrained(self.pretrained, **options)
            return found
        fields = dict(self.config or {})
        model_type = fields.pop("model_type")
        if own is not None:
            of_family: PretrainedConfig = own.config_class(**fields)
            return of_family
        if model_type not in transformers.CONFIG_MAPPING:
            raise ConfigError(
                f"model_type {model_type!r} is unknown to the installed transformers: correct it, or start the run in "
                "a script that imports its package before"
            )
        made: PretrainedConfig = transformers.AutoConfig.for_model(model_type, **fields)
        return made


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Make new modules' parameters on the meta device, and their buffers with values."""

    def empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(empty)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


def _has_config(pretrained: str) -> bool:
    """Return whether the config of a folder or hub id can be loaded."""
    from transformers import PretrainedConfig

    try:
        return bool(PretrainedConfig.get_config_dict(pretrained)[0])
    except (OSError, ValueError):
        return False


def class_of_family(model_type: str) -> Any:
    """Return the transformers class named by the family of a model type; None if an auto class loads the model."""
    import transformers

    family = family_of_model(model_type)
    name = getattr(family, "model_class", AUTO_CLASS)
    return None if name.startswith("Auto") else getattr(transformers, name)


def class_of_slow_frames(config: Mapping[str, Any]) -> Any:
    """Return the class of a LLaVA-OneVision with slow and fast frames in its config; None for other models."""
    if config.get("model_type") != "llava_onevision" or not config.get("faster_token_stride"):
        return None
    return import_module(".slow_fast", __package__).LlavaOnevisionForConditionalGeneration


def unread_keys(
    fields: Mapping[str, Any], config: PretrainedConfig, *classes: Any, prefix: str = "model.config.",
    is_published: bool = False,
) -> list[str]:  # fmt: skip
    """Return the fields of a published config that its class does not declare, and no code of class or model reads.

    Published: with fields that transformers writes. ConfigError for such a field in other configs, and for a misspelt
    field. The field of a part may stand among the fields of the whole if the config passes its value to the part.
    classes: of the model, and of configs around this config.
    """
    is_published = is_published or not _WRITTEN.isdisjoint(fields)
    parts = {name: each for name, each in vars(config).items() if hasattr(each, "sub_configs")}
    kind: Any = type(config)
    own, classes = _declared(kind), (*classes, kind)
    read = {name for each in (*classes, _modelling(kind)) for name in _read_names(each)}
    known, unread = {each for each in own if each[0] != "_"} | {"rope_theta", "rope_scaling"}, []
    for name, value in fields.items():
        if name in parts and isinstance(value, Mapping):
            unread += unread_keys(value, parts[name], *classes, prefix=f"{prefix}{name}.", is_published=is_published)
            continue
        of_parts = {part: each for part, each in parts.items() if name in _declared(each.__class__)}
        is_passed = name in own or any(getattr(each, name, None) == value for each in of_parts.values())
        nearest = nearest_name(name, known)
        start = name.replace("_end_token_id", "_start_token_id")  # models read where media start, processors both ends
        if is_passed or name in _SHARED_FIELDS or (not of_parts and ({name, start} & read or start in own)):
            _check_rope(f"{prefix}{name}", value, read | {*(getattr(config, "layer_types", None) or ())})
        elif is_published and (of_parts or num_unmatched(name, nearest) > _MOST_MISTYPED):
            unread.append(f"{prefix}{name}")
        elif of_parts:
            raise ConfigError(
                f"{prefix}{name} reaches nothing: write {' or '.join(f'{prefix}{part}.{name}' for part in of_parts)}"
            )
        else:
            remedy = did_you_mean(name, sorted(known), otherwise=f"the nearest is {nearest!r}; leave it out")
            raise ConfigError(
                f"{prefix}{name} reaches nothing: {type(config).__name__} does not declare it, and the model's code "
                f"does not read it: {remedy}"
            )
    return unread


def _check_rope(name: str, value: Any, read: set[str]) -> None:
    """Raise ConfigError for an option of rotary positions that no code reads; a kind of layers may have its own."""
    if not isinstance(value, Mapping) or not name.rpartition(".")[2].startswith("rope_"):
        return
    known = read | _read_names(import_module("transformers.modeling_rope_utils"))
    for option, each in value.items():
        if option not in known:
            raise ConfigError(f"{name}.{option} reaches nothing: {did_you_mean(option, known)}")
        _check_rope(name, each, known)


@cache
def _declared(config_class: Any) -> set[str]:
    """Return the fields that a config class declares, by any name, with attributes set by its constructor."""
    names = {name for base in config_class.__mro__ for name in inspect.signature(base.__init__).parameters}
    with suppress(*_UNBUILT):  # some classes need arguments
        names |= vars(config_class()).keys()
    return {*names, *config_class.attribute_map, *config_class.sub_configs} - {"self", "args", "kwargs"}


_WRITTEN = {"architectures", "transformers_version"}  # fields of a config that transformers has written
_SHARED_FIELDS = ("model_type", "tie_word_embeddings")  # read by transformers itself, also of a part
_MOST_MISTYPED = 2  # letters of a name without a partner in the known name
_SHARED_MODULES = re.compile(r"(builtins|torch|transformers\.(?!models\.|modeling_rope_utils))\b")  # of all models
_READ = re.compile(r"(?<!generation_)config\.(\w+)|(?:getattr\([\w.]+, |pop\(|get\(|[{,]\s*)\"(\w+)\"|\[\"(\w+)\"\]")


def _modelling(config_class: type) -> Any:
    """Return the module of models beside a config's module; the class without such a module."""
    try:
        return import_module(config_class.__module__.replace(".configuration_", ".modeling_"))
    except ImportError:
        return config_class


@cache
def _read_names(code: Any) -> set[str]:
    """Return the names of fields and options in the source of a module, or of the modules of a class and its bases."""
    modules = {each.__module__ for each in code.__mro__[:-1]} if isinstance(code, type) else {code.__name__}
    modules = {each for each in modules if not _SHARED_MODULES.match(each)}
    found = [pair for module in modules for pair in _READ.findall(inspect.getsource(sys.modules[module]))]
    return {name for pair in found for name in pair if name}


def check_config(config: PretrainedConfig) -> None:
    """Raise ConfigError for a model with quantised weights."""
    quantization = getattr(config, "quantization_config", None)
    if not quantization:
        return
    fields = quantization if isinstance(quantization, Mapping) else quantization.to_dict()
    method = fields.get("quant_method", "unknown")
    raise ConfigError(
        f"the model's weights are quantised ({getattr(method, 'value', method)}): FSDP2 cannot shard packed codes with "
        "scales. Use the original model in bfloat16, with an adapter: its frozen weights are sharded over ranks"
    )


def use_liger_kernels(model: PreTrainedModel) -> None:
    """Run a model's norms, rotary positions and MLPs with liger-kernel.

    liger-kernel's losses stay unused: the losses replace the forward pass, and loss.py already computes logits in
    chunks. ConfigError without liger-kernel or CUDA, and for an unknown model type.
    """
    if find_spec("liger_kernel") is None:
        raise ConfigError("model.use_liger_kernel needs liger-kernel: pip install liger-kernel, or set it to false")
    if not torch.cuda.is_available():
        raise ConfigError("model.use_liger_kernel needs CUDA, and this machine has none: set it to false")
    patches = import_module("liger_kernel.transformers.monkey_patch")
    if (kind := model.config.model_type) not in patches.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(f"liger-kernel has no kernels for model type {kind!r}: set model.use_liger_kernel to false")
    patches._apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=False)


# The user's own model class, named in a run's file: "module:Class" or "path/to/file.py:Class".


def build_own(class_path: str, args: Mapping[str, Any], *, dtype: torch.dtype, is_empty: bool) -> torch.nn.Module:
    """Return the model made by a class or function from the arguments; on the meta device if is_empty.

    ConfigError for an unknown name, and for a result other than a torch.nn.Module.
    """
    _, make = own_code(class_path, setting="model.class_path", what="Class")
    with torch.device("meta" if is_empty else "cpu"):
        made = make(**args)
    if not isinstance(made, torch.nn.Module):
        raise ConfigError(
            f"model.class_path {class_path} makes a {type(made).__name__}, expected a torch.nn.Module: name a model "
            "class, or a function that makes a model"
        )
    return made.to(dtype)


# Models of diffusers, named in a run's file by folder or config.


def diffusers_config(pretrained: str | None, config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the config of a diffusers model; None for other models and for a hub id."""
    if config is None and pretrained is not None and (path := Path(pretrained) / "config.json").is_file():
        config = json.loads(path.read_text())
    return config if config is not None and DIFFUSERS_CLASS in config else None


def build_diffusers(
    config: Mapping[str, Any], pretrained: str | None, *, dtype: torch.dtype, is_empty: bool
) -> torch.nn.Module:
    """Return the model; on the meta device if is_empty. ConfigError without diffusers, and for an unknown class."""
    if find_spec("diffusers") is None:
        raise ConfigError(f"model {config[DIFFUSERS_CLASS]} needs diffusers: pip install 'lmms-stream[generation]'")
    import diffusers

    found: object = getattr(diffusers, str(config[DIFFUSERS_CLASS]), None)
    kind: Any = found
    if not (isinstance(found, type) and issubclass(found, diffusers.ModelMixin)):
        raise ConfigError(
            f"diffusers {diffusers.__version__} has no model {config[DIFFUSERS_CLASS]!r}: correct {DIFFUSERS_CLASS}"
        )
    if pretrained is not None and not is_empty:
        loaded: torch.nn.Module = kind.from_pretrained(pretrained, torch_dtype=dtype)
        return loaded
    known = {name for name in inspect.signature(kind.__init__).parameters if name != "self"}
    for name in config if pretrained is None else ():
        if name not in known and not name.startswith("_"):
            raise ConfigError(f"model.config.{name} reaches nothing: {did_you_mean(name, known)}")
    with torch.device("meta" if is_empty else "cpu"):
        made: torch.nn.Module = kind.from_config(dict(config))
    return made.to(dtype)
