"""Towers: the parts of a model that read media. Every rank calls each tower equally often.

Ranks gather the parameters of a block together. A rank with images would wait for a rank without images. For each kind
of media missing in a batch, the tower therefore runs on the smallest medium of this kind, with weight 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from ...errors import ConfigError
from ...processors.families.family import Family
from ...processors.families.installed import AsInstalled
from ...types import Batch
from .by_sample import BOUNDS


class MediaShares(Protocol):
    """The media of a pack that several ranks share: see plugins/parallel/sequence.py."""

    def shares(self, patches: Sequence[Sequence[int]]) -> list[slice]:
        """Return this rank's pieces of each kind of media. patches: of each piece, rows of the tower's input."""

    def of_part(self, features: torch.Tensor, is_medium: torch.Tensor) -> torch.Tensor:
        """Return the features of this rank's tokens, float[m, d], from the features of this rank's share, float[n, d].

        is_medium: the pack's tokens of this kind of media, bool[1, T].
        """


class Dummies:
    """The smallest media of a family, by kind, moved to the requested device."""

    def __init__(self, family: Family):
        self._family = family
        self.of_kind = {
            kind: {name: torch.from_numpy(np.array(value)) for name, value in inputs.items()}
            for kind, inputs in family.dummy().items()
        }

    def zero(self, base: Any, inputs: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
        """Return 0, computed from the towers' features of each kind missing in inputs: float32[].

        Call this method before the model runs: all ranks must run the towers first.
        """
        present = self._family.kinds_of(inputs)
        total = torch.zeros((), device=device)
        for kind in self.of_kind:
            if kind not in present:
                for feature in tree_leaves(self._features(base, kind, device)):
                    total = total + 0 * feature.float().sum()
        return total

    @contextmanager
    def run_first(
        self, base: Any, inputs: Mapping[str, Any], input_ids: torch.Tensor, shares: MediaShares | None = None
    ) -> Iterator[torch.Tensor]:
        """Run all towers in the same order on all ranks, on media of inputs or on the smallest; yield 0, like `zero`.

        Inside, the model receives the towers' features and does not run the towers again. For a family with several
        towers: ranks gather the parameters of towers one after another. If a kind were read before the model runs and
        another kind within, two ranks could gather in different orders.

        input_ids: of the whole pack. shares: if set, this rank runs the towers on its share of the pack's media, and
        the model receives the features of this rank's tokens.
        """
        total = torch.zeros((), device=input_ids.device)
        methods: dict[str, Any] = {}
        media = {kind: self._given(base, kind, inputs) for kind in self.of_kind}
        own = {} if shares is None else self._shares(media, shares)
        for kind, given in media.items():
            if given is None:
                for feature in tree_leaves(self._features(base, kind, input_ids.device)):
                    total = total + 0 * feature.float().sum()
                continue
            if shares is None:
                features = getattr(base, f"get_{kind}_features")(**given)
            else:
                token = media_token_id(self._family, base.config, kind)
                features = self._of_part(base, kind, own[kind], input_ids == token, shares)
            methods[f"get_{kind}_features"] = partial(_same, features)
        vars(base).update(methods)
        try:
            yield total
        finally:
            for name in methods:
                del vars(base)[name]

    def _given(self, base: Any, kind: str, inputs: Mapping[str, Any]) -> Mapping[str, torch.Tensor] | None:
        """Return the model's inputs of a kind of media, or None."""
        if not hasattr(base, f"get_{kind}_features"):
            raise ConfigError(
                f"{type(base).__name__} has no get_{kind}_features, and a model with several towers, or with "
                "train.sequence_parallel, needs such a method for each kind of media, so that ranks run the towers in "
                "the same order: add it to the model"
            )
        own = [*model_inputs(self._family, base, self.of_kind[kind])]
        return {name: inputs[name] for name in own} if own[0] in inputs else None

    def _shares(
        self, media: Mapping[str, Mapping[str, torch.Tensor] | None], shares: MediaShares
    ) -> dict[str, Mapping[str, torch.Tensor]]:
        """Return the model's inputs of this rank's share of each kind of media; {} for a kind without a share."""
        cut = {kind: self._family.pieces(kind, given) for kind, given in media.items() if given is not None}
        every = shares.shares([patches for _, patches in cut.values()])
        return {kind: _cut(*each, share) for (kind, each), share in zip(cut.items(), every, strict=True)}

    def _of_part(
        self, base: Any, kind: str, own: Mapping[str, torch.Tensor], is_medium: torch.Tensor, shares: MediaShares
    ) -> Any:
        """Return a result like get_image_features's, for the media of this rank's tokens; see run_first.

        own: inputs of this rank's share. A rank without a share runs the tower on the smallest medium.
        """
        given = own or model_inputs(self._family, base, self._dummy(kind, is_medium.device))
        found = getattr(base, f"get_{kind}_features")(**given)
        levels = [_joined(level) for level in _levels(found)]
        rows = torch.cat(levels, dim=1)
        of_part = shares.of_part(rows if own else rows[:0], is_medium)
        return _with_levels(found, of_part.split([level.shape[1] for level in levels], dim=1))

    def _dummy(self, kind: str, device: torch.device) -> Mapping[str, torch.Tensor]:
        self.of_kind[kind] = {name: tensor.to(device) for name, tensor in self.of_kind[kind].items()}
        return self.of_kind[kind]

    def num_tokens(self, base: Any, device: torch.device) -> dict[str, int]:
        """Return the number of tokens of the smallest medium of each kind."""
        return {kind: _num_rows(tree_leaves(self._features(base, kind, device))[0]) for kind in self.of_kind}

    def _features(self, base: Any, kind: str, device: torch.device) -> Any:
        """Return the features of the smallest medium, from the family, or from transformers' get_image_features, …"""
        inputs = model_inputs(self._family, base, self._dummy(kind, device))
        own = getattr(self._family, "features", None)  # for models without get_…_features
        features = getattr(base, f"get_{kind}_features")(**inputs) if own is None else own(base, kind, inputs)
        return features_of(features)


def check_shares(family: Family, attentions: Sequence[str], asked: str) -> None:
    """Raise ConfigError if ranks cannot share a family's media. attentions: required. asked: setting with its value."""
    if not {*attentions} <= {*family.attentions}:
        reason = f"has no attention without a mask ({' and '.join(attentions)})"
    elif not hasattr(family, "pieces"):
        reason = "has no method `pieces`, which cuts media into shares"
    else:
        return
    raise ConfigError(
        f"{asked} shares the tokens and media of a pack, and the family of {', '.join(family.model_types)} {reason}: "
        "set it to 1, and gradient_checkpointing to true where packs need too much memory"
    )


def _cut(given: Mapping[str, torch.Tensor], patches: Sequence[int], share: slice) -> Mapping[str, torch.Tensor]:
    """Return a share of pieces, {} for no piece. given: tensors with a row for each piece, or a row for each patch."""
    if share.start == share.stop:
        return {}
    ends = [0, *accumulate(patches)]
    of_patches = slice(ends[share.start], ends[share.stop])
    return {name: tensor[share if len(tensor) == len(patches) else of_patches] for name, tensor in given.items()}


def _levels(found: Any) -> list[Any]:
    """Return features in a result of get_image_features, …: in place of media tokens, then added in later layers."""
    features = features_of(found)
    if features is not found:
        return [*features]
    if torch.is_tensor(found) or torch.is_tensor(found[0]):
        return [found]
    first, later = found
    return [first, *later]


def _joined(level: Any) -> torch.Tensor:
    """Return features of tokens, [n, d], from a tensor or from a tensor for each medium."""
    return torch.cat([each.flatten(0, -2) for each in tree_leaves(level)])


def _with_levels(found: Any, levels: Sequence[torch.Tensor]) -> Any:
    """Return a result of get_image_features, … with new features of tokens: [n, d] for each level."""
    first, *later = (
        rows.view(*[1] * (level.ndim - 2), *rows.shape) if torch.is_tensor(level) else [rows]
        for level, rows in zip(_levels(found), levels, strict=True)
    )
    if features_of(found) is found:
        return (first, later) if later else first
    found["last_hidden_state"] = found["pooler_output"] = first  # models take sounds from the former
    if later:
        found["deepstack_features"] = later
    return found


def features_of(found: Any) -> Any:
    """Return the features in a result of get_image_features, …: in place of media tokens, or added in later layers."""
    if not hasattr(found, "last_hidden_state"):  # of transformers 4
        return found
    # Until 5.21 the towers of sound of Omni models have no pooler_output.
    first = found.last_hidden_state if found.pooler_output is None else found.pooler_output
    return first, *(getattr(found, "deepstack_features", None) or ())


def without_bounds_of_text(_: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Remove the bounds of samples before a tower's forward pass: its attention would cut media at the bounds.

    transformers passes all arguments of a model to its towers; until 5.19, the bounds too to the towers of Qwen-VL.
    """
    return inputs, {name: value for name, value in named.items() if name not in BOUNDS}


def _num_rows(features: torch.Tensor) -> int:
    """Return the number of rows of features; an axis of tiles may precede the axis of tokens."""
    return features.numel() // features.shape[-1]


def _same(features: Any, *_: Any, **__: Any) -> Any:
    return features


def model_inputs(family: Family | None, model: Any, inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Convert inputs of a batch to the model's inputs: a family may store them in batches without padding.

    ConfigError for media that the family's model cannot read together.
    """
    if (refused := getattr(family, "check_pack", None)) is not None and (reason := refused(inputs)) is not None:
        raise ConfigError(f"a pack {reason}")
    own = getattr(family, "model_inputs", None)
    made: Mapping[str, torch.Tensor] = inputs if own is None else own(model, inputs)
    return made


def positions_along_axes(model: Any, batch: Batch, given: Mapping[str, Any]) -> torch.Tensor:
    """Return positions of a pack with media, int64[1 + n, 1, T]: position in the sample, then the model's n axes.

    given: the model's arguments. The model counts through the pack; here each sample begins at 0.
    """
    names = inspect.signature(model.get_rope_index).parameters.keys() - {"attention_mask"}
    known = {name: given[name].cpu() for name in names if given.get(name) is not None}
    whole, _ = model.get_rope_index(**known)
    bounds = batch.cu_seqlens.cpu()
    firsts = whole[..., bounds[:-1].long()].repeat_interleave(bounds.diff().long(), dim=-1)
    return torch.cat([batch.position_ids[None], (whole - firsts).to(batch.position_ids.device)])


def parts_of(model: Any) -> list[str]:
    """Return names of the child modules of a model's base model, and of the model."""
    inner = model.base_model if model.base_model is not model else getattr(model, "model", model)
    return [*dict.fromkeys(name for each in (inner, model) for name, _ in each.named_children())]


def has_modules(model: torch.nn.Module, paths: Iterable[str]) -> bool:
    """Return whether a model has modules at all paths."""
    try:
        return all(model.get_submodule(path) is not None for path in paths)
    except AttributeError:
        return False


def family_of(processors: Iterable[Any], config: Any) -> Family | None:
    """Return the family of a run's processors; None if all read only text.

    config: the model's config. ConfigError for several families, and for a family of another model.
    """
    families: list[Family] = [each.family for each in processors if getattr(each, "family", None) is not None]
    found = {_name_of(getattr(each, "ours", each)): each for each in reversed(families)}
    if len(found) > 1:
        raise ConfigError(
            f"processors are of families {' and '.join(sorted(found))}: use processors of a single family"
        )
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
    """Raise ConfigError for a model that reads media: ranks cannot compute logits of every pack."""
    if model.family is not None:
        raise ConfigError(
            f"{what} is given the logits of texts, and this model reads media: override evaluation_step, or leave it "
            "out"
        )


def media_token_id(family: Family, config: Any, kind: str) -> int:
    """Return the id of the placeholder token of a medium; ConfigError for a model without this token."""
    if kind in (of_family := getattr(family, "token_ids", {})):
        return int(of_family[kind])
    for name in (f"{kind}_token_id", f"{kind}_token_index"):
        if isinstance(found := getattr(config, name, None), int):
            return found
    raise ConfigError(f"model type {config.model_type} has no {kind}_token_id: take a model that reads {kind}s")
