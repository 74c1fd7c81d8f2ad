"""Parts of a model that read media, its towers, which every rank calls equally often.

Ranks gather the parameters of a block together. Where a rank's packs have images and another's have none, the first
would wait for the second, so kinds of media that a batch lacks are run on the smallest there is of that kind, and
count nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from ...errors import ConfigError
from ...processors.families.family import Family
from ...processors.families.installed import AsInstalled
from ...types import Batch
from .by_sample import BOUNDS


class Dummies:
    """The smallest media of a family, by kind, on whatever device they are asked for."""

    def __init__(self, family: Family):
        self._family = family
        self.of_kind = {
            kind: {name: torch.from_numpy(np.array(value)) for name, value in inputs.items()}
            for kind, inputs in family.dummy().items()
        }

    def zero(self, base: Any, inputs: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
        """0, as a sum over what the towers make of each kind that inputs lack: float32[].

        Call it before the model runs, so that all ranks run the towers first.
        """
        present = self._family.kinds_of(inputs)
        total = torch.zeros((), device=device)
        for kind in self.of_kind:
            if kind not in present:
                for feature in tree_leaves(self._features(base, kind, device)):
                    total = total + 0 * feature.float().sum()
        return total

    @contextmanager
    def run_first(self, base: Any, inputs: Mapping[str, Any], device: torch.device) -> Iterator[torch.Tensor]:
        """Runs all kinds in the same order on all ranks, on media of inputs or on the smallest; gives 0, as `zero`.

        Inside, the model is given what its towers made, and does not run them again. For a family with several towers:
        ranks gather the parameters of one after the other, and where media of one kind are read before the model
        runs and those of another within, two ranks would gather them in two orders.
        """
        total = torch.zeros((), device=device)
        methods: dict[str, Any] = {}
        for kind in self.of_kind:
            if not hasattr(base, f"get_{kind}_features"):
                raise ConfigError(
                    f"{type(base).__name__} has no get_{kind}_features, and a model with several towers needs one for "
                    "each kind of media, so that ranks run the towers in the same order: give the model one"
                )
            own = [*model_inputs(self._family, base, self.of_kind[kind])]
            if own[0] in inputs:
                features = getattr(base, f"get_{kind}_features")(**{name: inputs[name] for name in own})
                methods[f"get_{kind}_features"] = partial(_same, features)
            else:
                for feature in tree_leaves(self._features(base, kind, device)):
                    total = total + 0 * feature.float().sum()
        vars(base).update(methods)
        try:
            yield total
        finally:
            for name in methods:
                del vars(base)[name]

    def num_tokens(self, base: Any, device: torch.device) -> dict[str, int]:
        """Tokens of each."""
        return {kind: _num_rows(tree_leaves(self._features(base, kind, device))[0]) for kind in self.of_kind}

    def _features(self, base: Any, kind: str, device: torch.device) -> Any:
        """Features in the places of the tokens of a medium, by transformers' get_image_features and its like."""
        self.of_kind[kind] = {name: tensor.to(device) for name, tensor in self.of_kind[kind].items()}
        inputs = model_inputs(self._family, base, self.of_kind[kind])
        own = getattr(self._family, "features", None)  # of a family whose model has no method of that name
        features = getattr(base, f"get_{kind}_features")(**inputs) if own is None else own(base, kind, inputs)
        return features_of(features)


def features_of(found: Any) -> Any:
    """The features in a result of get_image_features and its like, which replace the tokens of media, or are added
    later."""
    if not hasattr(found, "last_hidden_state"):  # of transformers 4
        return found
    # Until 5.21 the towers of sound of Omni models have no pooler_output.
    first = found.last_hidden_state if found.pooler_output is None else found.pooler_output
    return first, *(getattr(found, "deepstack_features", None) or ())


def without_bounds_of_text(_: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Before a tower's forward pass: keep the bounds of samples from it, whose attention would cut media there.

    transformers hands all arguments of a model to its towers; until 5.19, these too to those of Qwen-VL.
    """
    return inputs, {name: value for name, value in named.items() if name not in BOUNDS}


def _num_rows(features: torch.Tensor) -> int:
    """Number of rows of features, which may have an axis of tiles before that of tokens."""
    return features.numel() // features.shape[-1]


def _same(features: Any, *_: Any, **__: Any) -> Any:
    return features


def model_inputs(family: Family | None, model: Any, inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Inputs of a batch as the model takes them: a family may have batches hold them without padding.

    ConfigError for media that the family's model cannot read together.
    """
    if (refused := getattr(family, "check_pack", None)) is not None and (reason := refused(inputs)) is not None:
        raise ConfigError(f"a pack {reason}")
    own = getattr(family, "model_inputs", None)
    made: Mapping[str, torch.Tensor] = inputs if own is None else own(model, inputs)
    return made


def positions_along_axes(model: Any, batch: Batch, given: Mapping[str, Any]) -> torch.Tensor:
    """Positions of a pack with media as the model counts them: those in each sample, then its axes, int64[1 + n, 1, T].

    given: its arguments. The model counts the pack as one long sample; here each sample begins at 0.
    """
    names = inspect.signature(model.get_rope_index).parameters.keys() - {"attention_mask"}
    known = {name: given[name].cpu() for name in names if given.get(name) is not None}
    whole, _ = model.get_rope_index(**known)
    bounds = batch.cu_seqlens.cpu()
    firsts = whole[..., bounds[:-1].long()].repeat_interleave(bounds.diff().long(), dim=-1)
    return torch.cat([batch.position_ids[None], (whole - firsts).to(batch.position_ids.device)])


def parts_of(model: Any) -> list[str]:
    """The names of the parts of a model's base model, and of those that lie beside it."""
    inner = model.base_model if model.base_model is not model else getattr(model, "model", model)
    return [*dict.fromkeys(name for each in (inner, model) for name, _ in each.named_children())]


def has_modules(model: torch.nn.Module, paths: Iterable[str]) -> bool:
    """Whether a model has modules at all these paths."""
    try:
        return all(model.get_submodule(path) is not None for path in paths)
    except AttributeError:
        return False


def family_of(processors: Iterable[Any], config: Any) -> Family | None:
    """The family of a run's processors; None where all read text alone.

    config: of the model. ConfigError for several families, and for one that is not the model's.
    """
    families: list[Family] = [each.family for each in processors if getattr(each, "family", None) is not None]
    found = {_name_of(getattr(each, "ours", each)): each for each in reversed(families)}
    if len(found) > 1:
        raise ConfigError(f"processors are of families {' and '.join(sorted(found))}: take those of one family")
    family = families[0] if families else None
    if family is None:
        return None
    if config.model_type not in family.model_types:
        raise ConfigError(
            f"the processor makes inputs of {', '.join(family.model_types)}, and the model is {config.model_type}: "
            "take the model's own processor"
        )
    for each in families:
        each.check_model(config.to_dict())
    return family


def _name_of(family: Any) -> str:
    return family.name if isinstance(family, AsInstalled) else type(family).__name__


def check_text(model: Any, what: str) -> None:
    """Raise ConfigError for a model that reads media: its ranks cannot compute logits of every pack."""
    if model.family is not None:
        raise ConfigError(
            f"{what} is given the logits of texts, and this model reads media: override evaluation_step, or leave it "
            "out"
        )


def media_token_id(family: Family, config: Any, kind: str) -> int:
    """The token that stands for a medium; ConfigError for a model that has none."""
    if kind in (of_family := getattr(family, "token_ids", {})):
        return int(of_family[kind])
    for name in (f"{kind}_token_id", f"{kind}_token_index"):
        if isinstance(found := getattr(config, name, None), int):
            return found
    raise ConfigError(f"model type {config.model_type} has no {kind}_token_id: take a model that reads {kind}s")
