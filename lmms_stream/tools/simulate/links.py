"""Compiled loops of the simulation: reads through a node's cache; waiting time of steps for the links of nodes.

The loaders of a node fetch `at_once` shards at a time, with equal shares of the node's link. A free thread chooses a
shard needed by the current step; else the first shard at hand; else, after all shards at hand have arrived, the oldest
request. The last two are skipped while `ahead` fetched shards wait for their use (see storage/prefetch.py). Shards of a
canonical node's second block are at hand from the start of the block, other shards from their request
(loader/blocks_ahead.py).
"""

from __future__ import annotations

from typing import NamedTuple

import cython
import numpy as np
from numpy.typing import NDArray

_Numbers = NDArray[np.int64]
_Floats = NDArray[np.float64]
ASKED, UNDER_WAY, DONE = 0, 1, 2
FOREVER = float("inf")


def use_needed_last(
    steps: _Numbers,
    shards: _Numbers,
    sizes: _Numbers,
    limit: int,
    used_at: NDArray[np.int32],
    held: NDArray[np.bool_],
    victims: _Numbers,
    since: int,
    used: int,
    missed: NDArray[np.bool_],
) -> int:
    """Read shards through a node's cache of `limit` bytes while the outlook is constant; return the bytes in the cache.

    steps, shards: reads, in order. used_at: int32[num_shards], step of the last read. held: bool[num_shards]. victims:
    shards without a current need, in order of eviction; a victim read after step `since` stays (`since` precedes all
    `steps`). After the last victim, the least recently read shard is evicted. used: bytes in the cache. missed: output,
    reads with a download.
    """
    with cython.nogil:
        at = 0
        for number in range(len(shards)):
            shard = shards[number]
            missed[number] = not held[shard]
            if missed[number]:
                while used + sizes[shard] > limit:
                    while at < len(victims) and (not held[victims[at]] or used_at[victims[at]] > since):
                        at += 1
                    gone = victims[at] if at < len(victims) else -1
                    if gone < 0:
                        for other in range(len(sizes)):
                            if held[other] and (gone < 0 or used_at[other] < used_at[gone]):
                                gone = other
                    if gone < 0:
                        break
                    held[gone] = False
                    used -= sizes[gone]
                held[shard] = True
                used += sizes[shard]
            used_at[shard] = steps[number]
    return used


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


class Links:
    """State of the links. steps to by_hand, kinds, ended: one entry per download. Other fields: one row per node.

    bounds: of each node's downloads, in order of request, int64[nodes + 1]. by_step, by_hand: numbers of downloads, per
    node, ordered by `steps` (needed) or by `at_hand`. now: current time. served: bytes received by a download since the
    start of the simulation. under_way, until: active downloads, and the value of `served` at the end of each. waiting,
    begins: ring of downloads before their first byte, and the time of this byte. asked, front: end of the requested
    downloads, and of the examined downloads. urgent, needed, taken: positions in by_step; earlier downloads have begun,
    have ended, or were taken. hand, hand_begun, hand_ended: positions in by_hand; earlier downloads are at hand, have
    begun, or have ended. untaken: number of downloads begun and not taken.
    """

    def __init__(
        self, link: Link, bounds: _Numbers, steps: _Numbers, released: _Numbers, at_hand: _Numbers, sizes: _Numbers,
        by_step: _Numbers, by_hand: _Numbers,
    ):  # fmt: skip
        count, num_nodes = len(steps), len(bounds) - 1
        self.bytes_per_s, self.latency_s, self.at_once, self.ahead, self.taken_ahead = link
        self.at_once = max(1, min(self.at_once, count))
        self.bounds, self.steps, self.released, self.at_hand, self.sizes = bounds, steps, released, at_hand, sizes
        self.by_step, self.by_hand = by_step, by_hand
        self.kinds, self.ended = np.zeros(count, np.int8), np.zeros(count)
        self.now, self.served = np.zeros((2, num_nodes))
        self.busy = np.zeros(num_nodes, np.uint8)
        self.num_under_way, self.num_waiting, self.first_waiting, self.untaken = np.zeros((4, num_nodes), np.int64)
        self.under_way, self.waiting = np.zeros((2, num_nodes, self.at_once), np.int64)
        self.until, self.begins = np.zeros((2, num_nodes, self.at_once))
        self.asked, self.front, self.urgent, self.needed = np.tile(bounds[:num_nodes], (4, 1))
        self.taken, self.hand, self.hand_begun, self.hand_ended = np.tile(bounds[:num_nodes], (4, 1))

    def wait(self, begins: NDArray[np.bool_], step_time_s: float, waits: _Floats) -> None:
        """Write the seconds of waiting of each step; see wait_for_links."""
        with cython.nogil:
            now = 0.0
            for step in range(len(waits)):
                ready = now
                for node in range(len(self.now)):
                    self.busy[node] = self.is_busy(node, step)  # most links are idle
                    if not self.busy[node]:
                        self.now[node] = now
                        continue
                    self.run(node, step, now)
                    if begins[step]:
                        self.ask(node, step)
                    self.take(node, step)
                    self.fill(node, step)
                    ready = max(ready, self.have(node, step))
                waits[step] = ready - now
                for node in range(len(self.now)):
                    if self.busy[node]:
                        self.run(node, step, ready)
                        self.ask(node, step)
                        self.fill(node, step)
                now = ready + step_time_s

    def is_busy(self, node: int, step: int) -> bool:
        """Whether a link has active or requested downloads, or new requests at a step."""
        end = self.bounds[node + 1]
        if self.num_under_way[node] or self.num_waiting[node] or self.front[node] < self.asked[node]:
            return True
        if self.asked[node] < end and self.released[self.asked[node]] <= step:
            return True
        return self.needed[node] < end and self.steps[self.by_step[self.needed[node]]] <= step

    def ask(self, node: int, step: int) -> None:
        """Add the requests of a step, and the downloads at hand from this step on."""
        end = self.bounds[node + 1]
        while self.asked[node] < end and self.released[self.asked[node]] <= step:
            self.asked[node] += 1
        while self.hand[node] < end and self.at_hand[self.by_hand[self.hand[node]]] <= step:
            self.hand[node] += 1

    def take(self, node: int, step: int) -> None:
        """Take the shards of steps up to `step + taken_ahead`; this frees room for other shards ahead."""
        while self.taken[node] < self.bounds[node + 1]:
            number = self.by_step[self.taken[node]]
            if self.steps[number] > step + self.taken_ahead:
                break
            self.untaken[node] -= self.kinds[number] != ASKED
            self.taken[node] += 1

    def have(self, node: int, step: int) -> float:
        """Run the link until all shards of a step have arrived; return the time of the last arrival."""
        ready = 0.0
        while self.needed[node] < self.bounds[node + 1]:
            number = self.by_step[self.needed[node]]
            if self.steps[number] > step:
                break
            while self.kinds[number] != DONE:
                self.go_on(node, step, FOREVER)
            ready = max(ready, self.ended[number])
            self.needed[node] += 1
        return ready

    def run(self, node: int, step: int, until: float) -> None:
        while self.now[node] < until and self.go_on(node, step, until):
            pass

    def go_on(self, node: int, step: int, until: float) -> bool:
        """Process the next event on a link, a first byte or the end of a download; False if none comes by `until`."""
        now, count, slots = self.now[node], self.num_under_way[node], self.at_once
        slot, ends = -1, FOREVER
        for each in range(count):
            if slot < 0 or self.until[node, each] < self.until[node, slot]:
                slot = each
        if slot >= 0:
            ends = now + (self.until[node, slot] - self.served[node]) * count / self.bytes_per_s
        begins = self.begins[node, self.first_waiting[node]] if self.num_waiting[node] else FOREVER
        soonest = min(ends, begins)
        if soonest > until or soonest == FOREVER:
            if count and until > now:
                self.served[node] += (until - now) * self.bytes_per_s / count
            self.now[node] = until
            return False
        if begins <= ends:
            if count and begins > now:
                self.served[node] += (begins - now) * self.bytes_per_s / count
            number = self.waiting[node, self.first_waiting[node]]
            self.first_waiting[node] = (self.first_waiting[node] + 1) % slots
            self.num_waiting[node] -= 1
            self.under_way[node, count] = number
            self.until[node, count] = self.served[node] + self.sizes[number]
            self.num_under_way[node] += 1
            self.now[node] = max(now, begins)
            return True
        number = self.under_way[node, slot]
        self.kinds[number], self.ended[number] = DONE, ends
        self.served[node], self.now[node] = self.until[node, slot], ends
        self.under_way[node, slot] = self.under_way[node, count - 1]
        self.until[node, slot] = self.until[node, count - 1]
        self.num_under_way[node] -= 1
        self.fill(node, step)
        return True

    def fill(self, node: int, step: int) -> None:
        """Start the next downloads on idle threads."""
        slots = self.at_once
        while self.num_under_way[node] + self.num_waiting[node] < slots:
            number = self.next(node, step)
            if number < 0:
                return
            self.kinds[number] = UNDER_WAY
            self.untaken[node] += self.steps[number] > step + self.taken_ahead
            last = (self.first_waiting[node] + self.num_waiting[node]) % slots
            self.waiting[node, last] = number
            self.begins[node, last] = self.now[node] + self.latency_s
            self.num_waiting[node] += 1

    def next(self, node: int, step: int) -> int:
        """Number of the next download for an idle thread; -1 without a download."""
        end = self.bounds[node + 1]
        while self.urgent[node] < end and self.steps[self.by_step[self.urgent[node]]] <= step:
            number = self.by_step[self.urgent[node]]
            if self.kinds[number] == ASKED:
                return number
            self.urgent[node] += 1
        if self.untaken[node] >= self.ahead:
            return -1
        while self.hand_begun[node] < self.hand[node]:
            number = self.by_hand[self.hand_begun[node]]
            if self.kinds[number] == ASKED:
                return number
            self.hand_begun[node] += 1
        while self.hand_ended[node] < self.hand[node]:
            if self.kinds[self.by_hand[self.hand_ended[node]]] != DONE:
                return -1
            self.hand_ended[node] += 1
        while self.front[node] < self.asked[node]:
            if self.kinds[self.front[node]] == ASKED:
                return self.front[node]
            self.front[node] += 1
        return -1


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
    by_step, by_hand = np.lexsort((steps, nodes)), np.lexsort((steps, released, at_hand, nodes))
    links = Links(link, bounds, steps, released, at_hand, sizes[order].astype(np.int64), by_step, by_hand)
    waits: _Floats = np.zeros(len(begins))
    links.wait(begins, step_time_s, waits)
    return waits
