"""Compiled loops that deal the packs of steps to ranks.

Most steps have few packs, and loading compiled code takes most of the time. The loops are small and import nothing
else.
"""

from __future__ import annotations

import cython
import numpy as np
from numpy.typing import NDArray

FULL = 1 << 62
PAD = -1  # in a rank's list: a pack without samples, for equal numbers of packs on all ranks


def settle(homes: NDArray[np.int64], sizes: NDArray[np.int64], rooms: NDArray[np.int64]) -> None:
    """Move packs of a step from full nodes, in order, to the first node with room.

    homes: node of each pack, changed. sizes: zeros, one for each node; at the end, packs of each node. rooms: maximum
    packs of each node.
    """
    with cython.nogil:
        for number in range(len(homes)):
            if sizes[homes[number]] < rooms[homes[number]]:
                sizes[homes[number]] += 1
            else:
                homes[number] = -1
        node = 0
        for number in range(len(homes)):
            if homes[number] < 0:
                while sizes[node] == rooms[node]:
                    node += 1
                homes[number] = node
                sizes[node] += 1


def deal(
    order: NDArray[np.int64],
    costs: NDArray[np.int64],
    lists: NDArray[np.int64],
    heaps: NDArray[np.int64],
    packs_per_rank: int,
    dealt: NDArray[np.int64],
) -> None:
    """Give each pack of `order` to the rank of its list (a node in a step) with the least work so far.

    lists: number of each pack's list. heaps: int64[lists, ranks, 3], the ranks of each list as a heap of (work, rank,
    packs). dealt: int64[lists * ranks * packs_per_rank], filled with PAD before; packs_per_rank entries for each rank.
    """
    cython.declare(work=cython.longlong, rank=cython.longlong, count=cython.longlong)
    with cython.nogil:
        ranks = heaps.shape[1]
        for at in range(len(order)):
            number = order[at]
            node = lists[number]
            work, rank, count = heaps[node, 0, 0], heaps[node, 0, 1], heaps[node, 0, 2]
            dealt[(node * ranks + rank) * packs_per_rank + count] = number
            count += 1
            work += costs[number]
            if count == packs_per_rank:
                work = FULL  # the rank has all its packs, and never comes first in the heap again
            here = 0
            while True:
                child = 2 * here + 1
                if child >= ranks:
                    break
                other = child + 1
                if other < ranks and (
                    heaps[node, other, 0] < heaps[node, child, 0]
                    or (
                        heaps[node, other, 0] == heaps[node, child, 0] and heaps[node, other, 1] < heaps[node, child, 1]
                    )
                ):
                    child = other
                if work < heaps[node, child, 0] or (work == heaps[node, child, 0] and rank < heaps[node, child, 1]):
                    break
                heaps[node, here, 0], heaps[node, here, 1], heaps[node, here, 2] = (
                    heaps[node, child, 0], heaps[node, child, 1], heaps[node, child, 2],
                )  # fmt: skip
                here = child
            heaps[node, here, 0], heaps[node, here, 1], heaps[node, here, 2] = work, rank, count


# The compiled loop that deals packs with media to ranks by two costs at once: tokens, and patches of the media tower.
#
# Only steps with media load the kernel.

SWAPS_LOOKED_AT = 256  # for each pack of a node: the time for dealing is proportional to the number of packs
GOOD_ENOUGH = 200  # swapping ends when no rank has more than 1/200 above the mean load


def deal_both(
    order: NDArray[np.int64],
    bounds: NDArray[np.int64],
    shares: NDArray[np.int64],
    ranks: int,
    packs_per_rank: int,
    dealt: NDArray[np.int64],
) -> None:
    """Give packs to the ranks of their list (a node in a step), with the larger of each rank's two loads small.

    Packs go in rounds of `ranks` packs, a pack for each rank: each pack in turn goes to the rank with the least larger
    load after it. Then the busiest rank swaps packs with the first rank, least busy first, with any helpful pair of
    packs. The most helpful pair is swapped. The swaps end when no swap helps, or when the loads are nearly equal.

    order: the packs, list after list, in each list by decreasing cost. bounds: int64[lists, 3], the first and one past
    the last of each list's packs in `order`, and the list's number. shares: int64[packs, 2], share of each pack in the
    two costs of its list. dealt: int64[lists * ranks * packs_per_rank], as in `deal`; the packs of a rank are in the
    order of `order`.
    """
    Dealer(order, shares, ranks, packs_per_rank).deal(bounds, dealt)


class Dealer:
    """Loads of ranks while packs with media are dealt.

    order, shares: see deal_both. loads: int64[ranks, 2], load of each rank minus the mean. mine: int64[ranks,
    packs_per_rank], packs of each rank as indices in a list; counts: their number. tried: int64[ranks], the last turn
    of `swap` that looked at each rank.
    """

    def __init__(self, order: NDArray[np.int64], shares: NDArray[np.int64], ranks: int, packs_per_rank: int):
        self.order, self.shares, self.ranks = order, shares, ranks
        self.loads, self.mine = np.empty((ranks, 2), np.int64), np.empty((ranks, packs_per_rank), np.int64)
        self.counts, self.tried = np.empty((2, ranks), np.int64)

    def deal(self, bounds: NDArray[np.int64], dealt: NDArray[np.int64]) -> None:
        """Write the packs of each rank; see deal_both."""
        with cython.nogil:
            for at in range(len(bounds)):
                first, num_packs, number = bounds[at, 0], bounds[at, 1] - bounds[at, 0], bounds[at, 2]
                self.swap(first, num_packs, self.deal_rounds(first, num_packs) // GOOD_ENOUGH)
                for rank in range(self.ranks):
                    begins = (number * self.ranks + rank) * self.mine.shape[1]
                    self.sort(rank)
                    for turn in range(self.counts[rank]):
                        dealt[begins + turn] = self.order[first + self.mine[rank, turn]]

    def sort(self, rank: int) -> None:
        """Sort the packs of a rank in the order of the list."""
        for at in range(1, self.counts[rank]):
            index, slot = self.mine[rank, at], at
            while slot > 0 and self.mine[rank, slot - 1] > index:
                self.mine[rank, slot] = self.mine[rank, slot - 1]
                slot -= 1
            self.mine[rank, slot] = index

    def deal_rounds(self, first: int, num_packs: int) -> int:
        """Deal the packs of a list in rounds; return the larger mean load."""
        cython.declare(
            tokens=cython.longlong,
            patches=cython.longlong,
            total=cython.longlong,
            load=cython.longlong,
            both=cython.longlong,
        )
        tokens = patches = 0
        for rank in range(self.ranks):
            self.loads[rank, 0] = self.loads[rank, 1] = self.counts[rank] = 0
        begin = 0
        while begin < num_packs:
            end = min(begin + self.ranks, num_packs)
            for cost in range(2):  # loads are counted from the mean, after each round
                total = 0
                for index in range(begin, end):
                    total += self.shares[self.order[first + index], cost]
                for rank in range(self.ranks):
                    self.loads[rank, cost] -= total // self.ranks
            for index in range(begin, end):
                pack, best, least, lesser = self.order[first + index], -1, FULL, FULL
                for rank in range(self.ranks):
                    if self.counts[rank] * self.ranks > begin:
                        continue  # it has its pack of this round
                    load = self.larger(rank, self.shares[pack, 0], self.shares[pack, 1])
                    both = self.loads[rank, 0] + self.loads[rank, 1]
                    if load < least or (load == least and both < lesser):
                        best, least, lesser = rank, load, both
                for cost in range(2):
                    self.loads[best, cost] += self.shares[pack, cost]
                self.mine[best, self.counts[best]] = index
                self.counts[best] += 1
                tokens += self.shares[pack, 0]
                patches += self.shares[pack, 1]
            begin = end
        return max(tokens, patches) // self.ranks

    def larger(self, rank: int, tokens: int, patches: int) -> int:
        """Return the larger of a rank's two loads, with these tokens and patches added."""
        return max(self.loads[rank, 0] + tokens, self.loads[rank, 1] + patches)

    def swap(self, first: int, num_packs: int, enough: int) -> None:
        """Swap packs of the busiest rank until no load is above `enough`, or no swap is left that helps."""
        cython.declare(
            tokens=cython.longlong,
            patches=cython.longlong,
            load=cython.longlong,
            given=cython.longlong,
            received=cython.longlong,
            change=cython.longlong,
        )
        left = SWAPS_LOOKED_AT * num_packs
        for rank in range(self.ranks):
            self.tried[rank] = -1
        for turn in range(SWAPS_LOOKED_AT * num_packs):
            busiest = 0
            for rank in range(1, self.ranks):
                if self.larger(rank, 0, 0) > self.larger(busiest, 0, 0):
                    busiest = rank
            worst = self.larger(busiest, 0, 0)
            if worst <= enough:
                return
            cost = 0 if self.loads[busiest, 0] >= self.loads[busiest, 1] else 1
            self.tried[busiest] = turn
            mine_best, other_best, partner = -1, -1, -1
            while mine_best < 0:
                partner = -1
                for rank in range(self.ranks):
                    if self.tried[rank] != turn and (partner < 0 or self.loads[rank, cost] < self.loads[partner, cost]):
                        partner = rank
                if partner < 0 or left <= 0:
                    return
                self.tried[partner] = turn
                left -= self.counts[busiest] * self.counts[partner]
                least = worst
                for here in range(self.counts[busiest]):
                    for there in range(self.counts[partner]):
                        given = self.order[first + self.mine[busiest, here]]
                        received = self.order[first + self.mine[partner, there]]
                        tokens = self.shares[received, 0] - self.shares[given, 0]
                        patches = self.shares[received, 1] - self.shares[given, 1]
                        load = max(self.larger(busiest, tokens, patches), self.larger(partner, -tokens, -patches))
                        if load < least:
                            least, mine_best, other_best = load, here, there
            given, received = self.mine[busiest, mine_best], self.mine[partner, other_best]
            self.mine[busiest, mine_best], self.mine[partner, other_best] = received, given
            for kind in range(2):
                change = self.shares[self.order[first + received], kind] - self.shares[self.order[first + given], kind]
                self.loads[busiest, kind] += change
                self.loads[partner, kind] -= change
