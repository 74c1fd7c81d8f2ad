/* Caches and links of simulated nodes. */

#include "core.h"
#include <math.h>

/* use_needed_last(steps int64[reads], shards int64[reads], sizes int64[shards], limit, used_at int32[shards], changed,
                   held bool[shards], changed, victims int64[…], since, used; missed bool[reads]) -> bytes in the cache

   Read shards through a node's cache of `limit` bytes while the outlook is constant. steps, shards: reads, in order.
   used_at: step of the last read. victims: shards without a current need, in order of eviction; a victim read after step
   `since` stays (`since` precedes all steps). After the last victim, the least recently read shard is evicted. used:
   bytes in the cache. missed: written, reads with a download. */
PyObject *py_use_needed_last(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    Call call;
    Array step_array, shard_array, size_array, used_at_array, held_array, victim_array, missed_array;
    int64_t limit, since, used;
    if (!begin_call(
            &call, "use_needed_last", args, num_args, "lllnITlnnT", &step_array, &shard_array, &size_array, &limit,
            &used_at_array, &held_array, &victim_array, &since, &used, &missed_array
        ))
        return end_call(&call, NULL);
    int64_t num_reads = shard_array.count, num_shards = size_array.count, at = 0;
    if (!check(
            &call,
            step_array.count == num_reads && missed_array.count == num_reads && used_at_array.count == num_shards &&
                held_array.count == num_shards && in_range(shard_array.data, num_reads, 0, num_shards) &&
                in_range(victim_array.data, victim_array.count, 0, num_shards),
            "arrays of reads, and of shards, have equal sizes, and shards exist"
        ))
        return end_call(&call, NULL);
    const int64_t *steps = step_array.data, *shards = shard_array.data, *sizes = size_array.data;
    const int64_t *victims = victim_array.data;
    int32_t *used_at = used_at_array.data;
    uint8_t *held = held_array.data, *missed = missed_array.data;
    Py_BEGIN_ALLOW_THREADS;
    for (int64_t number = 0; number < num_reads; number++) {
        int64_t shard = shards[number];
        missed[number] = !held[shard];
        while (missed[number] && used + sizes[shard] > limit) {
            while (at < victim_array.count && (!held[victims[at]] || used_at[victims[at]] > since)) at++;
            int64_t gone = at < victim_array.count ? victims[at] : -1;
            for (int64_t other = 0; at == victim_array.count && other < num_shards; other++)
                if (held[other] && (gone < 0 || used_at[other] < used_at[gone])) gone = other;
            if (gone < 0) break;
            held[gone] = 0;
            used -= sizes[gone];
        }
        if (missed[number]) used += sizes[shard];
        held[shard] = 1;
        used_at[shard] = (int32_t)steps[number];
    }
    Py_END_ALLOW_THREADS;
    return end_call(&call, Py_BuildValue("L", used));
}

/* Downloads of all nodes, in order of request. by_step, by_hand: numbers of downloads, per node, ordered by `steps` (with
   the need) or by at_hand. kinds, ended: state of each download, and the time of its end. */
typedef struct {
    const int64_t *steps, *released, *at_hand, *sizes, *by_step, *by_hand;
    uint8_t *kinds;
    double *ended;
    double bytes_per_s, latency_s;
    int64_t slots, ahead, taken_ahead; /* at most `slots` downloads of a node at once */
} Downloads;

enum { ASKED, UNDER_WAY, DONE };

/* State of a node's link; its downloads are [asked's first value, end).

   now: current time. served: bytes received by a download since the start of the simulation. under_way, until: active
   downloads, and the value of `served` at the end of each. waiting, begins: ring of downloads before their first byte,
   and the time of this byte. asked, front: end of the requested downloads, and of the examined downloads. urgent, needed,
   taken: positions in by_step; earlier downloads have begun, have ended, or were taken. hand, hand_begun, hand_ended:
   positions in by_hand; earlier downloads are at hand, have begun, or have ended. untaken: number of downloads begun and
   not taken. */
typedef struct {
    double now, served, *until, *begins;
    int64_t end, num_under_way, num_waiting, first_waiting, *under_way, *waiting;
    int64_t asked, front, urgent, needed, taken, hand, hand_begun, hand_ended, untaken;
    bool is_busy;
} NodeLink;

/* Return whether a link has active or requested downloads, or new requests at a step. */
static bool is_busy(const Downloads *all, const NodeLink *link, int64_t step) {
    if (link->num_under_way || link->num_waiting || link->front < link->asked) return true;
    if (link->asked < link->end && all->released[link->asked] <= step) return true;
    return link->needed < link->end && all->steps[all->by_step[link->needed]] <= step;
}

/* Add the requests of a step, and the downloads at hand from this step on. */
static void ask(const Downloads *all, NodeLink *link, int64_t step) {
    while (link->asked < link->end && all->released[link->asked] <= step) link->asked++;
    while (link->hand < link->end && all->at_hand[all->by_hand[link->hand]] <= step) link->hand++;
}

/* Take the shards of steps up to step + taken_ahead; this frees room for other shards ahead. */
static void take(const Downloads *all, NodeLink *link, int64_t step) {
    for (; link->taken < link->end; link->taken++) {
        int64_t number = all->by_step[link->taken];
        if (all->steps[number] > step + all->taken_ahead) break;
        link->untaken -= all->kinds[number] != ASKED;
    }
}

/* Return the number of the next download for an idle thread; -1 without a download. */
static int64_t next_download(const Downloads *all, NodeLink *link, int64_t step) {
    for (; link->urgent < link->end && all->steps[all->by_step[link->urgent]] <= step; link->urgent++)
        if (all->kinds[all->by_step[link->urgent]] == ASKED) return all->by_step[link->urgent];
    if (link->untaken >= all->ahead) return -1;
    for (; link->hand_begun < link->hand; link->hand_begun++)
        if (all->kinds[all->by_hand[link->hand_begun]] == ASKED) return all->by_hand[link->hand_begun];
    for (; link->hand_ended < link->hand; link->hand_ended++)
        if (all->kinds[all->by_hand[link->hand_ended]] != DONE) return -1;
    for (; link->front < link->asked; link->front++)
        if (all->kinds[link->front] == ASKED) return link->front;
    return -1;
}

/* Start the next downloads on idle threads. */
static void start_downloads(const Downloads *all, NodeLink *link, int64_t step) {
    while (link->num_under_way + link->num_waiting < all->slots) {
        int64_t number = next_download(all, link, step);
        if (number < 0) return;
        all->kinds[number] = UNDER_WAY;
        link->untaken += all->steps[number] > step + all->taken_ahead;
        int64_t last = (link->first_waiting + link->num_waiting) % all->slots;
        link->waiting[last] = number;
        link->begins[last] = link->now + all->latency_s;
        link->num_waiting++;
    }
}

/* Process the next event on a link, a first byte or the end of a download; return false without an event by `until`. */
static bool go_on(const Downloads *all, NodeLink *link, int64_t step, double until) {
    int64_t count = link->num_under_way, slot = -1;
    double ends = INFINITY, begins = link->num_waiting ? link->begins[link->first_waiting] : INFINITY;
    for (int64_t at = 0; at < count; at++)
        if (slot < 0 || link->until[at] < link->until[slot]) slot = at;
    if (slot >= 0) ends = link->now + (link->until[slot] - link->served) * (double)count / all->bytes_per_s;
    double soonest = MIN(ends, begins);
    if (soonest > until || soonest == INFINITY) {
        if (count && until > link->now) link->served += (until - link->now) * all->bytes_per_s / (double)count;
        link->now = until;
        return false;
    }
    if (begins <= ends) {
        if (count && begins > link->now) link->served += (begins - link->now) * all->bytes_per_s / (double)count;
        int64_t number = link->waiting[link->first_waiting];
        link->first_waiting = (link->first_waiting + 1) % all->slots;
        link->num_waiting--;
        link->under_way[count] = number;
        link->until[count] = link->served + (double)all->sizes[number];
        link->num_under_way++;
        link->now = MAX(link->now, begins);
        return true;
    }
    int64_t number = link->under_way[slot];
    all->kinds[number] = DONE;
    all->ended[number] = ends;
    link->served = link->until[slot];
    link->now = ends;
    link->under_way[slot] = link->under_way[count - 1];
    link->until[slot] = link->until[count - 1];
    link->num_under_way--;
    start_downloads(all, link, step);
    return true;
}

static void run_link(const Downloads *all, NodeLink *link, int64_t step, double until) {
    while (link->now < until && go_on(all, link, step, until)) {
    }
}

/* Run the link until all shards of a step have arrived; return the time of the last arrival. */
static double have(const Downloads *all, NodeLink *link, int64_t step) {
    double ready = 0;
    for (; link->needed < link->end; link->needed++) {
        int64_t number = all->by_step[link->needed];
        if (all->steps[number] > step) break;
        while (all->kinds[number] != DONE && go_on(all, link, step, INFINITY)) {
        }
        ready = MAX(ready, all->ended[number]);
    }
    return ready;
}

/* wait(bounds int64[nodes + 1], steps, released, at_hand, sizes, by_step, by_hand int64[downloads], bytes_per_s,
        latency_s, at_once, ahead, taken_ahead, begins bool[steps], step_time_s; waits float64[steps])

   Write the seconds of waiting per step, until the last node has its shards; see links.py. bounds: of each node's
   downloads. by_step, by_hand: of each node, the numbers of its downloads. */
PyObject *py_wait(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    Call call;
    Array bounds, steps, released, at_hand, sizes, by_step, by_hand, begins, waits;
    Downloads all;
    double step_time_s, now = 0;
    if (!begin_call(
            &call, "wait", args, num_args, "lllllllxxnnntxD", &bounds, &steps, &released, &at_hand, &sizes, &by_step,
            &by_hand, &all.bytes_per_s, &all.latency_s, &all.slots, &all.ahead, &all.taken_ahead, &begins, &step_time_s,
            &waits
        ))
        return end_call(&call, NULL);
    int64_t count = steps.count, num_nodes = bounds.count - 1;
    const int64_t *ends = bounds.data;
    if (!check(
            &call,
            num_nodes >= 1 && released.count == count && at_hand.count == count && sizes.count == count &&
                by_step.count == count && by_hand.count == count && begins.count == waits.count,
            "arrays of downloads, and of steps, have equal sizes"
        ) ||
        !check(
            &call,
            ascends(ends, bounds.count, 0, count) && !ends[0] && ends[num_nodes] == count &&
                in_range(by_step.data, count, 0, count) && in_range(by_hand.data, count, 0, count),
            "bounds ascend to the downloads, and by_step and by_hand number them"
        ) ||
        !check(
            &call, all.bytes_per_s > 0 && all.latency_s >= 0 && all.slots >= 1 && all.ahead >= 1,
            "a link has a bandwidth, a latency and downloads at once"
        ))
        return end_call(&call, NULL);
    all.steps = steps.data;
    all.released = released.data;
    all.at_hand = at_hand.data;
    all.sizes = sizes.data;
    all.by_step = by_step.data;
    all.by_hand = by_hand.data;
    all.slots = MAX(1, MIN(all.slots, count));
    Py_BEGIN_ALLOW_THREADS;
    NodeLink *links = NEW(&call, num_nodes, NodeLink);
    int64_t *numbers = NEW(&call, 2 * num_nodes * all.slots, int64_t);
    double *times = NEW(&call, 2 * num_nodes * all.slots, double);
    all.kinds = NEW(&call, count, uint8_t);
    all.ended = NEW(&call, count, double);
    for (int64_t node = 0; !call.is_short && node < num_nodes; node++) {
        NodeLink *link = &links[node];
        link->asked = link->front = link->urgent = link->needed = link->taken = ends[node];
        link->hand = link->hand_begun = link->hand_ended = ends[node];
        link->end = ends[node + 1];
        link->under_way = numbers + 2 * node * all.slots;
        link->waiting = link->under_way + all.slots;
        link->until = times + 2 * node * all.slots;
        link->begins = link->until + all.slots;
    }
    for (int64_t step = 0; !call.is_short && step < waits.count; step++) {
        double ready = now;
        for (NodeLink *link = links; link < links + num_nodes; link++) {
            link->is_busy = is_busy(&all, link, step); /* most links are idle */
            if (!link->is_busy) {
                link->now = now;
                continue;
            }
            run_link(&all, link, step, now);
            if (((uint8_t *)begins.data)[step]) ask(&all, link, step);
            take(&all, link, step);
            start_downloads(&all, link, step);
            double arrived = have(&all, link, step);
            ready = MAX(ready, arrived);
        }
        ((double *)waits.data)[step] = ready - now;
        for (NodeLink *link = links; link < links + num_nodes; link++) {
            if (!link->is_busy) continue;
            run_link(&all, link, step, ready);
            ask(&all, link, step);
            start_downloads(&all, link, step);
        }
        now = ready + step_time_s;
    }
    Py_END_ALLOW_THREADS;
    return end_call(&call, Py_BuildValue(""));
}
