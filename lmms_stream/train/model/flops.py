"""How much arithmetic a model's training takes, and how much a device can do. model, lengths -> FLOPs.

The formula is that of PaLM (Chowdhery et al. 2022, appendix B): 6 N + 12 L H Q T a token, of N parameters, L layers, H
heads of size Q, and T tokens that attend to one another. Backward counts as twice the forward, recomputation does not
count, and attention counts as if it were not causal. T is the length of the token's own segment, so that the sum over a
pack is exact. N leaves out embeddings, which are looked up, and counts the head only for tokens that predict a target.
Experts count by the share of them that a token passes. A frozen parameter counts 4 instead of 6, and 2 where nothing
before it is trained, as gradients end there: with an adapter, at what reads the input of the first block. What towers
do with media is in media_flops.py.

Tests compare the formulas with torch's FlopCounterMode, which cannot replace them: on the meta device it fails at
towers that read grids (14 of 21 kinds of media of 13 families) and at most models of transformers 4, it counts pairs
beyond a window, and it takes 1 s at 7B parameters and 4 s at 671B, the formulas 2 to 6 ms.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from .media_flops import MediaFlops, media_flops, media_parts

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Dense bf16 of tensor cores, in TFLOP/s, as the makers' data sheets give it; a device by words of its name.
PEAK_TFLOPS = (
    ("B200", 2250.0), ("GB200", 2500.0),
    ("H200 NVL", 835.5), ("H200", 989.4), ("GH200", 989.4),
    ("H100 PCIe", 756.0), ("H100 NVL", 835.5), ("H100", 989.4), ("H800 PCIe", 756.0), ("H800", 989.4), ("H20", 148.0),
    ("A100", 312.0), ("A800", 312.0), ("A40", 149.7), ("A30", 165.0), ("A10", 125.0), ("RTX A6000", 154.8),
    ("L40S", 362.0), ("L40", 181.0), ("L4", 121.0), ("RTX 4090", 165.2), ("RTX 3090", 71.0),
    ("MI300X", 1307.4), ("MI325X", 1307.4), ("MI250X", 383.0),
)  # fmt: skip
_SQUARES = {"full_attention": None, "sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
_READS_INPUT = re.compile(r"\.(q|k|v|qkv|q_a|kv_a)_proj(_with_mqa)?\.|\.(Wqkv|query_key_value|c_attn)\.")  # of a block
_NOT_MULTIPLIED = (
    ".original_module.", ".lora_embedding_A.",  # of peft: copies that are not run, and tables
    ".encoder_attn.", ".embed_tokens_extend.",  # not run on text alone: attention to an encoder, towers of Phi-4
)  # fmt: skip
# Models with layers that run several times, with further products, or with experts that compute nothing.
_OTHER_FORMULAS = ("diffllama", "dory", "git", "hrm_text", "longcat_flash")
_LAST = 1 << 30  # the stage of the last norm and the head
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_RECURRENT = ("mamba_", "lru_")  # begin settings of layers without pairs, in configs that list no kinds of layers


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFlops:
    """FLOPs of a token, of a token that predicts a target (the head), and of a pair of tokens of one segment.

    per_pair: by the window of a layer's attention, None where it sees the whole segment. towers: of the parts that read
    media.
    """

    per_token: float
    per_loss_token: float
    per_pair: dict[int | None, float]
    towers: tuple[MediaFlops, ...] = ()

    def of(
        self, lengths: NDArray[np.int64], *, num_loss_tokens: int, inputs: Sequence[Mapping[str, torch.Tensor]] = ()
    ) -> float:
        """Forward and backward over segments of these lengths, and over the media of batches with these inputs."""
        total = self.per_token * float(lengths.sum()) + self.per_loss_token * num_loss_tokens
        for window, flops in self.per_pair.items():
            seen = lengths if window is None else np.minimum(lengths, window)
            total += flops * float(np.dot(lengths, seen))
        return total + sum(tower.of(of_batch) for tower in self.towers for of_batch in inputs)


def model_flops(model: PreTrainedModel, *, towers: Mapping[str, torch.nn.Module] | None = None) -> ModelFlops | None:
    """The formula for a decoder of text, with the towers that read its media: kind of media -> tower.

    None for other models, for which it does not hold, and where the formula of a tower is not known.
    """
    config: Any = model.config
    text = config.get_text_config()
    parts = media_parts(model, towers or {})
    of_media = [media_flops(part, config) for part in parts]
    is_unknown = config.is_encoder_decoder or text.model_type in _OTHER_FORMULAS
    if is_unknown or (text is not config and not parts):
        return None
    media = {id(each) for part in parts for module in (part.tower, *part.behind) for each in module.parameters()}
    stages = _Stages(model, media)
    pairs = _pairs(text, stages)
    experts = _experts(text)
    if pairs is None or any(each is None for each in of_media):
        return None
    head = model.get_output_embeddings()
    left_out = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    left_out |= {id(head.weight), *media}
    per_token = 0.0
    for name, parameter in model.named_parameters():
        if id(parameter) in left_out or any(part in name for part in _NOT_MULTIPLIED):
            continue
        share = 1.0
        if ".experts." in name or (experts and parameter.ndim == 3 and len(parameter) == experts[0]):
            if experts is None:
                return None
            share = experts[1]
        per_token += stages.flops(name, parameter) * share
    return ModelFlops(
        per_token=per_token,
        per_loss_token=stages.flops("", head.weight),
        per_pair=pairs,
        towers=tuple(each for each in of_media if each is not None),
    )


def peak_tflops(device_name: str) -> float | None:
    """TFLOP/s of a device by its name as torch gives it; None for one that is not in the table.

    >>> peak_tflops("NVIDIA A100-SXM4-80GB")
    312.0
    """
    for words, peak in PEAK_TFLOPS:
        if all(re.search(rf"\b{word}\b", device_name) for word in words.split()):
            return peak
    return None


class _Stages:
    """Which parts of a model take part in the backward pass: embeddings, then block by block, then the head.

    media: the parameters, by id, of what makes vectors of media, which stand where embeddings do.
    """

    def __init__(self, model: PreTrainedModel, media: Collection[int]):
        trained = [
            (0 if id(each) in media else self._stage(name), each)
            for name, each in model.named_parameters()
            if each.requires_grad
        ]
        self.first = min((stage for stage, _ in trained), default=0)
        of_first = [each for stage, each in trained if stage == self.first]
        # With a norm that is trained all of its block has an input with a gradient.
        self._reads_plain = 0 < self.first < _LAST and all(each.ndim > 1 for each in of_first)

    def flops(self, name: str, parameter: torch.nn.Parameter) -> float:
        """FLOPs of a parameter for one token; per weight 2 forward, 2 for the input's gradient, 2 for its own."""
        stage = self._stage(name)
        reads_plain = self._reads_plain and stage == self.first and _READS_INPUT.search(name) is not None
        has_plain_input = stage < self.first or (reads_plain and ".lora_B." not in name) or stage == self.first == _LAST
        return parameter.numel() * (2.0 + 2.0 * (not has_plain_input) + 2.0 * parameter.requires_grad)

    def backward_share(self, layer: int) -> float:
        """The share of a layer's attention that is computed, forward and backward."""
        return 1.0 if layer + 1 >= self.first else 1 / 3

    def _stage(self, name: str) -> int:
        if (found := re.search(r"\.(?:layers|h|blocks)\.(\d+)\.", name)) is not None:
            return 1 + int(found[1])
        return 0 if "embed" in name or "wte" in name else _LAST


def _pairs(config: Any, stages: _Stages) -> dict[int | None, float] | None:
    """12 H Q of each layer, summed by its window; heads whose values have another size count half by either."""
    num_layers = getattr(config, "num_hidden_layers", None) or 0
    of_layers = getattr(config, "per_layer_config", None) or [config] * num_layers
    kinds = getattr(config, "layer_types", None) or [None] * num_layers
    if None in kinds and any(name.startswith(_RECURRENT) for name in vars(config)):
        return None
    pairs: dict[int | None, float] = {}
    for layer, kind in enumerate(kinds):
        of_layer = of_layers[layer]
        if kind is None:
            has_window = getattr(of_layer, "sliding_window", None) and getattr(of_layer, "use_sliding_window", True)
            kind = "sliding_attention" if has_window else "full_attention"
        if kind not in _SQUARES or not getattr(of_layer, "num_attention_heads", None):
            return None  # linear attention, convolutions, RWKV, xLSTM: no pairs
        name = _SQUARES[kind]
        seen = None if name is None else getattr(of_layer, name)
        pairs[seen] = pairs.get(seen, 0.0) + 6.0 * _sizes_of_heads(of_layer) * stages.backward_share(layer)
    return pairs or None


def _sizes_of_heads(config: Any) -> float:
    """Width of keys and values, summed over the heads of a layer."""
    head = getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None)
    head = head or config.hidden_size // config.num_attention_heads
    return float((head + (getattr(config, "v_head_dim", None) or head)) * config.num_attention_heads)


def _experts(config: Any) -> tuple[int, float] | None:
    """Number of experts and the share of them that a token passes; None if layers have different numbers."""
    names = (*_NUM_EXPERTS, "num_experts_per_tok")
    if not {*names}.isdisjoint(getattr(config, "per_layer_attributes", None) or ()):
        return None
    *found, of_token = (getattr(config, name, None) or 0 for name in names)
    num_experts = max(found)
    return (num_experts, of_token / num_experts) if num_experts and of_token else None


# FLOPs of models that make images, of any class: counted by torch on one image. model, what runs it -> FLOPs.
#
# The model runs forward and backward once on the meta device, which computes shapes alone, so that nothing is read or
# written. Frozen parts beside the model, as an autoencoder or an encoder, do not count.

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageFlops:
    """See ModelFlops, of which these are the same for tasks whose units are images."""

    per_image: float

    def of(
        self, lengths: NDArray[np.int64], *, num_loss_tokens: int, inputs: Sequence[Mapping[str, torch.Tensor]] = ()
    ) -> float:
        """Forward and backward over the images of batches, which num_loss_tokens counts (see collate_images)."""
        return self.per_image * num_loss_tokens


def image_flops(model: torch.nn.Module, run: Callable[[Any], torch.Tensor | None]) -> ImageFlops | None:
    """run: the task's forward pass of one image on the meta device. None if it has none, and, with a line in the log,
    if the model cannot run there.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    tensors = {name: _empty(each) for name, each in (*model.named_parameters(), *model.named_buffers())}
    inside = {f"model.{name}": each for name, each in tensors.items()}
    try:
        # Other kernels than that of products compute some of the scores again in the backward pass.
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.device("meta"):
            made = torch.func.functional_call(_Run(model, run), inside, ())
            if made is None:
                return None
            if made.requires_grad:
                made.sum().backward()
    except Exception as error:  # noqa: BLE001 - a model of the user's own, that may ask for values
        reason = " ".join(str(error).split())[:200]
        log.info(
            "the arithmetic of %s is not known, which does not run on the meta device: %s", type(model).__name__, reason
        )
        return None
    return ImageFlops(per_image=float(counter.get_total_flops()))


class _Run(torch.nn.Module):
    """A model as a task runs it."""

    def __init__(self, model: torch.nn.Module, run: Callable[[Any], torch.Tensor | None]):
        super().__init__()
        self.model = model
        self._run = run

    def forward(self) -> torch.Tensor | None:
        return self._run(self.model)


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
