"""Measures which part of a run is its limit: its loader alone, its model alone, both. Nothing is saved or resumed."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from ...errors import TrainingError
from ...loader.loader import PackedLoader
from ...processes.family import descendants
from ...train.loop import Loop
from ...train.report.metrics import cost_of, segment_lengths
from ...train.run.distributed import gather
from ...train.trainer import PackedTrainer
from ...types import Batch
from .rates import LoaderRates, Rates, RateSpread, StepRates, check_measured, limit_of

NUM_ROUNDS = 3
NUM_CANDIDATES = 3  # steps of which the one of median cost is what the model is run on again and again
CANDIDATE_BYTES = 1 << 30  # one step is enough where it is larger
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureConfig:
    """How long to measure: NUM_ROUNDS rounds of `steps` steps each, after warmup_steps; `seconds` at most of each.

    Workers hand over several short steps at once, so a round has as many more that it has whole items of every worker.
    """

    steps: int = 10
    warmup_steps: int = 3
    seconds: float = 60.0

    def __post_init__(self) -> None:
        check_measured(steps=self.steps, warmup_steps=self.warmup_steps, seconds=self.seconds)


def measure(trainer: PackedTrainer, config: MeasureConfig, tell: Tell = lambda line: None) -> Rates:
    """The rates of a run whose trainer is new; all ranks call it. tell: takes a line of progress.

    Loaders go on where the one before stood, so that each reads samples that nobody has read, as far as an epoch has
    enough of them. The model is trained meanwhile, and is of no use afterwards.
    """
    return _Measurement(trainer, config, tell).rates()


class _Deadline:
    """A signal to stop that comes when the time is over."""

    def __init__(self, seconds: float):
        self._at = time.monotonic() + seconds

    @property
    def is_received(self) -> bool:
        return time.monotonic() > self._at


class _Nowhere:
    """Instead of what saves a run and what logs it."""

    has_failed = False

    def end_step(self, position: int) -> None:
        """Nothing is told of it."""


class _Measurement:
    def __init__(self, trainer: PackedTrainer, config: MeasureConfig, tell: Tell):
        self._trainer, self._config, self._tell = trainer, config, tell
        self._world_size = trainer.world.world_size
        self._begin = trainer.data.cursor()
        # Building a saver begins to use the folder of the checkpoints; nothing is to be written here.
        cast(Any, trainer).saver = cast(Any, trainer).run_log = _Nowhere()

    def rates(self) -> Rates:
        trainer = self._trainer
        about = self._about(trainer.loader)
        self._tell(f"the loader alone, {trainer.config.num_workers} workers a rank: {about}")
        loader, packs = self._loader_alone(trainer.loader, num_candidates=NUM_CANDIDATES)
        self._tell("the model is built")
        _ = (trainer.model, trainer.steps, trainer.meter, trainer.optimizer, trainer.schedule)
        trainer.model.train()
        self._tell(f"the model alone, on one batch: {about}")
        model = self._steps(_again(packs))
        self._tell(f"both: {about}")
        both = self._both()
        rates = Rates(loader=loader, model=model, both=both, num_cpus=_num_cpus(), num_ranks=self._world_size)
        if limit_of(rates) not in ("data", "shared"):
            return rates
        num_workers = max(1, 2 * trainer.config.num_workers)
        larger = trainer.data.train_loader(num_workers=num_workers)
        self._tell(f"the loader alone, {num_workers} workers a rank: {self._about(larger)}")
        larger.load_state_dict(trainer.data.cursor())
        return replace(rates, more_workers=self._loader_alone(larger, num_candidates=0)[0])

    def _about(self, loader: PackedLoader) -> str:
        num_steps, seconds = self._round_steps(loader), self._config.seconds
        return f"{NUM_ROUNDS} rounds of {num_steps} steps, at most {seconds:g} s"

    def _loader_alone(self, loader: PackedLoader, *, num_candidates: int) -> tuple[LoaderRates, list[Batch]]:
        """Its rates, and the packs of a step that stands for others."""
        candidates: list[list[Batch]] = []
        rounds: list[_Round] = []
        with closing(self._endless(loader)) as batches:
            steps = self._trainer.data.steps_of(batches)
            deadline = _Deadline(self._config.seconds)
            for _ in range(self._warmup_steps(loader)):
                next(steps)
                if any(self._agree(deadline.is_received)):
                    break
            for _ in range(NUM_ROUNDS):
                made = self._loader_round(steps, loader, candidates, num_candidates)
                rounds.append(made)
                if made.is_cut_off:
                    break
        packs = candidates[self._median_cost(candidates)] if candidates else []
        return _loader_rates(rounds, num_workers=loader.num_workers), packs

    def _loader_round(
        self, steps: Iterator[list[Batch]], loader: PackedLoader, candidates: list[list[Batch]], num_candidates: int
    ) -> _Round:
        deadline = _Deadline(self._config.seconds / NUM_ROUNDS)
        fetched, cpu_s, begun = loader.fetched, loader_cpu_s(loader.num_workers), time.monotonic()
        num_tokens = num_packs = num_steps = 0
        wanted, is_over = self._round_steps(loader), False
        while num_steps < wanted and not is_over:
            packs = next(steps)
            num_tokens += int(segment_lengths(packs).sum())
            num_packs += sum(len(pack.sample_ids) > 0 for pack in packs)
            num_steps += 1
            is_over, is_large = self._agree(deadline.is_received, _num_bytes(packs) > CANDIDATE_BYTES)
            if len(candidates) < (min(1, num_candidates) if is_large else num_candidates):
                candidates.append(packs)
        seconds, cpu_s = time.monotonic() - begun, loader_cpu_s(loader.num_workers) - cpu_s
        new = [now - before for now, before in zip(loader.fetched, fetched, strict=True)]
        everyone = gather([seconds, num_tokens, num_packs, cpu_s, *new], self._world_size)
        (_, *read, cpu_s), readers = everyone[:, :4].sum(dim=0).tolist(), self._trainer.world.replication
        total = type(fetched)(*map(int, everyone[:, 4:].sum(dim=0).tolist()))
        return _Round(
            num_tokens=read[0] / readers, num_packs=read[1] / readers, cpu_s=cpu_s, hits=total.hits,
            misses=total.misses + total.from_peers, num_bytes=total.num_bytes + total.peer_bytes,
            seconds=float(everyone[:, 0].max()), is_cut_off=is_over and num_steps < wanted,
        )  # fmt: skip

    def _agree(self, *flags: bool) -> list[bool]:
        """Each flag as any rank has it."""
        return [total > 0 for total in gather([float(flag) for flag in flags], self._world_size).sum(dim=0).tolist()]

    def _median_cost(self, candidates: Sequence[Sequence[Batch]]) -> int:
        """The number of the step whose packs cost the median of all, over all ranks."""
        costs = gather([cost_of(segment_lengths(packs)) for packs in candidates], self._world_size).sum(dim=0).tolist()
        return costs.index(statistics.median_low(costs))

    def _both(self) -> StepRates:
        trainer = self._trainer
        with closing(self._endless(trainer.loader)) as batches:
            waiting = trainer.phases.of_each("data", trainer.meter.waiting(batches))
            return self._steps(trainer.data.steps_of(waiting))

    def _steps(self, steps: Iterable[list[Batch]]) -> StepRates:
        """The trainer's own steps on these packs."""
        config, meter, taken = self._config, self._trainer.meter, iter(steps)
        loop = Loop(self._trainer, cast(Any, _Deadline(config.seconds)))
        for _ in range(self._warmup_steps(self._trainer.loader)):
            if loop.train_step(next(taken)):
                break
        meter.record()
        loop = Loop(self._trainer, cast(Any, _Deadline(config.seconds)))
        records: list[dict[str, Any]] = []
        is_over = False
        while len(records) < NUM_ROUNDS and not is_over:
            for _ in range(self._round_steps(self._trainer.loader)):
                is_over = loop.train_step(next(taken))
                if is_over:
                    break
            records.append(meter.record())
        return _step_rates(records)

    def _warmup_steps(self, loader: PackedLoader) -> int:
        """Those that are asked for; and what all workers have made at once, when they have begun."""
        return max(self._config.warmup_steps, -(-_at_once(loader) // loader.micro_batches))

    def _round_steps(self, loader: PackedLoader) -> int:
        """The steps of a round: those that are asked for, and what is left of the items that these are in."""
        of_items = max(1, _at_once(loader) // loader.micro_batches)
        return -(-self._config.steps // of_items) * of_items

    def _endless(self, loader: PackedLoader) -> Generator[Batch, None, None]:
        """Batches from where a loader stands, or from where the run began if its epoch ended during the measurement.

        A new epoch starts new workers. Of an epoch that is shorter than a measurement, that is part of the figures.
        """
        num_steps = self._warmup_steps(loader) + NUM_ROUNDS * self._round_steps(loader)
        if loader.packs_left is not None and loader.steps_left < num_steps:
            loader.load_state_dict(self._begin)
        while True:
            if loader.packs_left == 0:
                loader.load_state_dict(self._begin)
            batch = None
            for batch in loader:
                yield batch
            if batch is None:
                raise TrainingError(
                    "the loader gave no batch: look at the lengths of the dataset with lmms-stream plan"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Round:
    """Steps of a loader, of all ranks."""

    num_tokens: float
    num_packs: float
    cpu_s: float
    hits: int
    misses: int
    num_bytes: int
    seconds: float
    is_cut_off: bool


def _loader_rates(rounds: Sequence[_Round], *, num_workers: int) -> LoaderRates:
    seconds = sum(each.seconds for each in rounds)
    return LoaderRates(
        num_workers=num_workers,
        tokens_per_s=RateSpread.of([(each.num_tokens, each.seconds) for each in rounds]),
        packs_per_s=RateSpread.of([(each.num_packs, each.seconds) for each in rounds]),
        busy_cpus=sum(each.cpu_s for each in rounds) / seconds,
        fetched_mb_per_s=sum(each.num_bytes for each in rounds) / 1e6 / seconds,
        cache_hits=sum(each.hits for each in rounds),
        cache_misses=sum(each.misses for each in rounds),
    )


def _step_rates(records: Sequence[dict[str, Any]]) -> StepRates:
    mfu = [record["perf/mfu"] for record in records if "perf/mfu" in record]

    def spread(name: str) -> RateSpread:
        """Of a figure that is a rate, or a share of the time."""
        return RateSpread.of([(record[name] * record["seconds"], record["seconds"]) for record in records])

    return StepRates(
        steps_per_s=RateSpread.of([(record["num_steps"], record["seconds"]) for record in records]),
        tokens_per_s=spread("perf/tokens_per_s"),
        wait_share=spread("data/wait_share"),
        mfu=statistics.median(mfu) if mfu else None,
    )


def _again(packs: list[Batch]) -> Iterator[list[Batch]]:
    while True:
        yield packs


def _at_once(loader: PackedLoader) -> int:
    """Packs of an item of every worker."""
    return max(1, loader.num_workers) * loader.settings.steps.packs_per_item


def _num_bytes(packs: Sequence[Batch]) -> int:
    tensors = [tensor for pack in packs for tensor in (pack.input_ids, pack.labels, *pack.inputs.values())]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0))


# CPU time of a process and of those that it started.

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def loader_cpu_s(num_workers: int) -> float:
    """CPU seconds so far of all processes that this one started, living and ended; without workers, of this one.

    Workers end with their epoch: what they took counts on, as that of their parent's children.
    """
    if not num_workers:
        return time.process_time()
    ended = os.times()
    return sum(map(_cpu_s, descendants(os.getpid())), ended.children_user + ended.children_system)


def _cpu_s(pid: int) -> float:
    """Of a process and of its children that have ended."""
    with suppress(OSError):  # it has ended
        of_both = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
        return sum(map(int, of_both)) / _TICKS_PER_S
    return 0.0
