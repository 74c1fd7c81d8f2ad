"""FLOPs of training a model, and peak FLOP/s of devices. model, lengths -> FLOPs.

The formula is from PaLM (Chowdhery et al. 2022, appendix B): 6 N + 12 L H Q T per token, with N parameters, L layers, H
heads of size Q, and T tokens in the token's segment. The backward pass counts twice the forward pass. Recomputation
does not count. Causal attention counts all pairs of tokens. T is the segment's own length: the sum over a pack is
exact. N leaves out embeddings, which are looked up, and counts the head only for tokens that predict a target. Experts
count by the share that a token passes. A frozen parameter counts 4 instead of 6, and 2 if no earlier parameter is
trained, because gradients end before this parameter: with an adapter, at the matrices that read the input of the first
block. media_flops.py counts media towers.

Tests compare the formulas with torch's FlopCounterMode. FlopCounterMode cannot replace the formulas. On the meta device
it fails at towers that read grids (14 of 21 kinds of media of 13 families) and at most models of transformers 4. It
counts pairs beyond a window. It takes 1 s at 7B parameters and 4 s at 671B; the formulas take 2 to 6 ms.
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


# Peak dense bf16 TFLOP/s of tensor cores from the makers' data sheets, by words of a device's name.
PEAK_TFLOPS = (
    ("B200", 2250.0), ("GB200", 2500.0),
    ("H200 NVL", 835.5), ("H200", 989.4), ("GH200", 989.4),
    ("H100 PCIe", 756.0), ("H100 NVL", 835.5), ("H100", 989.4), ("H800 PCIe", 756.0), ("H800", 989.4), ("H20", 148.0),
    ("A100", 312.0), ("A800", 312.0), ("A40", 149.7), ("A30", 165.0), ("A10", 125.0), ("RTX A6000", 154.8),
    ("L40S", 362.0), ("L40", 181.0), ("L4", 121.0), ("RTX 4090", 165.2), ("RTX 3090", 71.0),
    ("MI300X", 1307.4), ("MI325X", 1307.4), ("MI250X", 383.0),
)  # fmt: skip
_SQUARES = {"full_attention": None, "sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
_READS_INPUT = re.compile(r"\.(q|k|v|qkv|q_a|kv_a)_proj(_with_mqa)?\.|\.(Wqkv|query_key_value|c_attn)\.")  # in a block
_NOT_MULTIPLIED = (
    ".original_module.", ".lora_embedding_A.",  # of peft: unused copies, and tables
    ".encoder_attn.", ".embed_tokens_extend.",  # not run on text only: attention to an encoder, towers of Phi-4
)  # fmt: skip
# Models with repeated layers, with further products, or with experts that compute nothing.
_OTHER_FORMULAS = ("diffllama", "dory", "git", "hrm_text", "longcat_flash")
_LAST = 1 << 30  # stage of the last norm and the head
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_RECURRENT = ("mamba_", "lru_")  # prefixes of settings of layers without pairs, in configs without kinds of layers


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFlops:
    """FLOPs per token, per token that predicts a target (the head), and per pair of tokens of a segment.

    per_pair: by the window of a layer's attention; None is the whole segment. towers: FLOPs of media towers.
    """

    per_token: float
    per_loss_token: float
    per_pair: dict[int | None, float]
    towers: tuple[MediaFlops, ...] = ()

    def of(
        self, lengths: NDArray[np.int64], *, num_loss_tokens: int, inputs: Sequence[Mapping[str, torch.Tensor]] = ()
    ) -> float:
        """Return FLOPs, forward and backward, of segments with given lengths, and of the media in batches' inputs."""
        total = self.per_token * float(lengths.sum()) + self.per_loss_token * num_loss_tokens
        for window, flops in self.per_pair.items():
            seen = lengths if window is None else np.minimum(lengths, window)
            total += flops * float(np.dot(lengths, seen))
        return total + sum(tower.of(of_batch) for tower in self.towers for of_batch in inputs)


def model_flops(model: PreTrainedModel, *, towers: Mapping[str, torch.nn.Module] | None = None) -> ModelFlops | None:
    """Return the formula of a text decoder with media towers. towers: kind of media -> tower.

    None for other models, and for towers without a known formula.
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
    """Return peak TFLOP/s of a device by torch's name; None for a device outside the table.

    >>> peak_tflops("NVIDIA A100-SXM4-80GB")
    312.0
    """
    for words, peak in PEAK_TFLOPS:
        if all(re.search(rf"\b{word}\b", device_name) for word in words.split()):
            return peak
    return None


class _Stages:
    """Parts of a model in the backward pass: embeddings (stage 0), then block by block, then the head.

    media: ids of the parameters of media towers, in the stage of the embeddings.
    """

    def __init__(self, model: PreTrainedModel, media: Collection[int]):
        trained = [
            (0 if id(each) in media else self._stage(name), each)
            for name, each in model.named_parameters()
            if each.requires_grad
        ]
        self.first = min((stage for stage, _ in trained), default=0)
        of_first = [each for stage, each in trained if stage == self.first]
        # With a trained norm the inputs of all matrices in its block have gradients.
        self._reads_plain = 0 < self.first < _LAST and all(each.ndim > 1 for each in of_first)

    def flops(self, name: str, parameter: torch.nn.Parameter) -> float:
        """Return a parameter's FLOPs per token: per weight 2 forward, 2 for the input's gradient, 2 for its own."""
        stage = self._stage(name)
        reads_plain = self._reads_plain and stage == self.first and _READS_INPUT.search(name) is not None
        has_plain_input = stage < self.first or (reads_plain and ".lora_B." not in name) or stage == self.first == _LAST
        return parameter.numel() * (2.0 + 2.0 * (not has_plain_input) + 2.0 * parameter.requires_grad)

    def backward_share(self, layer: int) -> float:
        """Return the computed share of a layer's attention FLOPs: 1/3 without a backward pass."""
        return 1.0 if layer + 1 >= self.first else 1 / 3

    def _stage(self, name: str) -> int:
        if (found := re.search(r"\.(?:layers|h|blocks)\.(\d+)\.", name)) is not None:
            return 1 + int(found[1])
        return 0 if "embed" in name or "wte" in name else _LAST


def _pairs(config: Any, stages: _Stages) -> dict[int | None, float] | None:
    """Return 12 H Q, summed over the layers of each window; None for layers without pairs, or an unknown kind.

    Q is the mean size of keys and values. A layer without a backward pass counts a third.
    """
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
    """Return the width of keys plus the width of values, summed over the heads of a layer."""
    head = getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None)
    head = head or config.hidden_size // config.num_attention_heads
    return float((head + (getattr(config, "v_head_dim", None) or head)) * config.num_attention_heads)


def _experts(config: Any) -> tuple[int, float] | None:
    """Return the number of experts and the share that a token passes; None without experts, or if layers differ."""
    names = (*_NUM_EXPERTS, "num_experts_per_tok")
    if not {*names}.isdisjoint(getattr(config, "per_layer_attributes", None) or ()):
        return None
    *found, of_token = (getattr(config, name, None) or 0 for name in names)
    num_experts = max(found)
    return (num_experts, of_token / num_experts) if num_experts and of_token else None


# FLOPs of models of any class that make images, counted by torch on an image. model, forward pass -> FLOPs.
#
# The model runs forward and backward once on the meta device, which computes only shapes: no data is read or written.
# Frozen parts outside the model, such as an autoencoder or an encoder, do not count.

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageFlops:
    """FLOPs of tasks with images as units; see ModelFlops."""

    per_image: float

    def of(
        self, lengths: NDArray[np.int64], *, num_loss_tokens: int, inputs: Sequence[Mapping[str, torch.Tensor]] = ()
    ) -> float:
        """Return FLOPs, forward and backward, of num_loss_tokens images (see collate_images)."""
        return self.per_image * num_loss_tokens


def image_flops(model: torch.nn.Module, run: Callable[[Any], torch.Tensor | None]) -> ImageFlops | None:
    """Return the FLOPs of an image; None if the task has no forward pass, or the model cannot run on the meta device.

    run: the task's forward pass of an image on the meta device. A failure on the meta device is logged.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    tensors = {name: _empty(each) for name, each in (*model.named_parameters(), *model.named_buffers())}
    inside = {f"model.{name}": each for name, each in tensors.items()}
    try:
        # Kernels other than MATH compute some scores again in the backward pass.
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.device("meta"):
            made = torch.func.functional_call(_Run(model, run), inside, ())
            if made is None:
                return None
            if made.requires_grad:
                made.sum().backward()
    except Exception as error:  # noqa: BLE001 - the user's own model may read values
        reason = " ".join(str(error).split())[:200]
        log.info(
            "the arithmetic of %s is not known, which does not run on the meta device: %s", type(model).__name__, reason
        )
        return None
    return ImageFlops(per_image=float(counter.get_total_flops()))


class _Run(torch.nn.Module):
    """A model with the forward pass of a task."""

    def __init__(self, model: torch.nn.Module, run: Callable[[Any], torch.Tensor | None]):
        super().__init__()
        self.model = model
        self._run = run

    def forward(self) -> torch.Tensor | None:
        return self._run(self.model)


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
