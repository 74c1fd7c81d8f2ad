"""Measure the limit of a run: loader only, model only, both. Nothing is saved or resumed."""

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
NUM_CANDIDATES = 3  # steps to choose from; the model repeats the step with the median cost
CANDIDATE_BYTES = 1 << 30  # for larger steps, one candidate is enough
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureConfig:
    """Length of the measurement: NUM_ROUNDS rounds of `steps` steps each, after warmup_steps; at most `seconds` each.

    Workers deliver several short steps at once; a round is extended to complete items of every worker.
    """

    steps: int = 10
    warmup_steps: int = 3
    seconds: float = 60.0

    def __post_init__(self) -> None:
        check_measured(steps=self.steps, warmup_steps=self.warmup_steps, seconds=self.seconds)


def measure(trainer: PackedTrainer, config: MeasureConfig, tell: Tell = lambda line: None) -> Rates:
    """Measure the rates of a run with a new trainer; called by all ranks. tell: receives lines of progress.

    Each loader starts at the position of the previous loader, to read unread samples if the epoch has enough. The
    measurement trains the model; discard the model afterwards.
    """
    return _Measurement(trainer, config, tell).rates()


class _Deadline:
    """Stop signal at the end of the allowed time."""

    def __init__(self, seconds: float):
        self._at = time.monotonic() + seconds

    @property
    def is_received(self) -> bool:
        return time.monotonic() > self._at


class _Nowhere:
    """Replacement for the saver and the log of a run; does nothing."""

    has_failed = False

    def takes_trace(self) -> bool:
        """No trace is requested of a measurement."""
        return False

    def end_step(self, position: int) -> None:
        """Do nothing."""


class _Measurement:
    def __init__(self, trainer: PackedTrainer, config: MeasureConfig, tell: Tell):
        self._trainer, self._config, self._tell = trainer, config, tell
        self._world_size = trainer.world.world_size
        self._begin = trainer.data.cursor()
        # A real saver would start to use the checkpoint folder; the measurement writes nothing.
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
        """Return the loader's rates, and the packs of a representative step."""
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
        """Return each flag, True if True on any rank."""
        return [total > 0 for total in gather([float(flag) for flag in flags], self._world_size).sum(dim=0).tolist()]

    def _median_cost(self, candidates: Sequence[Sequence[Batch]]) -> int:
        """Number of the step with the median cost of its packs, summed over all ranks."""
        costs = gather([cost_of(segment_lengths(packs)) for packs in candidates], self._world_size).sum(dim=0).tolist()
        return costs.index(statistics.median_low(costs))

    def _both(self) -> StepRates:
        trainer = self._trainer
        with closing(self._endless(trainer.loader)) as batches:
            waiting = trainer.phases.of_each("data", trainer.meter.waiting(batches))
            return self._steps(trainer.data.steps_of(waiting))

    def _steps(self, steps: Iterable[list[Batch]]) -> StepRates:
        """Run the trainer's own steps on the given packs; return their rates."""
        config, meter, taken = self._config, self._trainer.meter, iter(steps)
        loop = Loop(self._trainer, cast(Any, _Deadline(config.seconds)))
        for _ in range(self._warmup_steps(self._trainer.loader)):
            if loop.train_step(next(taken)):
                break
        loop.read()
        meter.end_record()()
        loop = Loop(self._trainer, cast(Any, _Deadline(config.seconds)))
        records: list[dict[str, Any]] = []
        is_over = False
        while len(records) < NUM_ROUNDS and not is_over:
            for _ in range(self._round_steps(self._trainer.loader)):
                is_over = loop.train_step(next(taken))
                if is_over:
                    break
            loop.read()
            records.append(meter.end_record()())
        return _step_rates(records)

    def _warmup_steps(self, loader: PackedLoader) -> int:
        """Number of warmup steps: the setting, or more to use up the first item of every worker."""
        return max(self._config.warmup_steps, -(-_at_once(loader) // loader.micro_batches))

    def _round_steps(self, loader: PackedLoader) -> int:
        """Number of steps of a round: the setting, rounded up to complete items of all workers."""
        of_items = max(1, _at_once(loader) // loader.micro_batches)
        return -(-self._config.steps // of_items) * of_items

    def _endless(self, loader: PackedLoader) -> Generator[Batch, None, None]:
        """Yield batches from the loader's position, or from the start of the run if the epoch is too short for the
        measurement.

        A new epoch starts new workers. For an epoch shorter than the measurement, the figures include this start.
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
    """Totals of one round of a loader over all ranks."""

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
        """Spread of a rate or a share of the time."""
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


# CPU time of a process and of its descendants.

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def loader_cpu_s(num_workers: int) -> float:
    """CPU seconds of all descendants of this process, running and ended; without workers, of this process.

    Workers end with their epoch; their CPU time then counts as children's time of their parent.
    """
    if not num_workers:
        return time.process_time()
    ended = os.times()
    return sum(map(_cpu_s, descendants(os.getpid())), ended.children_user + ended.children_system)


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process and of its ended children; 0 if the process has ended."""
    with suppress(OSError):  # the process has ended
        of_both = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
        return sum(map(int, of_both)) / _TICKS_PER_S
    return 0.0
