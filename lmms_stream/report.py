"""What a plan amounts to, in numbers and as a picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .assign import num_steps
from .errors import ConfigError
from .plan import PackPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanReport:
    """One epoch of a plan. efficiency: tokens over capacity, 0 to 1; lower_bound: packs that no packing can beat."""

    epoch: int
    num_samples: int
    num_overlong: int
    num_tokens: int
    num_packs: int
    lower_bound: int
    efficiency: float
    num_steps: int
    samples_per_pack: float


def report_plan(plan: PackPlan, *, epoch: int, global_batch: int) -> PlanReport:
    num_packs, num_tokens = plan.num_packs(epoch), plan.num_tokens(epoch)
    overlong = plan.num_overlong(epoch)
    packed = plan.num_samples - (overlong if plan.packing.overlong == "drop" else 0)
    return PlanReport(
        epoch=epoch,
        num_samples=plan.num_samples,
        num_overlong=overlong,
        num_tokens=num_tokens,
        num_packs=num_packs,
        lower_bound=-(-num_tokens // plan.packing.packing_length),
        efficiency=plan.efficiency(epoch),
        num_steps=num_steps(global_batch=global_batch, num_packs=num_packs),
        samples_per_pack=packed / max(1, num_packs),
    )


def plot_plan(plan: PackPlan, path: Path, *, epoch: int = 0, max_packs: int = 4096) -> None:
    """Draw the sample lengths and the fill of the first `max_packs` packs; the suffix of `path` says the format."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'lmms-stream[demo]'") from error

    limit = plan.packing.packing_length
    packs = plan.packs(epoch, 0, min(max_packs, plan.num_packs(epoch)))
    fill = np.add.reduceat(packs.lengths, packs.offsets[:-1]) / limit
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    lengths = np.asarray(plan.lengths)
    left.hist(lengths, bins=np.geomspace(max(1, lengths.min()), lengths.max() + 1, 60), color="tab:blue")
    left.axvline(limit, color="tab:red", label=f"packing_length {limit}")
    left.set(xscale="log", xlabel="tokens of a sample", ylabel="samples", title=f"{len(lengths):,} samples")
    left.legend()
    right.plot(np.sort(fill)[::-1] * 100, color="tab:green")
    right.set(xlabel="pack, from full to empty", ylabel="% of packing_length filled", ylim=(0, 102))
    right.set_title(f"{plan.num_packs(epoch):,} packs, {plan.efficiency(epoch):.2%} full in all")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
