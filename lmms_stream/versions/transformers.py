"""What differs between the versions of transformers, each with the version that ends it. Nothing is imported."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from importlib import import_module
from importlib.metadata import version
from typing import Any, NamedTuple

_INSTALLED = tuple(int(part) for part in version("transformers").split(".")[:2])

# Until 5.0: Qwen3-Omni's processor cuts sounds at the chunk_length of its folder; since then it reads them whole.
CUTS_SOUNDS_OF_QWEN3_OMNI = _INSTALLED < (5, 0)

# Until 5.0: settings in files of their own come before those nested in processor_config.json; since then after them.
NESTED_SETTINGS_COME_FIRST = _INSTALLED >= (5, 0)

# Until 5.18: Qwen2.5-VL's model cuts the seconds of a pair of frames to a whole number before it counts positions.
CUTS_SECONDS_OF_FRAMES = _INSTALLED < (5, 18)

# Until 5.18: LLaVA-OneVision's model puts the token that ends a video behind the features that it is given.
ENDS_FEATURES_OF_LLAVA_VIDEOS = _INSTALLED >= (5, 18)

# Until 5.23: chunks of Llama 4 are counted from the start of a pack; since then from the start of each sample.
COUNTS_CHUNKS_BY_SAMPLE = _INSTALLED >= (5, 23)

# Until 5.9: sdpa and eager get no mask in Qwen3-Omni's tower of sound, so clips see one another.
MIXES_CLIPS_OF_QWEN3_OMNI = _INSTALLED < (5, 9)

# Until 5.0: gpt-oss's experts are given weights of all experts for each token; since then those of the chosen ones.
GIVES_WEIGHTS_OF_CHOSEN_EXPERTS = _INSTALLED >= (5, 0)

# Until 5.0: save_pretrained is given weights by their names in the model and renames them itself.
KEEPS_NAMES: dict[str, Any] = {} if _INSTALLED < (5, 0) else {"save_original_format": False}

# Words of plans for tensor parallelism: since 5.0, and until then.
_OF_PLANS = {"colwise_gather_output": "colwise_rep", "rowwise_split_input": "rowwise_rep"}


def plan_of_cuts(model: Any) -> dict[str, str]:
    """Names of a model's parts, with * for numbers -> how a plan for tensor parallelism cuts them, in words of 4.57.

    Without the embedding, which since 5.0 is cut by its rows: it may stay whole, as it did.
    """
    # 4.57 replaces what a class says of its head by what the config says of the blocks.
    plans = (getattr(type(model), "_tp_plan", None), getattr(model, "_tp_plan", None))
    plan: dict[str, str] = {name: word for each in plans for name, word in (each or {}).items()}
    return {name: _OF_PLANS.get(word, word) for name, word in plan.items() if word != "embedding_rowwise"}


def special_tokens_of(tokenizer: Any) -> dict[str, Any]:
    """A tokenizer's special tokens by name. Since 5.0 its special_tokens_map lacks those without a name of their own.

    They are in the fingerprints of lengths indexes that were measured before.
    """
    named = dict(tokenizer.special_tokens_map)
    others = tokenizer.extra_special_tokens if _INSTALLED >= (5, 0) else ()
    return {**named, "additional_special_tokens": list(others)} if others else named


def by_torchvision(name: str) -> Any:
    """The image processor of a name that resizes by torchvision. Until 5.0 it has another name than Pillow's."""
    return getattr(import_module("transformers"), name if _INSTALLED >= (5, 0) else f"{name}Fast")


@contextmanager
def without_progress() -> Iterator[None]:
    """Inside, transformers draws no bars. Since 5.0 save_pretrained draws one."""
    from transformers.utils import logging

    kept = logging._tqdm_active
    logging._tqdm_active = False
    try:
        yield
    finally:
        logging._tqdm_active = kept


def as_in_files(model: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """What files hold of these tensors. Until 5.0 the same; since then each expert, say, of a tensor of all."""
    if _INSTALLED < (5, 0):
        return tensors
    with _own_classes(model):
        made: dict[str, Any] = import_module("transformers.core_model_loading").revert_weight_conversion(model, tensors)
    return made


@contextmanager
def _own_classes(model: Any) -> Iterator[None]:
    """Inside, parts of a model that FSDP shards are of the classes that transformers knows."""
    from torch.distributed.fsdp import FSDPModule

    sharded = [(module, type(module)) for module in model.modules() if isinstance(module, FSDPModule)]
    for module, of_fsdp in sharded:
        module.__class__ = of_fsdp.__mro__[2]  # after FSDP's class of it, and FSDPModule
    try:
        yield
    finally:
        for module, of_fsdp in sharded:
            module.__class__ = of_fsdp


class MadeOf(NamedTuple):
    """Keys of files, and how their tensors become some of a model; None where the only one is copied."""

    keys: tuple[str, ...]
    convert: Callable[[Sequence[Any]], dict[str, Any]] | None


HAS_RULES_FOR_NAMES = _INSTALLED >= (5, 0)


def made_of_files(model: Any, keys: Iterable[str]) -> list[tuple[str, MadeOf]]:
    """Names of a model's weights, with what in files they are made of, as from_pretrained has it since 5.0."""
    core = import_module("transformers.core_model_loading")
    rules = import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
    renames = [each for each in rules if isinstance(each, core.WeightRenaming)]
    converters = [each for each in rules if isinstance(each, core.WeightConverter)]
    state, prefix = model.state_dict(), model.base_model_prefix
    found: dict[tuple[str, str | None], list[tuple[str, str]]] = {}
    for key in sorted(keys, key=core.dot_natural_key):
        name, pattern = core.rename_source_key(key, renames, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = core.rename_source_key(key, [], [], prefix, state)
        found.setdefault((name, None if pattern else key), []).append((key, pattern))
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}

    def convert(name: str, parts: Sequence[tuple[str, str]], tensors: Sequence[Any]) -> dict[str, Any]:
        mapping = deepcopy(by_pattern[parts[0][1]])
        for (key, pattern), tensor in zip(parts, tensors, strict=True):
            mapping.add_tensor(name, key, pattern, tensor)
        made = mapping.convert(name, model=model, config=model.config)
        return {each: made[each][0] if isinstance(made[each], list) else made[each] for each in made}

    return [
        (name, MadeOf(tuple(key for key, _ in parts), None if copied else partial(convert, name, parts)))
        for (name, copied), parts in found.items()
    ]


def checkpoint_activations(model: Any) -> None:
    """Have a model's blocks run again in the backward pass. Until 5.23 the method has another name."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


@contextmanager
def attention_is_ours() -> Iterator[None]:
    """Inside, models may be given an attention with "sdpa" in its name that is ours.

    Since 5.0 transformers refuses these names for classes that its own sdpa is not for, such as gpt-oss.
    """
    from transformers import PreTrainedModel

    kept = PreTrainedModel._sdpa_can_dispatch
    PreTrainedModel._sdpa_can_dispatch = lambda self, is_init_check=False: True
    try:
        yield
    finally:
        PreTrainedModel._sdpa_can_dispatch = kept


# Names of arguments: until 5.23, and since then.
_RENAMED = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}


def as_installed(said: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Arguments of any version by the names of the installed one. names: of its TrainingArguments.

    Since 5.0 a share of the run is said by warmup_steps, which was warmup_ratio. Other values stay as they are.
    """
    values = dict(said)
    for old, new in _RENAMED.items():
        other, known = (old, new) if new in names else (new, old)
        if other in values:
            values.setdefault(known, values.pop(other))
    if "warmup_ratio" in values and "warmup_ratio" not in names:
        ratio = values.pop("warmup_ratio")
        values["warmup_steps"] = values.get("warmup_steps") or ratio
    return values


@contextmanager
def masks_of_packs() -> Iterator[None]:
    """Inside, transformers makes each mask as for a pack, by the places of tokens in the pack.

    Since 5.0 it reads from the device, for each mask, whether there are several samples. Since 5.23 it numbers tokens
    from the start of their sample, and Gemma 3, in its layers with windows, looks these numbers up in the pack: an
    image of the second sample would be seen where the first sample has one. Chunks alone (Llama 4) are numbered so.
    """
    if _INSTALLED < (5, 0):
        yield
        return
    from transformers import masking_utils

    ours: dict[str, Any] = {"find_packed_sequence_indices": _samples_of_tokens}
    if _INSTALLED >= (5, 23):
        ours["chunked_causal_mask_function"] = partial(_in_chunks, masking_utils.chunked_causal_mask_function)
        ours["remap_positions_for_packed_sequence"] = partial(
            _by_sample_in_chunks, masking_utils.remap_positions_for_packed_sequence
        )
    kept = {name: getattr(masking_utils, name) for name in ours}
    vars(masking_utils).update(ours)
    try:
        yield
    finally:
        vars(masking_utils).update(kept)


def _samples_of_tokens(position_ids: Any) -> Any:
    """int64[1, T], from 0, of positions that go up by 1 in each sample."""
    return (position_ids.diff(prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)


def _in_chunks(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    mask_function = make(*args, **kwargs)
    mask_function.is_chunked = True
    return mask_function


def _by_sample_in_chunks(remap: Callable[..., Any], mask_function: Any, position_ids: Any) -> Any:
    return remap(mask_function, position_ids) if hasattr(mask_function, "is_chunked") else mask_function


def name_missing_output() -> None:
    """Let Llama 4 run: since 5.24 it asks the output of its part of text for image_outputs, which that has not."""
    from transformers.modeling_outputs import MoeCausalLMOutputWithPast

    if _INSTALLED >= (5, 24) and not hasattr(MoeCausalLMOutputWithPast, "image_outputs"):
        MoeCausalLMOutputWithPast.image_outputs = None
