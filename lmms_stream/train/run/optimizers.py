"""Optimizers by name, and their groups of parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ...checks import check_arguments
from ...errors import ConfigError, LmmsStreamError, did_you_mean, nearest_name
from .copies import writes_saved
from .settings import TrainConfig

Groups = list[dict[str, Any]]
_REST = "*"  # pattern of parameters that no other pattern matches
Maker = Callable[[Groups, TrainConfig, torch.nn.Module], torch.optim.Optimizer]
OF_TORCH = {"sgd": "SGD", "adagrad": "Adagrad", "rmsprop": "RMSprop"}  # name -> class without betas
_OF_CONFIG = {"lr": "learning_rate", "weight_decay": "weight_decay"}  # argument of an optimizer -> field of TrainConfig


def build_optimizer(model: torch.nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Return the optimizer of train.optim over the trained parameters of a model.

    ConfigError for an unknown name, a missing package, and unknown arguments.
    """
    make = _MAKERS.get(config.optim)
    if config.optim == "adafactor":
        raise ConfigError(
            "train.optim adafactor: torch's does not run on sharded matrices; for less memory take muon or adamw_8bit"
        )
    if make is None:
        raise ConfigError(f"train.optim {config.optim!r} is none of {', '.join(_MAKERS)}")
    groups = groups_of(model, config)
    if clashing := sorted(_OF_CONFIG.keys() & config.optim_args.keys()):
        raise ConfigError(f"train.optim_args has {clashing[0]}: set train.{_OF_CONFIG[clashing[0]]}")
    try:
        made = make(groups, config, model)
    except LmmsStreamError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"train.optim {config.optim} with optim_args {dict(config.optim_args)}: {' '.join(str(error).split())}"
        ) from error
    for pattern, values in config.groups.items():
        if strange := sorted(values.keys() - made.defaults.keys()):
            raise ConfigError(
                f"train.groups {pattern!r} has {strange[0]}, which is not an option of {config.optim} for a group: "
                f"{did_you_mean(strange[0], made.defaults)}"
            )
    check_arguments(type(made).__init__, config.optim_args, prefix="train.optim_args.")
    for pattern, values in config.groups.items():
        check_arguments(type(made).__init__, values, prefix=f"train.groups {pattern!r} ")
    return made


def groups_of(model: torch.nn.Module, config: TrainConfig) -> Groups:
    """Return the parameter groups of a config."""
    return parameter_groups(model, weight_decay=config.weight_decay, groups=config.groups)


def parameter_groups(
    model: torch.nn.Module, *, weight_decay: float, groups: Mapping[str, Mapping[str, Any]] | None = None
) -> Groups:
    """Return the parameter groups of an optimizer: matrices decay; vectors (biases, norms) decay by their group only.

    groups: values by pattern (fnmatch) of parameters' names. "*": parameters without another pattern; they come first.
    ConfigError for a pattern without a trained parameter, and for a parameter of two patterns.
    """
    values = {_REST: {}, **(groups or {})}
    pattern_of = _patterns(model, [pattern for pattern in values if pattern != _REST])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    made: Groups = []
    for pattern, own in values.items():
        mine = [each for each in trained if pattern_of.get(id(each), _REST) == pattern]
        if "weight_decay" in own and "weight_decay" in values[_REST]:  # one group, in the order of the model
            made.append({"params": mine, **own})
            continue
        matrices, vectors = [each for each in mine if each.ndim >= 2], [each for each in mine if each.ndim < 2]
        made.append({"params": matrices, "weight_decay": weight_decay, **own})
        made.append({"params": vectors, "weight_decay": 0.0, **own})
    return [group for group in made if group["params"]]


def _patterns(model: torch.nn.Module, patterns: Iterable[str]) -> dict[int, str]:
    """Return the pattern of each parameter with a pattern, by id; a tied parameter has several names."""
    found: dict[int, str] = {}
    named = [(name, each) for name, each in model.named_parameters(remove_duplicate=False) if each.requires_grad]
    for pattern in patterns:
        matched = [(name, each) for name, each in named if fnmatchcase(name, pattern)]
        if not matched:
            raise ConfigError(
                f"train.groups {pattern!r} matches no parameter that is trained: the nearest name is "
                f"{nearest_name(pattern, (name for name, _ in named))!r}"
            )
        for name, each in matched:
            if (before := found.setdefault(id(each), pattern)) != pattern:
                raise ConfigError(
                    f"train.groups {before!r} and {pattern!r} both match {name}: a parameter has one rate"
                )
    return found


def _arguments(config: TrainConfig) -> dict[str, Any]:
    """Return the arguments of an optimizer; betas as a tuple, as in torch's state."""
    arguments = {"lr": config.learning_rate, **config.optim_args}
    return arguments | ({"betas": tuple(arguments["betas"])} if "betas" in arguments else {})


def _adamw(groups: Groups, config: TrainConfig, model: torch.nn.Module, *, fused: bool = True) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"fused": True} if fused else {}
    return torch.optim.AdamW(groups, **options | _arguments(config))


def _adamw_8bit(groups: Groups, config: TrainConfig, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return torchao's optimizer: bitsandbytes takes no sharded parameters."""
    if find_spec("torchao") is None:
        raise ConfigError(f"train.optim {config.optim} needs torchao: pip install torchao, or set it to adamw")
    made: torch.optim.Optimizer = import_module("torchao.optim").AdamW8bit(groups, **_arguments(config))
    return made


def _muon(groups: Groups, config: TrainConfig, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return Muon for matrices inside the model, with AdamW for embeddings, the head and vectors."""
    inner = hidden_matrices(model)
    split = [
        {**group, "params": [each for each in group["params"] if (id(each) in inner) is is_inner], "is_muon": is_inner}
        for group in groups
        for is_inner in (True, False)
    ]
    found = [group for group in split if group["params"]]
    return Muon(found, **_arguments(config))


def _torch(groups: Groups, config: TrainConfig, model: torch.nn.Module, *, name: str) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = getattr(torch.optim, name)(groups, **_arguments(config))
    return made


_MAKERS: dict[str, Maker] = {
    "adamw": _adamw,
    "adamw_torch_fused": _adamw,
    "adamw_torch": partial(_adamw, fused=False),
    "adamw_8bit": _adamw_8bit,
    "adamw_bnb_8bit": _adamw_8bit,
    "adamw_torch_8bit": _adamw_8bit,
    "muon": _muon,
    **{name: partial(_torch, name=class_name) for name, class_name in OF_TORCH.items()},
}


_DECIDE_ON_DEVICE = (torch.optim.Adam, torch.optim.AdamW)  # if fused


def step_if_finite(optimizer: torch.optim.Optimizer, norm: torch.Tensor) -> bool:
    """Update, except if the norm of the gradients, float32[], is not finite; the device decides, without the host.

    Without an update, parameters and moments keep their bits. Return False, without an update, for an optimizer that
    cannot decide on the device: only torch's fused Adam and AdamW can, for sharded parameters.
    """
    if type(optimizer) not in _DECIDE_ON_DEVICE or not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    of_scaler: Any = optimizer
    of_scaler.found_inf = (~norm.isfinite()).float()  # as torch's GradScaler tells it
    try:
        optimizer.step()
    finally:
        del of_scaler.found_inf
    return True


# Muon for matrices that are sharded, and AdamW for the other parameters, as one optimizer.
#
# Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) updates a matrix by its orthogonalized momentum.
# A shard's orthogonalization differs from the matrix's, and torch's Muon, with shards, sums the products of the
# iteration over ranks in bfloat16: after three steps two ranks are 10 % from one rank. Here momentum is sharded. Each
# matrix has an owner among the ranks with its parts: only the owner receives the parts, in bfloat16, the format of the
# iteration. The owner computes torch's update, and each rank receives its part of the update. Matrices of one shape are
# sent together and orthogonalized together. Copies of the model (HSDP) do the same, each for itself.

Scale = Literal["original", "match_rms_adamw", "spectral_unclamped"]
_QUINTIC = (3.4445, -4.7750, 2.0315)  # coefficients of the iteration, from the paper
_EPSILON = 1e-7
_VALUES_AT_ONCE = 1 << 26  # of the matrices that a rank orthogonalizes together: 128 MiB, and some copies


def hidden_matrices(model: torch.nn.Module) -> set[int]:
    """Return the ids of a model's matrices, without embeddings and the head.

    Experts in a single parameter, [E, rows, columns], are matrices; their biases, [E, n], are vectors.
    """
    outside = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    if head := getattr(model, "get_output_embeddings", lambda: None)():
        outside.add(id(head.weight))
    named = [(name, each) for name, each in model.named_parameters() if not name.endswith("bias")]
    return {id(each) for name, each in named if each.ndim == 2 or (each.ndim == 3 and "expert" in name)} - outside


class Muon(torch.optim.Optimizer):
    """Muon for groups with `is_muon`, AdamW for the other groups.

    momentum, nesterov, ns_steps: see torch.optim.Muon. adjust_lr_fn: scale of the learning rate by a matrix's shape; by
    default updates are as large as AdamW's, with the same learning rate.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: Scale = "match_rms_adamw",
    ):
        if adjust_lr_fn not in ("original", "match_rms_adamw", "spectral_unclamped"):
            raise ConfigError(
                f"adjust_lr_fn of muon is original, match_rms_adamw or spectral_unclamped, got {adjust_lr_fn!r}"
            )
        of_muon = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps, **of_muon})
        others = [group for group in self.param_groups if not group["is_muon"]]
        self._adamw = torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps, fused=True) if others else None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["is_muon"]:
                self._update([each for each in group["params"] if each.grad is not None], group)
        if self._adamw is not None:
            # load_state_dict replaces both.
            self._adamw.param_groups = [group for group in self.param_groups if not group["is_muon"]]
            self._adamw.state = self.state
            self._adamw.step()
        return loss

    def _update(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        """Update matrices as torch.optim.Muon does, those of one shape together."""
        for num_before, alike in _alike(parameters):
            own, cuts = [local(each) for each in alike], cuts_of(alike[0])
            averaged = torch.stack(self._averaged(alike, group)).to(torch.bfloat16)
            matrices = averaged.flatten(0, -3)  # [n, rows, columns]: this rank's parts
            made = orthogonal_each(matrices, cuts, steps=group["ns_steps"], num_before=num_before)
            updates = made.view_as(averaged).to(own[0].dtype).unbind()
            torch._foreach_mul_(own, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(own, updates, alpha=-group["lr"] * _scale(group["adjust_lr_fn"], *alike[0].shape[-2:]))

    def _averaged(self, parameters: Sequence[torch.Tensor], group: dict[str, Any]) -> list[torch.Tensor]:
        """Return this rank's parts of the momentum after this step's gradients."""
        gradients, averages = [], []
        for each in parameters:
            assert each.grad is not None
            if "momentum_buffer" not in self.state[each]:
                self.state[each]["momentum_buffer"] = torch.zeros_like(each.grad)
            gradients.append(local(each.grad))
            averages.append(local(self.state[each]["momentum_buffer"]))
        torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
        return [*torch._foreach_lerp(gradients, averages, group["momentum"])] if group["nesterov"] else averages


def _alike(parameters: Sequence[torch.Tensor]) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Yield parameters of one shape, cut alike, that are updated together; with the number of parameters before."""
    of_kind: dict[Any, list[torch.Tensor]] = {}
    for each in parameters:
        kind = (each.device_mesh, each.placements) if isinstance(each, DTensor) else each.device
        of_kind.setdefault((each.shape, each.dtype, kind), []).append(each)
    num_before = 0
    for alike in of_kind.values():
        num_ranks = _num_parts(*_parts(alike[0]))
        at_once = max(1, _VALUES_AT_ONCE // alike[0].numel()) * num_ranks
        for start in range(0, len(alike), at_once):
            together = alike[start : start + at_once]
            yield num_before, together
            num_before += len(together)


class ShardCut(NamedTuple):
    """A cut of matrices into a part for each rank of a group. dim: -2 for rows, -1 for columns; sizes: of the parts."""

    group: dist.ProcessGroup
    dim: int
    sizes: list[int]


def cuts_of(parameter: torch.Tensor) -> list[ShardCut]:
    """Return the cuts of a parameter's matrices, the last cut first; ranks with whole experts have no cut.

    FSDP cuts along the first dimensions of a mesh, after tensor and expert parallelism along the last.
    """
    found: list[ShardCut] = []
    if isinstance(parameter, DTensor):
        mesh, shape = parameter.device_mesh, list(parameter.shape)
        for of_mesh in reversed(_parts(parameter)[1]):
            dim, num_ranks = parameter.placements[of_mesh].dim, mesh.size(of_mesh)  # type: ignore[attr-defined]
            largest = -(-shape[dim] // num_ranks)
            sizes = [min(largest, max(0, shape[dim] - rank * largest)) for rank in range(num_ranks)]
            shape[dim] = sizes[mesh.get_local_rank(of_mesh)]
            if num_ranks > 1 and dim >= parameter.ndim - 2:
                found.insert(0, ShardCut(mesh.get_group(of_mesh), dim - parameter.ndim, sizes))
    return found


def orthogonal_each(
    matrices: torch.Tensor, cuts: Sequence[ShardCut], *, steps: int, num_before: int = 0
) -> torch.Tensor:
    """Return this rank's parts of the orthogonalized matrices, from its parts: bfloat16[n, rows, columns].

    The ranks of the cuts own equal numbers of the matrices, to within one; the first owner follows by num_before.
    """
    if not cuts:
        return orthogonal(matrices, steps=steps) if len(matrices) else matrices
    (group, dim, sizes), *others = cuts
    size, rank = group.size(), group.rank()
    counts = [len(matrices) // size + ((each - num_before) % size < len(matrices) % size) for each in range(size)]
    part = matrices.shape[1:]
    of_others = [[counts[rank], *part] for _ in sizes]
    for shape, num_rows in zip(of_others, sizes, strict=True):
        shape[dim] = num_rows
    sent, received = [count * part.numel() for count in counts], [math.prod(shape) for shape in of_others]
    parts = _exchanged(matrices, sent, received, group).split(received)
    own = torch.cat([each.view(shape) for each, shape in zip(parts, of_others, strict=True)], dim)
    made = orthogonal_each(own, others, steps=steps, num_before=num_before // size)
    parts_of_made = torch.cat([each.flatten() for each in made.split(sizes, dim)])
    return _exchanged(parts_of_made, received, sent, group).view_as(matrices)


def _exchanged(values: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Send each rank of a group its number of the values; return the received values, in the order of ranks."""
    found = values.new_empty(sum(received))
    dist.all_to_all_single(found, values.flatten(), received, sent, group=group)
    return found


def orthogonal(matrices: torch.Tensor, *, steps: int) -> torch.Tensor:
    """Return the nearest matrices with singular values of about 1, by Newton-Schulz iterations: bfloat16[n, …].

    matrices: bfloat16[n, rows, columns].
    """
    a, b, c = _QUINTIC
    is_tall = matrices.shape[1] > matrices.shape[2]
    found = matrices.mT if is_tall else matrices
    found = found / torch.linalg.vector_norm(found, dim=(1, 2), keepdim=True).clamp(min=_EPSILON)
    for _ in range(steps):
        gram = found @ found.mT
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return (found.mT if is_tall else found).contiguous()


def _scale(kind: Scale, rows: int, columns: int) -> float:
    if kind == "original":
        return math.sqrt(max(1, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns)) if kind == "match_rms_adamw" else math.sqrt(rows / columns)


# An optimizer created before its model was sharded -> the same optimizer over the sharded parameters.


def names_of_parameters(model: torch.nn.Module) -> dict[int, str]:
    """Return the name of each parameter by id; call this before the model is sharded."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def adopt_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], sharded: torch.nn.Module
) -> torch.optim.Optimizer:
    """Return the optimizer with the parameters of `sharded` in its groups, matched by name.

    ConfigError for parameters of another model, and for an optimizer that has made updates.
    """
    if optimizer.state:
        raise ConfigError(
            "the optimizer has already made updates, with a state that is not sharded: pass a new optimizer"
        )
    parameters = dict(sharded.named_parameters())
    for group in optimizer.param_groups:
        if any(id(each) not in names for each in group["params"]):
            raise ConfigError(
                "optimizers has parameters that do not belong to the model: pass the model of this optimizer as a "
                "module, or use optimizer_cls_and_kwargs"
            )
        group["params"] = [parameters[names[id(each)]] for each in group["params"]]
    return optimizer


# An exponential moving average (EMA) of the trained weights.


class Average:
    """Average of a model's trained parameters: float32, each rank's part.

    The average begins at the weights. tensors: by the names of parameters, for checkpoints.
    """

    def __init__(self, model: torch.nn.Module, *, decay: float):
        self._parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self.tensors = {name: each.detach().to(torch.float32, copy=True) for name, each in self._parameters.items()}
        self._move = get_ema_multi_avg_fn(decay)

    @writes_saved
    @torch.no_grad()
    def update(self) -> None:
        """Update the average after a step: decay * average + (1 - decay) * weights, in a fused operation."""
        weights = [local(each).to(torch.float32) for each in self._parameters.values()]
        self._move([local(each) for each in self.tensors.values()], weights, 0)

    @writes_saved
    @torch.no_grad()
    def begin(self, names: set[str]) -> None:
        """Set the average of some parameters to their weights."""
        for name in names:
            self.tensors[name].copy_(self._parameters[name])


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor, in the same memory; an unsharded tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# Gradient clipping, by the norm of all gradients, for parameters on any meshes.


Parts = tuple[DeviceMesh | None, tuple[int, ...]]  # a mesh, and its dimensions with different parts on ranks


def clip_gradients(parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Scale gradients down to a total norm of at most max_norm; return the norm before scaling: float32[].

    The norm stays on the device, and is equal on all ranks. Parameters on a single mesh, in parts along one dimension,
    are clipped as by torch's clip_grad_norm_, to the bit; other parameters it refuses, or sums in an order that may
    differ between ranks.
    """
    by_parts: dict[Parts, list[torch.Tensor]] = {}
    for each in parameters:
        if each.grad is not None:
            by_parts.setdefault(_parts(each), []).append(each)
    if len(by_parts) == 1 and len(next(iter(by_parts))[1]) <= 1:
        ((_, group),) = by_parts.items()
        norm = get_total_norm([each.grad for each in group if each.grad is not None])
        total = norm.full_tensor() if isinstance(norm, DTensor) else norm
    else:
        total = _joined(by_parts)
    for group in by_parts.values():
        clip_grads_with_norm_(group, max_norm, total)
    return total


def _parts(parameter: torch.Tensor) -> Parts:
    if not isinstance(parameter, DTensor):
        return None, ()
    dims = [dim for dim, placement in enumerate(parameter.placements) if not isinstance(placement, Replicate)]
    return parameter.device_mesh, tuple(dims)


def _joined(by_parts: dict[Parts, list[torch.Tensor]]) -> torch.Tensor:
    """Return the norm over all ranks, in a single collective; replicated parts count once: float32[]."""
    if not by_parts:
        return torch.zeros(())
    squares = [
        _square(group) / (dist.get_world_size() // _num_parts(mesh, dims)) for (mesh, dims), group in by_parts.items()
    ]
    total = torch.stack(squares).sum()
    dist.all_reduce(total)
    return total.sqrt().float()


def _num_parts(mesh: DeviceMesh | None, dims: Sequence[int]) -> int:
    """Return the number of ranks with different parts of a parameter."""
    count = 1
    for dim in dims:
        count *= 1 if mesh is None else mesh.size(dim)
    return count


def _square(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares of this rank's parts of gradients: float64[]."""
    parts = [each.grad.to_local() if isinstance(each.grad, DTensor) else each.grad for each in parameters]
    norms = torch._foreach_norm([part for part in parts if part is not None], 2.0, torch.float32)
    return torch.stack(norms).double().square().sum()
