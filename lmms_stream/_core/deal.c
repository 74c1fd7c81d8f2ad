/* Packs of steps, dealt to nodes and ranks. */

#include "core.h"

#define SWAPS_LOOKED_AT 256 /* for each pack of a node: the time for dealing is proportional to the number of packs */
#define GOOD_ENOUGH 200     /* swapping ends when no rank has more than 1/200 above the mean load */

/* settle(homes int64[packs], changed; rooms int64[nodes])

   Move packs of a step from full nodes, in order, to the first node with room. homes: node of each pack. rooms: maximum
   packs of each node, for at least all packs together. */
PyObject *py_settle(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    Call call;
    Array home_array, room_array;
    if (!begin_call(&call, "settle", args, num_args, "Ll", &home_array, &room_array)) return end_call(&call, NULL);
    int64_t *homes = home_array.data, *rooms = room_array.data, total = 0;
    bool fits = in_range(homes, home_array.count, 0, room_array.count) &&
                in_range(rooms, room_array.count, 0, INT64_C(1) << 32);
    for (int64_t node = 0; fits && node < room_array.count; node++) total += rooms[node];
    if (!check(&call, fits && total >= home_array.count, "the rooms of the nodes hold all packs"))
        return end_call(&call, NULL);
    Py_BEGIN_ALLOW_THREADS;
    int64_t *sizes = NEW(&call, room_array.count, int64_t), node = 0;
    for (int64_t at = 0; !call.is_short && at < home_array.count; at++) {
        if (sizes[homes[at]] < rooms[homes[at]])
            sizes[homes[at]]++;
        else
            homes[at] = -1;
    }
    for (int64_t at = 0; !call.is_short && at < home_array.count; at++) {
        if (homes[at] >= 0) continue;
        while (sizes[node] == rooms[node]) node++;
        homes[at] = node;
        sizes[node]++;
    }
    Py_END_ALLOW_THREADS;
    return end_call(&call, Py_BuildValue(""));
}

typedef struct {
    int64_t work, rank, count;
} Loaded; /* a rank: its work so far and its packs */

static inline bool is_before(const Loaded *one, const Loaded *other) {
    return one->work < other->work || (one->work == other->work && one->rank < other->rank);
}

/* deal(order int64[m], costs int64[n], lists int64[n], ranks, packs_per_rank; dealt int64[lists * ranks * packs_per_rank])

   Give each pack of `order` to the rank of its list (a node in a step) with the least work so far. lists: number of each
   pack's list, with at most ranks * packs_per_rank packs. costs: with a sum below 2**62 in each list. dealt: written,
   packs_per_rank entries for each rank; entries without a pack stay. */
PyObject *py_deal(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    Call call;
    Array order_array, cost_array, list_array, dealt_array;
    int64_t ranks, packs_per_rank;
    if (!begin_call(
            &call, "deal", args, num_args, "lllnnL", &order_array, &cost_array, &list_array, &ranks, &packs_per_rank,
            &dealt_array
        ))
        return end_call(&call, NULL);
    int64_t *order = order_array.data, *costs = cost_array.data, *lists = list_array.data, *dealt = dealt_array.data;
    bool fits = ranks >= 1 && packs_per_rank >= 1 && ranks <= INT32_MAX && packs_per_rank <= INT32_MAX;
    int64_t num_lists = fits ? dealt_array.count / (ranks * packs_per_rank) : 0;
    if (!check(
            &call,
            fits && cost_array.count == list_array.count && in_range(order, order_array.count, 0, list_array.count) &&
                in_range(lists, list_array.count, 0, num_lists),
            "packs of `order` have costs and lists, and dealt has entries for all lists"
        ))
        return end_call(&call, NULL);
    bool is_full = false;
    Py_BEGIN_ALLOW_THREADS;
    Loaded *heaps = NEW(&call, num_lists * ranks, Loaded);
    for (int64_t at = 0; !call.is_short && at < num_lists * ranks; at++) heaps[at].rank = at % ranks;
    for (int64_t at = 0; !call.is_short && !is_full && at < order_array.count; at++) {
        int64_t number = order[at], here = 0;
        Loaded *heap = heaps + lists[number] * ranks, top = heap[0];
        is_full = top.count == packs_per_rank; /* all ranks are */
        if (is_full) break;
        dealt[(lists[number] * ranks + top.rank) * packs_per_rank + top.count] = number;
        top.count++;
        top.work += costs[number];
        if (top.count == packs_per_rank) top.work = INT64_C(1) << 62; /* the rank never comes first in the heap again */
        for (int64_t child = 1; child < ranks; child = 2 * here + 1) {
            if (child + 1 < ranks && is_before(&heap[child + 1], &heap[child])) child++;
            if (is_before(&top, &heap[child])) break;
            heap[here] = heap[child];
            here = child;
        }
        heap[here] = top;
    }
    Py_END_ALLOW_THREADS;
    if (!call.is_short && !check(&call, !is_full, "a list has more packs than its ranks")) return end_call(&call, NULL);
    return end_call(&call, Py_BuildValue(""));
}

/* Packs of a list, by two costs. shares: int64[packs, 2]. loads: int64[ranks, 2]. mine: int64[ranks, packs_per_rank],
   indices in `order`, counts[rank] of them. */
typedef struct {
    const int64_t *order, (*shares)[2];
    int64_t num_packs, ranks, packs_per_rank, (*loads)[2], *counts, *mine, *tried;
} Node;

static inline int64_t larger(const int64_t *pair) { return MAX(pair[0], pair[1]); }

/* Deal the packs of a list in rounds; loads count from the mean. Return the larger mean. */
static int64_t deal_rounds(Node *node) {
    int64_t ranks = node->ranks, means[2] = {0, 0};
    memset(node->loads, 0, (size_t)ranks * sizeof(node->loads[0]));
    memset(node->counts, 0, (size_t)ranks * sizeof(int64_t));
    for (int64_t begin = 0; begin < node->num_packs; begin += ranks) {
        int64_t end = MIN(begin + ranks, node->num_packs);
        for (int cost = 0; cost < 2; cost++) {
            int64_t total = 0;
            for (int64_t index = begin; index < end; index++) total += node->shares[node->order[index]][cost];
            for (int64_t rank = 0; rank < ranks; rank++) node->loads[rank][cost] -= total / ranks;
            means[cost] += total;
        }
        for (int64_t index = begin; index < end; index++) {
            const int64_t *share = node->shares[node->order[index]];
            int64_t best = -1, least = 0, lesser = 0;
            for (int64_t rank = 0; rank < ranks; rank++) {
                if (node->counts[rank] * ranks > begin) continue; /* it has its pack of this round */
                int64_t load = MAX(node->loads[rank][0] + share[0], node->loads[rank][1] + share[1]);
                int64_t both = node->loads[rank][0] + node->loads[rank][1];
                if (best < 0 || load < least || (load == least && both < lesser)) {
                    best = rank;
                    least = load;
                    lesser = both;
                }
            }
            node->loads[best][0] += share[0];
            node->loads[best][1] += share[1];
            node->mine[best * node->packs_per_rank + node->counts[best]++] = index;
        }
    }
    return larger(means) / ranks;
}

/* Swap packs of the busiest rank until no load is above `enough`, or no swap is left that helps. */
static void swap_packs(Node *node, int64_t enough) {
    int64_t ranks = node->ranks, left = SWAPS_LOOKED_AT * node->num_packs, most = left;
    for (int64_t rank = 0; rank < ranks; rank++) node->tried[rank] = -1;
    for (int64_t turn = 0; turn < most; turn++) {
        int64_t busiest = 0, mine_best = -1, other_best = -1, partner = -1;
        for (int64_t rank = 1; rank < ranks; rank++)
            if (larger(node->loads[rank]) > larger(node->loads[busiest])) busiest = rank;
        int64_t *busy = node->loads[busiest], worst = larger(busy), *of_busy = node->mine + busiest * node->packs_per_rank;
        if (worst <= enough) return;
        int cost = busy[0] >= busy[1] ? 0 : 1;
        node->tried[busiest] = turn;
        while (mine_best < 0) {
            partner = -1;
            for (int64_t rank = 0; rank < ranks; rank++)
                if (node->tried[rank] != turn && (partner < 0 || node->loads[rank][cost] < node->loads[partner][cost]))
                    partner = rank;
            if (partner < 0 || left <= 0) return;
            node->tried[partner] = turn;
            left -= node->counts[busiest] * node->counts[partner];
            const int64_t *idle = node->loads[partner], *of_partner = node->mine + partner * node->packs_per_rank;
            int64_t least = worst;
            for (int64_t here = 0; here < node->counts[busiest]; here++) {
                const int64_t *given = node->shares[node->order[of_busy[here]]];
                for (int64_t there = 0; there < node->counts[partner]; there++) {
                    const int64_t *got = node->shares[node->order[of_partner[there]]];
                    int64_t tokens = got[0] - given[0], patches = got[1] - given[1];
                    int64_t one = MAX(busy[0] + tokens, busy[1] + patches);
                    int64_t other = MAX(idle[0] - tokens, idle[1] - patches), load = MAX(one, other);
                    if (load < least) {
                        least = load;
                        mine_best = here;
                        other_best = there;
                    }
                }
            }
        }
        int64_t *mine = of_busy + mine_best, *other = node->mine + partner * node->packs_per_rank + other_best;
        int64_t given = *mine, got = *other;
        *mine = got;
        *other = given;
        for (int kind = 0; kind < 2; kind++) {
            int64_t change = node->shares[node->order[got]][kind] - node->shares[node->order[given]][kind];
            busy[kind] += change;
            node->loads[partner][kind] -= change;
        }
    }
}

static int by_number(const void *one, const void *other) {
    int64_t left = *(const int64_t *)one, right = *(const int64_t *)other;
    return (left > right) - (left < right);
}

/* deal_both(order int64[m], bounds int64[lists, 3], shares int64[n, 2], ranks, packs_per_rank; dealt int64[…])

   Give packs to the ranks of their list, with the larger of each rank's two loads small. Packs go in rounds of `ranks`
   packs, a pack for each rank: each pack in turn goes to the rank with the least larger load after it. Then the busiest
   rank swaps packs with the first rank, least busy first, with any helpful pair of packs. The most helpful pair is
   swapped. The swaps end when no swap helps, or when the loads are nearly equal.

   order: the packs, list after list, in each list by decreasing cost. bounds: the first and one past the last of each
   list's packs in `order`, and the list's number. shares: of each pack in the two costs of its list, below 2**31. dealt:
   see deal; the packs of a rank are in the order of `order`. */
PyObject *py_deal_both(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    Call call;
    Array order_array, bound_array, share_array, dealt_array;
    int64_t ranks, packs_per_rank;
    if (!begin_call(
            &call, "deal_both", args, num_args, "lllnnL", &order_array, &bound_array, &share_array, &ranks,
            &packs_per_rank, &dealt_array
        ))
        return end_call(&call, NULL);
    const int64_t *order = order_array.data, (*bounds)[3] = bound_array.data;
    int64_t *dealt = dealt_array.data, num_bounds = bound_array.count / 3;
    bool fits = ranks >= 1 && packs_per_rank >= 1 && ranks <= INT32_MAX && packs_per_rank <= INT32_MAX &&
                bound_array.count % 3 == 0 && in_range(order, order_array.count, 0, share_array.count / 2) &&
                in_range(share_array.data, share_array.count, 0, INT64_C(1) << 31);
    for (int64_t at = 0; fits && at < num_bounds; at++)
        fits = 0 <= bounds[at][0] && bounds[at][0] <= bounds[at][1] && bounds[at][1] <= order_array.count &&
               bounds[at][1] - bounds[at][0] <= ranks * packs_per_rank && bounds[at][2] >= 0 &&
               bounds[at][2] < dealt_array.count / (ranks * packs_per_rank);
    if (!check(&call, fits, "bounds lie in `order`, and dealt has entries for their lists")) return end_call(&call, NULL);
    Py_BEGIN_ALLOW_THREADS;
    Node node = {
        .shares = share_array.data,
        .ranks = ranks,
        .packs_per_rank = packs_per_rank,
        .loads = zeros(&call, ranks, 2 * sizeof(int64_t)),
        .counts = NEW(&call, ranks, int64_t),
        .mine = NEW(&call, ranks * packs_per_rank, int64_t),
        .tried = NEW(&call, ranks, int64_t),
    };
    for (int64_t at = 0; !call.is_short && at < num_bounds; at++) {
        node.order = order + bounds[at][0];
        node.num_packs = bounds[at][1] - bounds[at][0];
        swap_packs(&node, deal_rounds(&node) / GOOD_ENOUGH);
        for (int64_t rank = 0; rank < ranks; rank++) {
            int64_t *mine = node.mine + rank * packs_per_rank;
            qsort(mine, (size_t)node.counts[rank], sizeof(int64_t), by_number);
            for (int64_t turn = 0; turn < node.counts[rank]; turn++)
                dealt[(bounds[at][2] * ranks + rank) * packs_per_rank + turn] = node.order[mine[turn]];
        }
    }
    Py_END_ALLOW_THREADS;
    return end_call(&call, Py_BuildValue(""));
}
