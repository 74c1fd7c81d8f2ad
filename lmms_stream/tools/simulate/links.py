"""Waiting time of steps for the links of nodes. Downloads and requests -> seconds; compiled.

The loaders of a node fetch `at_once` shards at a time, with equal shares of the node's link. A free thread chooses a
shard needed by the current step; else the first shard at hand; else, after all shards at hand have arrived, the oldest
request. The last two are skipped while `ahead` fetched shards wait for their use (see storage/prefetch.py). Shards of a
canonical node's second block are at hand from the start of the block, other shards from their request
(loader/blocks_ahead.py).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...versions.numba import compiled

_Numbers = NDArray[np.int64]
_Floats = NDArray[np.float64]
_ASKED, _UNDER_WAY, _DONE = 0, 1, 2


class Link(NamedTuple):
    """Link of every node. bytes_per_s: bandwidth. latency_s: time from a request to its first byte.

    taken_ahead: number of steps after the current step with shards already taken by loaders; taken shards do not count
    towards `ahead`.
    """

    bytes_per_s: float
    latency_s: float
    at_once: int
    ahead: int
    taken_ahead: int


class _Queues(NamedTuple):
    """Downloads of each node, in order of request. bounds: of each node's downloads, int64[nodes + 1].

    by_step, by_hand: numbers of downloads, per node, ordered by `steps` (needed) or by `at_hand`.
    """

    bounds: _Numbers
    steps: _Numbers
    released: _Numbers
    at_hand: _Numbers
    sizes: _Numbers
    by_step: _Numbers
    by_hand: _Numbers


class _State(NamedTuple):
    """State of the links. kinds, ended: one entry per download. Other fields: one row per node.

    now: current time. served: bytes received by a download since the start of the simulation. under_way, until: active
    downloads, and the value of `served` at the end of each. waiting, begins: ring of downloads before their first byte,
    and the time of this byte. asked, front: end of the requested downloads, and of the examined downloads. urgent,
    needed, taken: positions in by_step; earlier downloads have begun, have ended, or were taken. hand, hand_begun,
    hand_ended: positions in by_hand; earlier downloads are at hand, have begun, or have ended. untaken: number of
    downloads begun and not taken.
    """

    kinds: NDArray[np.int8]
    ended: _Floats
    now: _Floats
    served: _Floats
    num_under_way: _Numbers
    under_way: _Numbers
    until: _Floats
    num_waiting: _Numbers
    first_waiting: _Numbers
    waiting: _Numbers
    begins: _Floats
    asked: _Numbers
    front: _Numbers
    urgent: _Numbers
    needed: _Numbers
    taken: _Numbers
    hand: _Numbers
    hand_begun: _Numbers
    hand_ended: _Numbers
    untaken: _Numbers


def wait_for_links(
    steps: _Numbers,
    nodes: _Numbers,
    released: _Numbers,
    at_hand: _Numbers,
    sizes: _Numbers,
    begins: NDArray[np.bool_],
    *,
    link: Link,
    num_nodes: int,
    step_time_s: float,
) -> _Floats:
    """Seconds of waiting per step, until the last node has its shards.

    steps, nodes, sizes: step with the need, node and bytes of each download. released: step of the request, at the
    start of the step; at_hand: first step with priority over other downloads. begins: bool[num_steps], loaders restart
    at the step, and request its shards only after the end of the previous step.
    """
    order = np.lexsort((steps, released, nodes))
    bounds = np.searchsorted(nodes[order], np.arange(num_nodes + 1))
    steps, nodes, released, at_hand = steps[order], nodes[order], released[order], at_hand[order]
    queues = _Queues(
        bounds, steps, released, at_hand, sizes[order].astype(np.int64),
        np.lexsort((steps, nodes)), np.lexsort((steps, released, at_hand, nodes)),
    )  # fmt: skip
    slots = (num_nodes, max(1, min(link.at_once, len(steps))))
    state = _State(
        kinds=np.zeros(len(steps), np.int8), ended=np.zeros(len(steps)),
        now=np.zeros(num_nodes), served=np.zeros(num_nodes),
        num_under_way=np.zeros(num_nodes, np.int64), under_way=np.zeros(slots, np.int64), until=np.zeros(slots),
        num_waiting=np.zeros(num_nodes, np.int64), first_waiting=np.zeros(num_nodes, np.int64),
        waiting=np.zeros(slots, np.int64), begins=np.zeros(slots),
        asked=bounds[:-1].copy(), front=bounds[:-1].copy(), urgent=bounds[:-1].copy(), needed=bounds[:-1].copy(),
        taken=bounds[:-1].copy(), hand=bounds[:-1].copy(), hand_begun=bounds[:-1].copy(),
        hand_ended=bounds[:-1].copy(), untaken=np.zeros(num_nodes, np.int64),
    )  # fmt: skip
    waits: _Floats = np.zeros(len(begins))
    _wait(queues, state, link, begins, step_time_s, waits)
    return waits


@compiled
def _wait(
    queues: _Queues, state: _State, link: Link, begins: NDArray[np.bool_], step_time_s: float, waits: _Floats
) -> None:
    now = 0.0
    busy = np.ones(len(state.now), np.bool_)  # nodes with active links; most links are idle
    for step in range(len(waits)):
        ready = now
        for node in range(len(state.now)):
            busy[node] = _is_busy(queues, state, node, step)
            if not busy[node]:
                state.now[node] = now
                continue
            _run(queues, state, link, node, step, now)
            if begins[step]:
                _ask(queues, state, node, step)
            _take(queues, state, link, node, step)
            _fill(queues, state, link, node, step)
            ready = max(ready, _have(queues, state, link, node, step))
        waits[step] = ready - now
        for node in np.flatnonzero(busy):
            _run(queues, state, link, node, step, ready)
            _ask(queues, state, node, step)
            _fill(queues, state, link, node, step)
        now = ready + step_time_s


@compiled
def _is_busy(queues: _Queues, state: _State, node: int, step: int) -> bool:
    """Whether a link has active or requested downloads, or new requests at a step."""
    end = queues.bounds[node + 1]
    if state.num_under_way[node] or state.num_waiting[node] or state.front[node] < state.asked[node]:
        return True
    if state.asked[node] < end and queues.released[state.asked[node]] <= step:
        return True
    return state.needed[node] < end and queues.steps[queues.by_step[state.needed[node]]] <= step


@compiled
def _ask(queues: _Queues, state: _State, node: int, step: int) -> None:
    """Add the requests of a step, and the downloads at hand from this step on."""
    end = queues.bounds[node + 1]
    while state.asked[node] < end and queues.released[state.asked[node]] <= step:
        state.asked[node] += 1
    while state.hand[node] < end and queues.at_hand[queues.by_hand[state.hand[node]]] <= step:
        state.hand[node] += 1


@compiled
def _take(queues: _Queues, state: _State, link: Link, node: int, step: int) -> None:
    """Take the shards of steps up to `step + taken_ahead`; this frees room for other shards ahead."""
    while state.taken[node] < queues.bounds[node + 1]:
        number = queues.by_step[state.taken[node]]
        if queues.steps[number] > step + link.taken_ahead:
            break
        state.untaken[node] -= state.kinds[number] != _ASKED
        state.taken[node] += 1


@compiled
def _have(queues: _Queues, state: _State, link: Link, node: int, step: int) -> float:
    """Run the link until all shards of a step have arrived; return the time of the last arrival."""
    ready = 0.0
    while state.needed[node] < queues.bounds[node + 1]:
        number = queues.by_step[state.needed[node]]
        if queues.steps[number] > step:
            break
        while state.kinds[number] != _DONE:
            _go_on(queues, state, link, node, step, np.inf)
        ready = max(ready, state.ended[number])
        state.needed[node] += 1
    return ready


@compiled
def _run(queues: _Queues, state: _State, link: Link, node: int, step: int, until: float) -> None:
    while state.now[node] < until and _go_on(queues, state, link, node, step, until):
        pass


@compiled
def _go_on(queues: _Queues, state: _State, link: Link, node: int, step: int, until: float) -> bool:
    """Process the next event on a link, a first byte or the end of a download; False without an event by `until`."""
    now, count, slots = state.now[node], state.num_under_way[node], state.under_way.shape[1]
    slot, ends = -1, np.inf
    for each in range(count):
        if slot < 0 or state.until[node, each] < state.until[node, slot]:
            slot = each
    if slot >= 0:
        ends = now + (state.until[node, slot] - state.served[node]) * count / link.bytes_per_s
    begins = state.begins[node, state.first_waiting[node]] if state.num_waiting[node] else np.inf
    soonest = min(ends, begins)
    if soonest > until or soonest == np.inf:
        if count and until > now:
            state.served[node] += (until - now) * link.bytes_per_s / count
        state.now[node] = until
        return False
    if begins <= ends:
        if count and begins > now:
            state.served[node] += (begins - now) * link.bytes_per_s / count
        number = state.waiting[node, state.first_waiting[node]]
        state.first_waiting[node] = (state.first_waiting[node] + 1) % slots
        state.num_waiting[node] -= 1
        state.under_way[node, count] = number
        state.until[node, count] = state.served[node] + queues.sizes[number]
        state.num_under_way[node] += 1
        state.now[node] = max(now, begins)
        return True
    number = state.under_way[node, slot]
    state.kinds[number], state.ended[number] = _DONE, ends
    state.served[node], state.now[node] = state.until[node, slot], ends
    state.under_way[node, slot] = state.under_way[node, count - 1]
    state.until[node, slot] = state.until[node, count - 1]
    state.num_under_way[node] -= 1
    _fill(queues, state, link, node, step)
    return True


@compiled
def _fill(queues: _Queues, state: _State, link: Link, node: int, step: int) -> None:
    """Start the next downloads on idle threads."""
    slots = state.under_way.shape[1]
    while state.num_under_way[node] + state.num_waiting[node] < slots:
        number = _next(queues, state, link, node, step)
        if number < 0:
            return
        state.kinds[number] = _UNDER_WAY
        state.untaken[node] += queues.steps[number] > step + link.taken_ahead
        last = (state.first_waiting[node] + state.num_waiting[node]) % slots
        state.waiting[node, last] = number
        state.begins[node, last] = state.now[node] + link.latency_s
        state.num_waiting[node] += 1


@compiled
def _next(queues: _Queues, state: _State, link: Link, node: int, step: int) -> int:
    """Number of the next download for an idle thread; -1 without a download."""
    end = queues.bounds[node + 1]
    while state.urgent[node] < end and queues.steps[queues.by_step[state.urgent[node]]] <= step:
        number = queues.by_step[state.urgent[node]]
        if state.kinds[number] == _ASKED:
            return number
        state.urgent[node] += 1
    if state.untaken[node] >= link.ahead:
        return -1
    while state.hand_begun[node] < state.hand[node]:
        number = queues.by_hand[state.hand_begun[node]]
        if state.kinds[number] == _ASKED:
            return number
        state.hand_begun[node] += 1
    while state.hand_ended[node] < state.hand[node]:
        if state.kinds[queues.by_hand[state.hand_ended[node]]] != _DONE:
            return -1
        state.hand_ended[node] += 1
    while state.front[node] < state.asked[node]:
        if state.kinds[state.front[node]] == _ASKED:
            return state.front[node]
        state.front[node] += 1
    return -1
