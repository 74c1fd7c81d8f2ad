"""FLOPs of media towers. model, towers -> FLOPs of a batch's inputs.

tower_flops counts patches of images of any size, tile_flops tiles of a fixed size, sound_flops clips.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["MediaFlops", "TowerPart", "media_flops", "media_parts"]


class TowerPart(NamedTuple):
    """A tower, the kinds of media that it reads, and the modules between tower and text."""

    tower: torch.nn.Module
    kinds: tuple[str, ...]
    behind: tuple[torch.nn.Module, ...]


def media_parts(model: torch.nn.Module, towers: Mapping[str, torch.nn.Module]) -> list[TowerPart]:
    """Return the towers of a model, each once; modules beside a single tower belong to this tower.

    In a model with several towers, modules beside them count as parts of the text model.
    """
    each_once = {id(tower): tower for tower in towers.values()}
    kinds = {key: tuple(kind for kind, tower in towers.items() if id(tower) == key) for key in each_once}
    behind = _beside(model, next(iter(each_once.values()))) if len(each_once) == 1 else ()
    return [TowerPart(tower, kinds[key], behind) for key, tower in each_once.items()]


def _beside(model: Any, tower: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    """Return the tower's sibling modules, without modules that embed tokens or make logits."""
    parent = next((each for each in model.modules() if any(child is tower for child in each.children())), None)
    if parent is None:
        return ()
    of_text = {id(each) for each in (model.get_input_embeddings(), model.get_output_embeddings())}
    others = [child for child in parent.children() if child is not tower]
    return tuple(child for child in others if not of_text & {id(each) for each in child.modules()})


def media_flops(part: TowerPart, config: Any) -> MediaFlops | None:
    """Return the formula of a tower; None for an unknown tower. config: of the model."""
    is_sound = set(part.kinds) == {"audio"}
    own = getattr(config, "audio_config" if is_sound else "vision_config", None)
    own = getattr(part.tower, "config", None) or own
    if is_sound:
        return sound_flops(part.tower, own, behind=part.behind)
    if (found := tower_flops(part.tower, own, kinds=part.kinds)) is not None:
        return None if part.behind else found
    return tile_flops(part.tower, own, behind=part.behind, kinds=part.kinds, of_model=config)


# FLOPs of the products of a tower, by its trained parts. parameters by stage -> FLOPs of a position.
#
# As in flops.py, but without norms and biases: 2 FLOPs per parameter and position forward, 2 more for the gradient of a
# trained parameter, 2 more for the gradient of the input if an earlier part is trained. A frozen tower counts only its
# forward pass, and the first product never counts the last 2.

_MATRICES = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
_BLOCK = re.compile(r"(?:^|\.)(?:layers?|blocks)\.(\d+)\.")


class MediaFlops(Protocol):
    """FLOPs of reading some kinds of media."""

    def of(self, inputs: Mapping[str, torch.Tensor]) -> float:
        """Return FLOPs, forward and backward, of a batch's inputs."""
        ...


class Matrix(NamedTuple):
    """A parameter of a matrix product. stage: order of use, 0 for the first product of pixels or sound samples."""

    stage: int
    name: str
    parameter: torch.nn.Parameter


class Products:
    """FLOPs of products. stages: of all parameters, also without products: a trained norm needs gradients, too."""

    def __init__(self, stages: Iterable[tuple[int, torch.nn.Parameter]]):
        self._first_trained = min((stage for stage, each in stages if each.requires_grad), default=1 << 30)

    def of(self, stage: int, parameter: torch.nn.Parameter) -> float:
        """Return FLOPs per position."""
        backward = 2.0 * parameter.requires_grad + 2.0 * (stage > 0 and self._first_trained <= stage)
        return parameter.numel() * (2.0 + backward)

    def of_pair(self, stage: int, width: int) -> float:
        """Return FLOPs per attention score in a block: two products forward, four backward."""
        return 4.0 * width * (3 if self._first_trained <= stage else 1)


def stage_of_block(name: str) -> int | None:
    """Return the number of a parameter's block; None outside blocks.

    >>> stage_of_block("encoder.layers.3.fc1.weight"), stage_of_block("conv1.weight")
    (3, None)
    """
    found = _BLOCK.search(name)
    return None if found is None else int(found[1])


def num_blocks(tower: torch.nn.Module) -> int:
    """Return the number of blocks in the tower's first list of blocks; 0 without a list."""
    lists = (each for name, each in tower.named_modules() if name.rpartition(".")[2] in ("layers", "layer", "blocks"))
    return next((len(each) for each in lists if isinstance(each, torch.nn.ModuleList)), 0)


def matrices(modules: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield weights of linear layers and convolutions, and projections that are plain parameters."""
    for number, module in enumerate(modules):
        for path, part in module.named_modules():
            for name, parameter in part.named_parameters(recurse=False):
                if (isinstance(part, _MATRICES) and name == "weight") or name.endswith("projection_weight"):
                    yield f"{number}.{path}.{name}", parameter


# FLOPs of towers that read patches of images and frames of any size. model, grids of media -> FLOPs.
#
# Mergers see one token for merge * merge patches. Attention counts all pairs of patches in a frame, or, in blocks with
# windows, all pairs in each window: windows at the edge hold fewer. Runs on the smallest media, which a rank without
# media makes for the other ranks, do not count.

_FIRST, _BLOCKS = ("patch_embed", "pos_embed"), "blocks"


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerFlops:
    """FLOPs per patch, per pair of patches in blocks that see a frame, and per pair in windows.

    window: side of a window in tokens, with merge * merge patches per token; 0 without windows. kinds: kinds of media.
    """

    per_patch: float
    per_pair: float
    per_window_pair: float
    window: int
    merge: int
    kinds: tuple[str, ...] = ("image", "video")

    def of(self, inputs: Mapping[str, torch.Tensor]) -> float:
        """See MediaFlops."""
        names = [f"{kind}_grid_thw" for kind in self.kinds]
        return sum(self.of_grids(inputs[name].numpy()) for name in names if name in inputs)

    def of_grids(self, grids: NDArray[np.int64]) -> float:
        """Return FLOPs, forward and backward, of grids: int64[n, 3], frames, rows and columns of patches."""
        frames, rows, columns = grids.T.astype(np.float64)
        total = float((frames * rows * columns).sum()) * self.per_patch
        total += float((frames * (rows * columns) ** 2).sum()) * self.per_pair
        if self.window:
            squares = self._squares(rows // self.merge) * self._squares(columns // self.merge)
            total += float((frames * self.merge**4 * squares).sum()) * self.per_window_pair
        return total

    def _squares(self, sides: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sum of the squares of the windows' parts of a side."""
        squares: NDArray[np.float64] = sides // self.window * self.window**2 + (sides % self.window) ** 2
        return squares


def tower_flops(tower: torch.nn.Module, config: Any, *, kinds: Sequence[str]) -> TowerFlops | None:
    """Return the formula of a tower of patches and blocks; None for another tower. config: of the tower."""
    blocks = getattr(tower, _BLOCKS, None)
    width = getattr(config, "embed_dim", None) or getattr(config, "hidden_size", None)
    merge = getattr(config, "spatial_merge_size", None)
    if not isinstance(blocks, torch.nn.ModuleList) or not width or not merge:
        return None
    lookups = {id(module.weight) for module in tower.modules() if isinstance(module, torch.nn.Embedding)}
    stages = [(_stage(name, len(blocks)), name, each) for name, each in tower.named_parameters()]
    products = Products((stage, each) for stage, _, each in stages)
    per_patch = 0.0
    for stage, name, parameter in stages:
        if id(parameter) not in lookups and parameter.ndim > 1:
            per_patch += products.of(stage, parameter) / (merge**2 if "merger" in name else 1)
    window, whole = _windows(config, len(blocks), merge)
    pairs = {False: 0.0, True: 0.0}  # by whether the block has windows
    for number in range(len(blocks)):
        pairs[number not in whole] += products.of_pair(number + 1, width)
    return TowerFlops(
        per_patch=per_patch,
        per_pair=pairs[False],
        per_window_pair=pairs[True],
        window=window,
        merge=merge,
        kinds=tuple(kinds),
    )


def _stage(name: str, num_blocks: int) -> int:
    """Return the order of a parameter's use: 0 for the embedding of pixels, then block by block, then the merger."""
    part, _, rest = name.partition(".")
    if part == _BLOCKS:
        return 1 + int(rest.partition(".")[0])
    return 0 if part in _FIRST else num_blocks + 1


def _windows(config: Any, num_blocks: int, merge: int) -> tuple[int, set[int]]:
    """Return the side of a window in tokens, and the blocks without windows."""
    side = getattr(config, "window_size", None)
    whole = getattr(config, "fullatt_block_indexes", None)
    if not side or whole is None:
        return 0, {*range(num_blocks)}
    return side // merge // config.patch_size, {*whole}


# FLOPs of towers that read square tiles of a fixed size: a constant per tile. model, tiles -> FLOPs.
#
# All patches of a tile attend to each other, with the tile's own token in some towers. Modules between the tower and
# the text, and an adapter at the tower's end, see as many positions as their first product makes of the patches: a
# product of the values of k patches makes a k-th of the positions. A pooling head does not count: its result is unused.

_NAMES = {"image": "pixel_values", "video": "pixel_values_videos"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TileFlops:
    """FLOPs per tile. names: inputs with tiles in their last three axes."""

    per_tile: float
    names: tuple[str, ...]

    def of(self, inputs: Mapping[str, torch.Tensor]) -> float:
        """See MediaFlops."""
        return self.per_tile * sum(inputs[name].shape[:-3].numel() for name in self.names if name in inputs)


def tile_flops(
    tower: torch.nn.Module, config: Any, *, behind: Sequence[torch.nn.Module], kinds: Sequence[str], of_model: Any
) -> TileFlops | None:
    """Return the formula of a tower of tiles and blocks; None for another tower, or if an earlier block is read.

    config: of the tower; of_model: config of the model. behind: the parts between tower and text.
    """
    side, patch = (_number(getattr(config, name, None)) for name in ("image_size", "patch_size"))
    width, depth = getattr(config, "hidden_size", None), num_blocks(tower)
    read = getattr(of_model, "vision_feature_layer", -1)
    if not (side and patch and width and depth) or read not in (None, -1, [-1]):
        return None
    names = tuple(_NAMES[kind] for kind in kinds if kind in _NAMES)
    patches = (side // patch) ** 2
    positions = patches + any(name.endswith(("cls_token", "class_embedding")) for name, _ in tower.named_parameters())
    last = depth + 1
    stages = [(_tile_stage(name, last), each) for name, each in tower.named_parameters() if ".head." not in name]
    products = Products([*stages, *((last, each) for module in behind for each in module.parameters())])
    total = sum(products.of_pair(1 + number, width) for number in range(depth)) * positions**2
    of_text: float | None = getattr(of_model, "mm_tokens_per_image", None)  # Gemma 3: means of patches
    for name, parameter in matrices([tower, *behind]):
        stage = _tile_stage(name, last) if name.startswith("0.") else last
        if ".head." in name:
            continue
        if stage == last and "post_" not in name:
            of_text = of_text or patches * width / parameter.shape[-1]
            total += products.of(last, parameter) * of_text
        else:
            total += products.of(stage, parameter) * (patches if stage == 0 else positions)
    return TileFlops(per_tile=total, names=names)


def _tile_stage(name: str, last: int) -> int:
    """Return 0 for the embedding of pixels, then the number of the block, then an adapter at the end."""
    block = stage_of_block(name)
    if block is not None:
        return 1 + block
    return 0 if "embed" in name or "cls_token" in name else last


def _number(value: Any) -> int:
    """Return a side from a config's number, or from its pair of axes."""
    return int(value[0] if isinstance(value, list | tuple) else value or 0)


# FLOPs of towers that read mel frames of sounds, as Whisper's encoder does. model, clips -> FLOPs.
#
# Convolutions halve the frames, blocks attend within windows of the resulting positions, and pairs of positions may be
# joined at the end. A clip counts with its own frames, in chunks if the tower reads chunks; in Qwen2-Audio with the
# frames after padding.

_CONVOLUTIONS = {"conv1": 0, "conv2": 1, "conv2d1": 1, "conv2d2": 2, "conv2d3": 3}  # halvings after each convolution


@dataclass(frozen=True, kw_only=True, slots=True)
class SoundFlops:
    """FLOPs of clips. per_position: per position after 0, 1, … halvings; per_pooled: per joined pair of last positions.

    chunk: frames that are convolved together (0: a clip). window: positions that attend to each other (0: a chunk).
    padded: frames of each clip after padding (0: no padding).
    """

    per_position: tuple[float, ...]
    per_pooled: float
    per_pair: float
    chunk: int
    window: int
    padded: int

    def of(self, inputs: Mapping[str, torch.Tensor]) -> float:
        """See MediaFlops."""
        if self.padded:
            found = inputs.get("input_features")
            return 0.0 if found is None else self.of_clips(np.full(len(found), self.padded))
        lengths = inputs.get("audio_lengths")
        return 0.0 if lengths is None else self.of_clips(lengths.numpy())

    def of_clips(self, frames: NDArray[np.int64]) -> float:
        """Return FLOPs of clips by their mel frames."""
        return sum(self._of_clip(int(each)) for each in frames)

    def _of_clip(self, frames: int) -> float:
        chunk = self.chunk or frames
        levels = np.array([chunk] * (frames // chunk) + [frames % chunk] * (frames % chunk > 0))
        total = 0.0
        for halvings, flops in enumerate(self.per_position):
            levels = levels if halvings == 0 else (levels - 1) // 2 + 1
            total += flops * float(levels.sum())
        positions = int(levels.sum())
        if self.window:
            levels = np.array([self.window] * (positions // self.window) + [positions % self.window])
        num_pairs = float((levels.astype(np.float64) ** 2).sum())
        return total + self.per_pair * num_pairs + self.per_pooled * (positions // 2)


def sound_flops(tower: torch.nn.Module, config: Any, *, behind: Sequence[torch.nn.Module]) -> SoundFlops | None:
    """Return the formula of a tower with convolutions and blocks; None for another tower.

    config: of the tower. behind: modules between tower and text.
    """
    found = [name for name in _CONVOLUTIONS if hasattr(tower, name)]
    width, depth = getattr(config, "d_model", None), num_blocks(tower)
    bins = getattr(config, "num_mel_bins", None)
    if len(found) < 2 or not (width and depth and bins):
        return None
    last = len(found) + depth + 1
    halvings = max(_CONVOLUTIONS[name] for name in found)
    is_pooled = hasattr(tower, "avg_pooler")

    def stage(name: str) -> int:
        block, part = stage_of_block(name), name.split(".")[0]
        if block is not None:
            return len(found) + 1 + block
        return found.index(part) if part in found else len(found) if part == "conv_out" else last

    stages = [(stage(name), each) for name, each in tower.named_parameters()]
    products = Products([*stages, *((last, each) for module in behind for each in module.parameters())])
    per_position, per_pooled = [0.0] * (halvings + 1), 0.0
    for name, parameter in matrices([tower, *behind]):
        number, _, rest = name.partition(".")
        part = rest.split(".")[0] if number == "0" else ""
        flops = products.of(stage(rest) if part else last, parameter)
        if part in found:
            rows = _halved(bins, _CONVOLUTIONS[part]) if parameter.ndim == 4 else 1
            per_position[_CONVOLUTIONS[part]] += flops * rows
        elif is_pooled and part in ("", "proj"):
            per_pooled += flops
        else:
            per_position[-1] += flops
    per_pair = sum(products.of_pair(len(found) + 1 + number, width) for number in range(depth))
    n_window = int(getattr(config, "n_window", 0) or 0)
    shared: dict[str, Any] = {"per_position": tuple(per_position), "per_pooled": per_pooled, "per_pair": per_pair}
    if not n_window:
        return SoundFlops(**shared, chunk=0, window=0, padded=2 * config.max_source_positions)
    chunks = int(getattr(config, "n_window_infer", 0) or 0) // (2 * n_window)
    return SoundFlops(**shared, chunk=2 * n_window, window=chunks * _halved(2 * n_window, halvings), padded=0)


def _halved(count: int, times: int) -> int:
    """Return the length after some convolutions with stride 2."""
    for _ in range(times):
        count = (count - 1) // 2 + 1
    return count
