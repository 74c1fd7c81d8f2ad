"""Figures of plans, in numbers and as a picture."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import numpy as np
from numpy.typing import NDArray

from ...cli.plots import new_figure, save_figure
from ...errors import DataError
from ...mds.core import PackedDataset
from ...mds.lengths import LengthIndex
from ...mds.shard import open_shard
from ...plan.assign import assign, count_spilled, num_steps, pack_costs
from ...plan.ledger import Stretch
from ...plan.mixture import Mixture
from ...plan.order import shards_of
from ...plan.pack_plan import PackPlan
from ...plan.packing import PackRange
from ...plan.windows import ACROSS_SOURCES, DEAL, WINDOW, WindowedMixture
from ...processors.base import IGNORED_LABEL, Compared, Processor
from ...types import Sample, World
from ..ledger.amounts import steps_to_end

if TYPE_CHECKING:
    from ...train.run.settings import TrainConfig

COMPARED_STRATEGIES = ("best_fit", "window_16384", "window_1024", "first_fit", "next_fit")


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochReport:
    """One epoch of one source.

    efficiency: tokens over what the packs could hold. lower_bound: packs that no packing can do with less of
    (all tokens over packing_length, or the samples longer than half of it). num_overlong: dropped, truncated,
    split or kept, as configured; num_overlong_media: those of them with media, which are dropped (None: there are no
    media). num_beyond_positions: longer than the positions of the model (None: no model is named).
    """

    source: str
    epoch: int
    num_samples: int
    num_overlong: int
    num_overlong_media: int | None
    num_beyond_positions: int | None
    num_tokens: int
    num_packs: int
    lower_bound: int
    efficiency: float
    samples_per_pack: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepsReport:
    """Steps of a mixture: how many (None without an end), and what a look at the first `num_seen` shows.

    num_steps: of an epoch; with weights, until all sources end. num_run_steps: trained steps of a run, None if unknown;
    run_end: the setting with its end, None without a run. shards_per_step: how many shards a step reads from.
    imbalance: work of the busiest rank over the mean (sum over segments of len**2), mean over steps, as assigned and
    with packs dealt in order. imbalance_with_windows, imbalance_across_sources, imbalance_with_even_fit: with balance:
    window, with across_sources, and with packing_strategy: even_fit; None unless compared. tower_imbalance: the same
    for patches of media, over steps with media, None without media. num_spilled_packs: packs read on another node than
    the one that serves their canonical node.
    """

    num_run_steps: int | None = None
    run_end: str | None = None
    num_steps: int | None
    num_seen: int
    shards_per_step_median: float
    shards_per_step_max: int
    imbalance: float
    imbalance_in_order: float
    imbalance_with_windows: float | None
    imbalance_across_sources: float | None  # of several sources
    imbalance_with_even_fit: float | None
    tower_imbalance: float | None
    tower_imbalance_in_order: float | None
    num_spilled_packs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class KindsReport:
    """How the tokens of a source's samples, overlong ones too, divide among kinds.

    num_patches: of all its media. num_cut: media of which not all is read.
    """

    source: str
    num_text_tokens: int
    text_share: float
    num_image_tokens: int
    image_share: float
    num_video_tokens: int
    video_share: float
    num_audio_tokens: int
    audio_share: float
    num_patches: int
    num_cut: int


def report_kinds(plan: PackPlan, *, source: str) -> KindsReport | None:
    """Report the kinds of a source's tokens; None for a source without media, with text tokens only."""
    index = plan.index
    if not isinstance(index, LengthIndex) or index.num_tokens_of is None:
        return None
    total = max(1, sum(index.num_tokens_of.values()))
    counts = {f"num_{kind}_tokens": count for kind, count in index.num_tokens_of.items()}
    shares = {f"{kind}_share": count / total for kind, count in index.num_tokens_of.items()}
    amounts = {"num_patches": index.num_patches, "num_cut": index.num_cut}
    return KindsReport(source=source, **amounts, **counts, **shares)  # type: ignore[arg-type]


def report_epoch(plan: PackPlan, *, source: str, epoch: int, positions: int | None = None) -> EpochReport:
    num_packs, num_tokens = plan.num_packs(epoch), plan.num_tokens(epoch)
    overlong = plan.num_overlong(epoch)
    overlong_media = plan.num_overlong_media(epoch)
    packed = plan.epoch_size - (overlong if plan.packing.overlong == "drop" else overlong_media)
    return EpochReport(
        source=source,
        epoch=epoch,
        num_samples=plan.epoch_size,
        num_overlong=overlong,
        num_overlong_media=None if plan.index.patches is None else overlong_media,
        num_beyond_positions=None if positions is None else plan.num_longer_than(positions),
        num_tokens=num_tokens,
        num_packs=num_packs,
        lower_bound=_lower_bound(plan, num_tokens, epoch=epoch),
        efficiency=plan.efficiency(epoch),
        samples_per_pack=packed / max(1, num_packs),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamReport:
    """A stream of a source whose packs hold samples of several streams, in the first epoch.

    num_samples: drawn, overlong samples included. num_passes: num_samples as a multiple of the stream's samples.
    token_share: of the tokens in packs.
    """

    stream: str
    source: str
    num_samples: int
    num_passes: float
    num_tokens: int
    token_share: float


def report_streams(plan: PackPlan, *, source: str) -> list[StreamReport]:
    """Report the streams of a source; [] for a source without streams. Reads the lengths of the whole epoch."""
    if plan.streams is None:
        return []
    stored = np.bincount(plan.streams_of(np.arange(plan.num_samples)), minlength=len(plan.streams.names)).tolist()
    tokens = plan.tokens_of_streams(0).tolist()
    return [
        StreamReport(
            stream=name,
            source=source,
            num_samples=count,
            num_passes=count / size,
            num_tokens=of_stream,
            token_share=of_stream / max(1, sum(tokens)),
        )
        for name, count, size, of_stream in zip(plan.streams.names, plan.streams.counts, stored, tokens, strict=True)
    ]


def _lower_bound(plan: PackPlan, num_tokens: int, *, epoch: int) -> int:
    limit = plan.packing.packing_length
    longer_than_half = 0
    for ids in plan.sample_chunks(epoch):
        lengths = np.asarray(plan.lengths[ids], dtype=np.int64)
        kept = lengths <= limit
        if plan.packing.overlong == "keep":
            kept |= True
        if plan.packing.overlong == "truncate":
            kept |= plan.index.patches is None or np.asarray(plan.index.patches[ids]) == 0
        whole = lengths[kept]
        longer_than_half += int(np.count_nonzero(2 * whole > limit))
    return max(-(-(num_tokens - plan.num_tokens_over(epoch)) // limit), longer_than_half)


def report_steps(mixture: Mixture, *, global_batch: int, world: World, max_seen: int = 256) -> StepsReport:
    """Report on the first steps of a mixture for the ranks of `world`."""
    cursor = mixture.start()
    packs_left = mixture.packs_left(cursor, global_batch=global_batch)
    shards: list[int] = []
    assigned: list[float] = []
    in_order: list[float] = []
    towers: list[float] = []
    towers_in_order: list[float] = []
    spilled = 0
    for _ in range(max_seen):
        step = mixture.step(cursor, global_batch=global_batch)
        if step.num_packs == global_batch:
            packs = mixture.packs(step.ranges)
            shards.append(_num_shards(mixture, packs))
            costs = pack_costs(packs, linear_cost=0)
            dealt = assign(
                packs,
                global_batch=global_batch,
                nodes=world.group_nodes,
                num_canonical_nodes=mixture.num_canonical_nodes,
                linear_cost=0,
            )
            assigned.append(_imbalance(costs, dealt))
            in_turn = np.arange(global_batch).reshape(world.num_groups, -1)
            in_order.append(_imbalance(costs, in_turn))
            if packs.patches is not None and packs.patches.any():
                towers.append(_imbalance(packs.patches, dealt))
                towers_in_order.append(_imbalance(packs.patches, in_turn))
            spilled += count_spilled(
                packs, dealt, nodes=world.group_nodes, num_canonical_nodes=mixture.num_canonical_nodes
            )
        cursor = step.after
        if step.ends_epoch:
            break
    return StepsReport(
        num_steps=None if packs_left is None else num_steps(global_batch=global_batch, num_packs=packs_left),
        num_seen=len(shards),
        shards_per_step_median=float(np.median(shards)) if shards else 0.0,
        shards_per_step_max=max(shards, default=0),
        imbalance=float(np.mean(assigned)) if assigned else 1.0,
        imbalance_in_order=float(np.mean(in_order)) if in_order else 1.0,
        imbalance_with_windows=None,
        imbalance_across_sources=None,
        imbalance_with_even_fit=None,
        tower_imbalance=float(np.mean(towers)) if towers else None,
        tower_imbalance_in_order=float(np.mean(towers_in_order)) if towers else None,
        num_spilled_packs=spilled,
    )


def compare_balances(steps: StepsReport, mixture: Mixture, *, global_batch: int, world: World) -> StepsReport:
    """Add the imbalance with windows and with even_fit, unless an order is fixed by shuffle: false."""
    if not all(plan.order.shuffle for plan in mixture.plans.values()):
        return steps
    schedule = None if mixture.schedule is None else dict(mixture.schedule)
    evened = {name: with_strategy(plan, "even_fit") for name, plan in mixture.plans.items()}

    def imbalance(plans: Mapping[str, PackPlan], balance: str) -> float:
        compared = WindowedMixture(plans, weights=schedule, max_epochs=mixture.max_epochs, balance=balance)
        return report_steps(compared, global_batch=global_batch, world=world).imbalance

    return dataclasses.replace(
        steps,
        imbalance_with_windows=imbalance(mixture.plans, WINDOW),
        imbalance_across_sources=imbalance(mixture.plans, ACROSS_SOURCES) if len(mixture.names) > 1 else None,
        imbalance_with_even_fit=imbalance(evened, DEAL),
    )


def report_run(steps: StepsReport, mixture: Mixture, train: TrainConfig) -> StepsReport:
    """Add the number of steps of a run, without skipped steps, and the end of the run."""
    from ...train.run.schedules import num_kept  # imports torch, like the run's file

    skipped = train.skip_steps
    stretch = Stretch(mixture=mixture, cursor=mixture.start(), global_batch=train.global_batch, skipped=skipped)
    if train.num_train_epochs is not None:
        stop = steps_to_end(stretch, num_epochs=train.num_train_epochs) or 0
        num_epochs = f"train.num_train_epochs: {train.num_train_epochs:,}"
        return dataclasses.replace(steps, num_run_steps=num_kept(0, stop, skipped=skipped), run_end=num_epochs)
    left = steps_to_end(stretch) if mixture.schedule is not None else None
    most = None if left is None else num_kept(0, left, skipped=skipped)
    if train.max_steps is None:
        unless = "" if most is None else f", or train.max_epochs after {most:,} steps"
        return dataclasses.replace(steps, run_end=f"train.max_tokens: {train.max_tokens:,}{unless}")
    if most is not None and most < train.max_steps:
        return dataclasses.replace(steps, num_run_steps=most, run_end="train.max_epochs: all sources end")
    return dataclasses.replace(steps, num_run_steps=train.max_steps, run_end=f"train.max_steps: {train.max_steps:,}")


def _num_shards(mixture: Mixture, packs: PackRange) -> int:
    sources = np.repeat(packs.sources, np.diff(packs.offsets))
    total = 0
    for number, name in enumerate(mixture.names):
        sizes = mixture.plans[name].samples_per_shard
        total += len(np.unique(shards_of(packs.sample_ids[sources == number], np.cumsum(sizes) - sizes)))
    return total


def _imbalance(costs: NDArray[np.int64], dealt: NDArray[np.int64]) -> float:
    work = costs[dealt].sum(axis=1)
    return float(work.max() / work.mean())


def with_strategy(plan: PackPlan, strategy: str) -> PackPlan:
    """Return the plan packed by another strategy."""
    packing = dataclasses.replace(plan.packing, strategy=strategy)
    return plan.of_packing(packing, keeps_counts=False)


def by_length(name: str, plan: PackPlan) -> dict[str, PackPlan]:
    """Return a source's plan of each packing_length, by the names for a report."""
    if not plan.packing.later_lengths:
        return {name: plan}
    packings = [plan.packing.of_length(length) for length in plan.packing.lengths]
    return {f"{name}, {each.packing_length} tokens": plan.of_packing(each) for each in packings}


def plot_plans(plans: Mapping[str, PackPlan], path: Path, *, epoch: int = 0, max_packs: int = 4096) -> None:
    """Draw sample lengths and the fill of the first `max_packs` packs; the suffix of `path` says the format."""
    figure = new_figure(width=11, height=4)
    left, right = figure.subplots(1, 2)
    for limit in sorted({plan.packing.packing_length for plan in plans.values()}):
        left.axvline(limit, color="black", linestyle=":", label=f"packing_length {limit}")
    drawn: set[int] = set()
    for name, plan in plans.items():
        if id(plan.lengths) not in drawn:  # strategies share their lengths
            drawn.add(id(plan.lengths))
            lengths = np.asarray(plan.lengths)
            bins = np.geomspace(max(1, lengths.min()), lengths.max() + 1, 60)
            left.hist(lengths, bins=bins, alpha=0.6, label=f"{len(lengths):,} samples")
        packs = plan.packs(epoch, 0, min(max_packs, plan.num_packs(epoch)))
        fill = np.sort(np.add.reduceat(packs.lengths, packs.offsets[:-1]))[::-1] / plan.packing.packing_length
        label = f"{name}: {plan.num_packs(epoch):,} packs, {plan.efficiency(epoch):.2%}"
        right.plot(np.linspace(0, 100, len(fill)), fill * 100, label=label)
    left.set(xscale="log", xlabel="tokens of a sample", ylabel="samples")
    left.legend()
    right.set(xlabel="% of the packs, from full to empty", ylabel="% of packing_length filled", ylim=(0, 102))
    right.legend(loc="lower left")
    save_figure(figure, path)


# Share of the tokens of a source that is trained on. Lengths do not tell it: some samples are read and processed.

_MAX_TOKENS = 1 << 20  # of all samples that are read, so that a plan takes some seconds more
_MAX_SAMPLES, _MAX_WITH_MEDIA, _MIN_SAMPLES = 1024, 64, 16
_MAX_SHARDS = 64  # that are opened


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedReport:
    """Trained tokens of a source, in num_looked_at of its num_samples samples, which are evenly spread.

    trained_share: None if it is not known; unknown gives the reason. num_without: samples in which nothing is trained
    on. num_refused: samples that the processor refuses.
    """

    source: str
    num_samples: int
    num_looked_at: int = 0
    trained_share: float | None = None
    num_without: int = 0
    num_refused: int = 0
    unknown: str | None = None


def report_trained(
    dataset: PackedDataset, processor: Processor | None, *, source: str, num_sources: int = 1
) -> TrainedReport:
    """Process some samples of a source. num_sources: sources of the plan, which share the samples that are read."""
    unknown = _reason(dataset, processor)
    if processor is None or unknown is not None:
        return TrainedReport(source=source, num_samples=dataset.num_samples, unknown=unknown)
    counts: Counter[str] = Counter()
    for sample in _some_samples(dataset, processor, num_sources=num_sources):
        counts["samples"] += 1
        try:
            labels = processor.process(sample)["labels"]
        except DataError:
            counts["refused"] += 1
            continue
        num_trained = int(np.count_nonzero(np.asarray(labels)[1:] != IGNORED_LABEL))  # nothing predicts the first token
        counts["tokens"] += len(labels)
        counts["trained"] += num_trained
        counts["without"] += not num_trained
    return TrainedReport(
        source=source,
        num_samples=dataset.num_samples,
        num_looked_at=counts["samples"],
        trained_share=counts["trained"] / counts["tokens"] if counts["tokens"] else None,
        num_without=counts["without"],
        num_refused=counts["refused"],
        unknown=None if counts["tokens"] else "the processor refuses all samples that were read",
    )


def _reason(dataset: PackedDataset, processor: Processor | None) -> str | None:
    """Why the share of a source is not known; None if samples can be read."""
    if processor is None:
        return (
            "pass --tokenizer with the folder or hub id of a tokenizer; plan then reads some samples and shows their "
            "share of trained tokens"
        )
    objective = getattr(processor, "objective", None)
    if objective is not None and objective not in get_args(Compared):
        return f"its samples are not trained on as tokens only, but for {objective}"
    stored = dataset.one
    if stored.is_copied or not all((stored.folder_of_files / info.name).exists() for info in stored.shards[:1]):
        cause = "compressed" if stored.shards.zip_sizes.any() else "not in a local folder"
        return (
            f"its shards are {cause}, and a plan neither downloads nor decompresses shards: "
            f"lmms-stream inspect {stored.url} --tokenizer … shows the trained tokens of single samples"
        )
    return None


def _some_samples(dataset: PackedDataset, processor: Processor, *, num_sources: int) -> Iterator[Sample]:
    """Yield samples that are evenly spread over some shards, which are evenly spread over the dataset."""
    stored, index = dataset.one, dataset.plan.index
    most = _MAX_SAMPLES if index.patches is None else _MAX_WITH_MEDIA
    by_tokens = _MAX_TOKENS * dataset.num_samples // max(1, int(np.sum(index.lengths, dtype=np.int64)))
    num_samples = max(_MIN_SAMPLES, min(most, by_tokens) // num_sources)
    shards = [stored.shards[number] for number in _evenly(len(stored.shards), min(_MAX_SHARDS, num_samples))]
    found = [info for info in shards if (stored.folder_of_files / info.name).exists()]
    for info in found:
        shard = open_shard(stored.folder_of_files / info.name, info, columns=processor.columns)
        for within in _evenly(info.num_samples, -(-num_samples // len(found))):
            yield shard[within]


def _evenly(total: int, count: int) -> list[int]:
    """Return `count` numbers below `total`, or all of them, at equal distances.

    >>> _evenly(10, 3), _evenly(2, 3)
    ([0, 4, 9], [0, 1])
    """
    return np.unique(np.linspace(0, total - 1, min(count, total)).astype(np.int64)).tolist()  # type: ignore[no-any-return]
