/* Packs of window_N: a window and the samples that wait, in the turns that give the fewest packs. */

#include "core.h"

#define CLOSED_BELOW (1 / 64.0) /* of a pack: samples of a pack with less room do not wait for the next window */
#define FILLER_SHARE 0.2
#define NUM_TURNS 3

/* Shares of the fillers in the turns of a pool: longest first; as given, then fillers, longest first; as given. */
static const double SHARES[NUM_TURNS] = {1, FILLER_SHARE, 0};

/* Write the bins that are done, and empty the lists; return the room left in the bins that are done. */
static int64_t close_bins(Bins *bins, const Pool *pool, int64_t least_room) {
    int64_t lost = 0, mask = bins->slots - 1;
    int32_t last_waiting = pool->num_waiting ? pool->positions[pool->num_waiting - 1] : -1;
    for (int64_t at = 0; at < bins->num_open; at++) {
        int32_t chosen = bins->opened[at], room = bins->room[chosen];
        if (room > 0) empty_list(bins, room);
        bool is_done = room < least_room;
        for (int32_t sample = bins->head[chosen]; sample >= 0 && !is_done; sample = bins->following[sample & mask])
            is_done = sample <= last_waiting;
        pool->closes[at] = is_done;
        if (is_done) lost += room;
    }
    return lost;
}

/* Pack a pool in the turns that give the fewest packs; among these, in the first with the least room in done packs. */
static void pack_pool(Bins *bins, const int32_t *lengths, const Pool *pool, const Rules *rules) {
    int64_t least_room = MAX(1, (int64_t)((double)rules->limit * CLOSED_BELOW));
    int64_t tokens = 0, num_best = 0, least_lost = 0;
    int best = -1, last = -1;
    for (int64_t at = 0; at < pool->count; at++) tokens += pool->lengths[at];
    int64_t fewest = (tokens + rules->limit - 1) / rules->limit;
    for (int number = 0; number <= NUM_TURNS; number++) {
        int turns = number < NUM_TURNS ? number : best;
        if (number == NUM_TURNS && best == last) break;
        order_window(bins, pool->lengths, 0, pool->count, SHARES[turns], true);
        for (int64_t at = 0; at < pool->count; at++) bins->turns[at] = pool->positions[bins->turns[at]];
        bins->num_open = 0;
        fill_window(bins, lengths, pool->count, 0, rules->limit, rules->max_samples);
        int64_t lost = close_bins(bins, pool, least_room);
        last = turns;
        if (best < 0 || bins->num_open < num_best || (bins->num_open == num_best && lost < least_lost)) {
            best = turns;
            num_best = bins->num_open;
            least_lost = lost;
        }
        if (bins->num_open == fewest && lost == 0) break;
    }
}

Pool new_pool(Call *call, int64_t count) {
    return (Pool){NEW(call, count, int32_t), NEW(call, count, int32_t), 0, 0, NEW(call, count, uint8_t)};
}

/* Return the packs of a sequence, or of a stretch, which begins with a window; see py_window_fit. Write to `still` the
   samples that wait, and return their number. bins: for at least twice the window. */
int64_t window_fit_in(
    Bins *bins, Pool *pool, const int32_t *lengths, int64_t count, const int64_t *firsts, int64_t num_waiting,
    int64_t position, bool last, const Rules *rules, Packs *packs, int64_t *still
) {
    int64_t first_new = num_waiting;
    int32_t *positions = pool->positions;
    packs->num_packs = packs->offsets[0] = 0;
    for (int64_t at = 0; at < num_waiting; at++) positions[at] = (int32_t)at;
    for (int64_t start = first_new; start < count; start += rules->window) {
        int64_t stop = MIN(start + rules->window, count), num_closing = 0, num_kept = 0;
        pool->num_waiting = num_waiting;
        pool->count = num_waiting + stop - start;
        for (int64_t at = start; at < stop; at++) positions[num_waiting + at - start] = (int32_t)at;
        for (int64_t at = 0; at < pool->count; at++) pool->lengths[at] = lengths[positions[at]];
        pack_pool(bins, lengths, pool, rules);
        int8_t *waits = (int8_t *)bins->buckets; /* of the window's samples; sort_by_hash comes later */
        memset(waits, 0, (size_t)(stop - start));
        for (int64_t at = 0; at < bins->num_open; at++) {
            int32_t chosen = bins->opened[at], head = bins->head[chosen];
            if (pool->closes[at] || bins->size[chosen] >= rules->max_samples || (last && stop == count)) {
                bins->keys[num_closing] = pack_key(rules->seed, head < first_new ? firsts[head] : head + position - first_new);
                bins->closing[num_closing++] = chosen;
            } else { /* no sample of the bin has waited */
                for (; head >= 0; head = bins->following[head & (bins->slots - 1)]) waits[head - start] = 1;
            }
        }
        for (int64_t at = start; at < stop; at++)
            if (waits[at - start]) positions[num_kept++] = (int32_t)at;
        num_waiting = num_kept;
        emit(bins, sort_by_hash(bins, num_closing), num_closing, packs);
    }
    for (int64_t at = 0; at < num_waiting; at++) {
        int32_t head = positions[at];
        int64_t write = packs->offsets[packs->num_packs++];
        still[at] = head < first_new ? firsts[head] : head + position - first_new;
        packs->order[write] = head;
        packs->offsets[packs->num_packs] = write + 1;
    }
    return num_waiting;
}

/* window_fit(lengths int32[n], firsts int64[waiting], position, last, limit, max_samples, window, seed;
              order int32[n], offsets int64[n + 1], still int64[n]) -> number of packs, number of samples that wait

   A stretch begins with a window. firsts: positions in the sequence of the waiting samples; lengths begins with their
   lengths. position: of the stretch's first sample. last: the sequence ends with the stretch. Written: order and
   offsets over lengths; still: positions of the samples that wait afterwards, each a pack of its own at the end. */
PyObject *py_window_fit(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    Call call;
    Array lengths, firsts, order, offsets, still;
    int64_t position, last, num_waiting = 0;
    Rules rules = {.share = 0};
    if (!begin_call(
            &call, "window_fit", args, num_args, "ilnnnnnqILL", &lengths, &firsts, &position, &last, &rules.limit,
            &rules.max_samples, &rules.window, &rules.seed, &order, &offsets, &still
        ) ||
        !rules_fit(&call, &rules) ||
        !check(
            &call, lengths_fit(lengths.data, lengths.count, rules.limit) && firsts.count <= lengths.count,
            "lengths are from 1 to the limit, and begin with those of the waiting samples"
        ) ||
        !check(
            &call, order.count == lengths.count && offsets.count == order.count + 1 && still.count == order.count,
            "order, offsets and still have a size for all lengths"
        ))
        return end_call(&call, NULL);
    Packs packs = {order.data, offsets.data, 0};
    Py_BEGIN_ALLOW_THREADS;
    rules = limited_window(&rules, lengths.count - firsts.count);
    int64_t most = rules.window + MAX(rules.window, firsts.count);
    Bins bins = new_bins(&call, most, most, rules.limit);
    Pool pool = new_pool(&call, most);
    if (!call.is_short)
        num_waiting = window_fit_in(
            &bins, &pool, lengths.data, lengths.count, firsts.data, firsts.count, position, last, &rules, &packs,
            still.data
        );
    Py_END_ALLOW_THREADS;
    return end_call(&call, Py_BuildValue("LL", packs.num_packs, num_waiting));
}
