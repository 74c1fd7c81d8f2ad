"""A job: hybrid models with kernels that are told where samples begin, and the bounds that these were given.

The kernels stand for fla, mamba_ssm and causal_conv1d, which need a GPU: they run transformers' own code on one sample
after another. Prints JSON: model type -> how samples were kept apart, and the bounds that each kernel was last given.
A model type with a colon and the name of a kernel: that kernel passes over its bounds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import torch
from lmms_stream.loader.collate import collate
from lmms_stream.train.model.choice import prove_packing
from lmms_stream.train.model.model import PackedModel

LENGTHS = (7, 12, 9)
given: dict[str, list[int]] = {}
leaking: set[str] = set()  # kernels that run all samples as one


def plain(model_type: str, name: str) -> Callable[..., Any]:
    """transformers' own code of a kernel."""
    function: Any = getattr(import_module(f"transformers.models.{model_type}.modeling_{model_type}"), name)
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    found: Callable[..., Any] = function
    return found


def spans(name: str, bounds: list[int]) -> Iterator[Callable[..., list[torch.Tensor]]]:
    """For each sample, what gives its part of tensors along an axis."""
    given[name] = bounds = [0, bounds[-1]] if name in leaking else bounds
    for start, stop in pairwise(bounds):
        yield lambda *tensors, dim, start=start, stop=stop: [each.narrow(dim, start, stop - start) for each in tensors]


def bounds_of(seq_idx: torch.Tensor | None, num_tokens: int) -> list[int]:
    changes = [] if seq_idx is None else (torch.nonzero(seq_idx[0].diff())[:, 0] + 1).tolist()
    return [0, *changes, num_tokens]


# transformers gives each kernel the arguments that it names.


def causal_conv1d_fn(x: Any, weight: Any, bias: Any = None, seq_idx: Any = None, activation: Any = None) -> Any:
    run = plain("qwen3_next", "causal_conv1d_fn")
    own = spans("causal_conv1d_fn", bounds_of(seq_idx, x.shape[2]))
    return torch.cat([run(*part(x, dim=2), weight, bias, activation) for part in own], dim=2)


def chunk_gated_delta_rule(
    q: Any, k: Any, v: Any, g: Any, beta: Any, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Any = None
) -> Any:
    run = plain("qwen3_next", "torch_chunk_gated_delta_rule")
    bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    found = []
    for part in spans("chunk_gated_delta_rule", bounds):
        q_, k_, v_, g_, beta_ = part(q, k, v, g, beta, dim=1)
        found.append(run(q_, k_, v_, g=g_, beta=beta_, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)[0])
    return torch.cat(found, dim=1), None


def mamba_chunk_scan_combined(
    x: Any, dt: Any, A: Any, B: Any, C: Any, chunk_size: int, D: Any = None, dt_bias: Any = None,  # noqa: N803
    seq_idx: Any = None, dt_softplus: bool = False, dt_limit: Any = (0.0, float("inf")),
) -> Any:  # fmt: skip
    run = plain("bamba", "mamba2_chunk_scan")
    found = []
    for part in spans("mamba_chunk_scan_combined", bounds_of(seq_idx, x.shape[1])):
        x_, dt_, b_, c_ = part(x, dt, B, C, dim=1)
        found.append(run(x_, dt_, A, b_, c_, chunk_size, D, dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit))
    return torch.cat(found, dim=1)


def mamba_split_conv1d_scan_combined(*_: Any, seq_idx: Any = None) -> None:
    """None: convolution and scan are called one by one."""


def install(package: str, *functions: Callable[..., Any]) -> None:
    module = ModuleType(package)
    module.__spec__ = ModuleSpec(package, None)
    vars(module).update({function.__name__: function for function in functions})
    sys.modules[package] = module


def main() -> None:
    install("causal_conv1d", causal_conv1d_fn)
    install("fla", chunk_gated_delta_rule)
    install("mamba_ssm", mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined)
    from .every_model import build  # which imports the models, and they their kernels

    made = {}
    for named in sys.argv[1:]:
        model_type, _, kernel = named.partition(":")
        leaking.clear()
        leaking.add(kernel)
        model = PackedModel(build("causal", model_type))
        prove_packing(model, device=torch.device("cpu"))
        given.clear()
        ids = np.random.default_rng(0).integers(5, 60, sum(LENGTHS))
        parts = np.split(ids, np.cumsum(LENGTHS)[:-1])
        model.train()(collate([{"input_ids": each, "labels": each} for each in parts], range(len(parts))))
        made[named] = {"kept_apart": model.kept_apart, "given": dict(given)}
    sys.stdout.write(json.dumps(made))


if __name__ == "__main__":
    main()
