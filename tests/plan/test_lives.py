"""Random lives of a run, against the plain Python of lives.py: settings change at any step, and kills lose steps."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from random import Random

import numpy as np
from lmms_stream.errors import ConfigError, CursorError
from lmms_stream.plan.cursor import Cursor
from lmms_stream.plan.events import last_step_of
from lmms_stream.plan.ledger import StepLookup, Stretch
from lmms_stream.plan.mixture import Step
from lmms_stream.plan.pack_plan import packed_tokens
from lmms_stream.plan.packing import PackRange
from lmms_stream.plan.planner import StepConfig, StepPlanner
from lmms_stream.plan.source_ranges import SourceRange
from lmms_stream.plan.windows import WindowedMixture
from lmms_stream.tools.ledger.amounts import amounts_of, seen_tokens
from lmms_stream.types import World

from ..rounds import rounds
from .lives import Life, Read, Settings, Sources

NAMES = "abcd"
Packs = list[tuple[Read, PackRange]]  # of a step


BALANCES: tuple[str | int, ...] = ("deal", "deal", 2, 5, "across_sources")


def reads(step: Step) -> list[Read]:
    return [(part.source, part.epoch, pack) for part in step.ranges for pack in range(part.first, part.stop)]


def drawn_sources(random: Random) -> Sources:
    return Sources(
        sizes={name: tuple(random.randint(1, 25) for _ in range(random.randint(1, 4))) for name in NAMES},
        seed=random.randint(0, 99),
        nodes=random.randint(1, 3),
        strategy=random.choice(["best_fit", "first_fit", "next_fit", "window_4"]),
        overlong=random.choice(["error", "drop", "truncate", "split", "keep"]),
        first_length=random.choice([8, 20, 50]),
    )


def drawn_settings(random: Random, step: int, old: Settings | None) -> Settings:
    """Return settings from a step on; many stay."""

    def stays(share: float) -> bool:
        return old is not None and random.random() < share

    names = list(old.names) if old is not None and stays(0.7) else random.sample(NAMES, random.randint(1, 4))
    if not stays(0.7):
        random.shuffle(names)

    def shares() -> dict[str, float]:
        return {name: random.choice([1, 1, 2, 5, 0.5]) for name in random.sample(names, random.randint(1, len(names)))}

    has_weights = old.weights is not None if old is not None and stays(0.8) else random.random() < 0.5
    by_step = {first: shares() for first in (0, step + random.randint(1, 9), step + random.randint(1, 9))}
    later = dict(old.later) if old is not None and stays(0.6) else {}
    if not stays(0.6):
        later |= {step + random.randint(1, 9): random.choice([8, 20, 50]) for _ in range(random.randint(1, 2))}
    return Settings(
        names=tuple(names),
        weights=None if not has_weights else by_step if random.random() < 0.4 else by_step[0],
        max_epochs={name: random.randint(1, 4) for name in names if has_weights and random.random() < 0.7},
        balance=old.balance if old is not None and stays(0.6) else random.choice(BALANCES),
        global_batch=old.global_batch if old is not None and stays(0.6) else random.randint(1, 7),
        later=later,
    )


def check_life(seed: int) -> bool:
    """Compare a life with its plain Python; return whether it has any packs."""
    random = Random(seed)
    sources = drawn_sources(random)
    settings: Settings | None = None
    life: Life | None = None
    state: Mapping[str, object] | None = None
    stretches: list[Stretch] = []
    log: list[Packs] = []
    for _ in range(random.randint(1, 4)):
        mixture = cursor = None
        while cursor is None:
            drawn = drawn_settings(random, len(log), settings)
            try:
                mixture = drawn.mixture(sources)
                cursor = mixture.start() if state is None else mixture.adopt(Cursor.from_dict(state))
            except ConfigError:  # all samples are dropped
                if life is None:
                    return False
            except CursorError as error:
                assert "continue with the former ones" in str(error)  # noqa: PT017
        assert mixture is not None
        settings = drawn
        life = Life(sources, settings) if life is None else life.resumed(settings)
        stretches.append(Stretch(mixture=mixture, cursor=cursor, global_batch=settings.global_batch))
        first, cursors, lives = len(log), [cursor], [life.copy()]
        for _ in range(random.randint(1, 14)):
            packs, ended = life.next_step()
            step = mixture.step(cursor, global_batch=settings.global_batch)
            assert reads(step) == [read for read, _ in packs]
            assert step.ends_epoch == ended
            cursor = step.after
            at = {name: cursor.sources[name] for name in settings.names}
            assert {name: tuple(each)[1:] for name, each in at.items()} == {n: tuple(life.at[n]) for n in at}
            log.append(packs)
            cursors.append(cursor)
            lives.append(life.copy())
        kept = random.randint(0, len(cursors) - 1)  # the last checkpoint before a kill
        check_positions(random, settings.mixture(sources), cursors, log[first:], settings.global_batch)
        if random.random() < 0.4:
            check_end(lives[kept].copy(), mixture, cursors[kept], settings.global_batch)
        if random.random() < 0.2:  # readers plan many steps
            check_readers(random, mixture, cursors[0], log[first:], settings.global_batch)
        life, cursor, log = lives[kept], cursors[kept], log[: first + kept]
        state = json.loads(json.dumps(cursor.to_dict(), sort_keys=True))
        check_ledger(random, StepLookup(stretches), log)
        if not log[first:]:
            stretches.pop()
    return True


def check_positions(
    random: Random, mixture: WindowedMixture, cursors: Sequence[Cursor], log: Sequence[Packs], global_batch: int
) -> None:
    for _ in range(3):
        a, b = sorted((random.randrange(len(cursors)), random.randrange(len(cursors))))
        assert mixture.skip(cursors[a], b - a, global_batch=global_batch) == cursors[b]
        if a < b and log[b - 1]:
            (source, epoch, number), _ = random.choice(log[b - 1])
            pack = SourceRange(source, epoch, number, number + 1)
            found = mixture.step_of(cursors[a], pack, global_batch=global_batch, num_steps=b - a)
            assert found == cursors[b - 1]
            assert mixture.step_of(cursors[a], pack, global_batch=global_batch, num_steps=b - 1 - a) is None
            assert mixture.step_of(cursors[b], pack, global_batch=global_batch, num_steps=9) is None


def check_end(life: Life, mixture: WindowedMixture, cursor: Cursor, global_batch: int) -> None:
    """Compare packs_left and the last step of each source with the rest of the run, up to the end of the epoch."""
    ends = mixture.schedule is None or all(name in mixture.max_epochs for name in mixture.read_names)
    left = mixture.packs_left(cursor, global_batch=global_batch)
    assert (left is not None) == ends
    last: dict[str, int] = {}
    total, ended = 0, False
    for step in range(cursor.step, cursor.step + (400 if ends else 30)):
        packs, ended = life.next_step()
        total += len(packs)
        last |= {read[0]: step for read, _ in packs}
        if ended:
            break
    assert not ended or left == total
    for name, most in mixture.max_epochs.items():
        found = last_step_of(name, mixture, cursor, global_batch=global_batch, end=life.step)
        is_over = life.at[name].epoch >= most and (life.window is None or name not in life.window.names_left)
        if is_over or found is not None:
            assert found == last.get(name)


def check_readers(
    random: Random, mixture: WindowedMixture, cursor: Cursor, log: Sequence[Packs], global_batch: int
) -> None:
    """Compare what all ranks of some world read, up to the end of an epoch."""
    world_size = random.choice([size for size in (1, 2, 3, 4) if global_batch % size == 0])
    found: dict[int, Counter[tuple[str, int]]] = {}
    for rank in range(world_size):
        config = StepConfig(global_batch=global_batch, world=World(rank=rank, world_size=world_size))
        for planned in StepPlanner(mixture, config).plan(cursor):
            if (work := planned.work).step >= len(log):
                break
            ids = ((work.source, sample_id) for sample_id in work.segments.sample_ids.tolist())
            found.setdefault(work.step, Counter()).update(ids)
    for step, samples in found.items():
        assert samples == Counter((read[0], each) for read, made in log[step] for each in made.sample_ids.tolist())


def segments_of(log: Sequence[Packs], source: str) -> Iterator[tuple[int, int, int, int]]:
    """Yield epoch, sample, start and length of each segment."""
    for (name, epoch, _), made in (pack for packs in log for pack in packs):
        if name == source:
            columns = (each.tolist() for each in (made.sample_ids, made.starts, made.lengths))
            yield from ((epoch, *segment) for segment in zip(*columns, strict=True))


def check_ledger(random: Random, ledger: StepLookup, log: Sequence[Packs]) -> None:
    stop = len(log)
    if stop:
        number = random.randrange(stop)
        expected = sorted((*read, made.sample_ids.tolist()) for read, made in log[number])
        assert not expected or expected == sorted(
            (each.source, each.epoch, each.number, each.sample_ids.tolist()) for each in ledger.step(number).packs
        )
    for name, found in amounts_of(ledger, stop).items():
        segments = list(segments_of(log, name))
        tokens = {(sample, start + token) for _, sample, start, size in segments for token in range(size)}
        plan = ledger.plan_before(name, stop)
        fit = np.flatnonzero(packed_tokens(plan.index, slice(None), packing=plan.packing)).tolist()
        seen = {sample for _, sample, _, _ in segments}
        assert found.num_samples == len({(epoch, sample) for epoch, sample, _, _ in segments})
        assert found.num_tokens == sum(size for *_, size in segments)
        assert (found.num_seen, found.num_unseen) == (len(seen), len({*fit} - seen))
        assert seen_tokens(ledger, name, stop) == len(tokens)


def test_the_events_of_random_lives_are_those_of_a_loop_that_looks_for_them_after_every_pack() -> None:
    assert sum(map(check_life, range(rounds(12, 2000)))) > rounds(8, 1500)
