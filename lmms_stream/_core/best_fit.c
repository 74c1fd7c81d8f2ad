/* Packs by next, first and best fit: lengths, each from 1 to the limit, in; order and offsets out. */

#include "core.h"

#define FEW_SAMPLES 64         /* of a window: sorting these few by comparison is quicker than a loop over all lengths */
#define CLOSED_BELOW (1 / 512.0) /* of a pack: a pack with less room left is not kept open for another window */

/* Return bins for up to num_positions consecutive positions, with up to `window` positions placed at a time. */
Bins new_bins(Call *call, int64_t num_positions, int64_t window, int64_t limit) {
    int64_t slots = 1, num_words = (limit >> 6) + 1;
    while (slots < num_positions) slots *= 2;
    Bins bins = {
        .words = NEW(call, num_words, uint64_t),
        .summary = NEW(call, (num_words >> 6) + 1, uint64_t),
        .summary_words = (num_words >> 6) + 1,
        .slots = slots,
        .by_room = NEW(call, limit + 1, int32_t),
        .next_bin = NEW(call, slots, int32_t),
        .following = NEW(call, slots, int32_t),
        .head = NEW(call, slots, int32_t),
        .size = NEW(call, slots, int32_t),
        .room = NEW(call, slots, int32_t),
        .opened = NEW(call, slots, int32_t),
        .unused = NEW(call, slots, int32_t),
        .first = NEW(call, slots, int64_t),
        .turns = NEW(call, window, int32_t),
        .counts = NEW(call, limit + 2, int32_t),
        .closing = NEW(call, slots, int32_t),
        .buckets = NEW(call, 2 * slots + 1, int32_t),
        .sorted = NEW(call, slots, int32_t),
        .keys = NEW(call, slots, uint64_t),
        .sorted_keys = NEW(call, slots, uint64_t),
    };
    for (int64_t at = 0; !call->is_short && at < slots; at++) bins.unused[at] = (int32_t)at;
    return bins;
}

/* Write to bins->turns the order of placing a window: samples as given, then the fillers, longest first, to fill gaps.

   The fillers are the shortest samples, with at most `share` of the window's tokens. takes_part: of samples of equal
   length, some may be within the share, and then all are fillers; otherwise all or none are. */
void order_window(Bins *bins, const int32_t *lengths, int64_t start, int64_t stop, double share, bool takes_part) {
    int32_t *restrict counts = bins->counts, *restrict turns = bins->turns;
    int64_t total = 0, shortest = INT32_MAX, longest = 0, threshold = 0, slot = stop - start, num_large = 0;
    for (int64_t position = start; position < stop; position++) {
        int64_t length = lengths[position];
        counts[length]++;
        total += length;
        shortest = MIN(shortest, length);
        longest = MAX(longest, length);
    }
    int64_t budget = (int64_t)((double)total * share);
    for (int64_t length = shortest; length <= longest; length++) {
        int64_t number = counts[length];
        budget -= number * length;
        if (budget < 0 && !(takes_part && budget + (number - 1) * length >= 0)) break;
        threshold = length;
        slot -= number;
        if (budget < 0) break;
    }
    for (int64_t length = threshold; length >= shortest; length--) {
        int32_t number = counts[length];
        counts[length] = (int32_t)slot;
        slot += number;
    }
    for (int64_t position = start; position < stop; position++) {
        int64_t length = lengths[position];
        turns[length > threshold ? num_large++ : counts[length]++] = (int32_t)position;
    }
    if (longest) memset(counts + shortest, 0, (size_t)(longest - shortest + 1) * sizeof(int32_t));
}

/* Write the order of a window of a few samples, by insertion. */
static void order_few(Bins *bins, const int32_t *lengths, int64_t start, int64_t stop, double share) {
    int32_t by_length[FEW_SAMPLES]; /* longest first, equal lengths as given */
    int64_t count = stop - start, total = 0, threshold = 0, num_large = count, num_placed = 0;
    for (int64_t at = 0; at < count; at++) {
        int32_t length = lengths[start + at];
        int64_t slot = at;
        total += length;
        for (; slot > 0 && lengths[by_length[slot - 1]] < length; slot--) by_length[slot] = by_length[slot - 1];
        by_length[slot] = (int32_t)(start + at);
    }
    int64_t budget = (int64_t)((double)total * share);
    while (num_large > 0) {
        int64_t length = lengths[by_length[num_large - 1]], equal = num_large;
        while (equal > 0 && lengths[by_length[equal - 1]] == length) equal--;
        budget -= (num_large - equal) * length;
        if (budget < 0) break;
        threshold = length;
        num_large = equal;
    }
    for (int64_t position = start; position < stop; position++)
        if (lengths[position] > threshold) bins->turns[num_placed++] = (int32_t)position;
    memcpy(bins->turns + num_large, by_length + num_large, (size_t)(count - num_large) * sizeof(int32_t));
}

/* Return the least set bit from `bit` up; -1 if no bit is set. */
static inline int64_t least_bit(const uint64_t *words, const uint64_t *summary, int64_t num_summary, int64_t bit) {
    int64_t at = bit >> 6;
    uint64_t word = words[at] >> (bit & 63);
    if (word) return bit + __builtin_ctzll(word);
    at++;
    int64_t block_at = at >> 6;
    if (block_at >= num_summary) return -1;
    uint64_t block = summary[block_at] >> (at & 63) << (at & 63);
    while (!block) {
        if (++block_at == num_summary) return -1;
        block = summary[block_at];
    }
    at = (block_at << 6) + __builtin_ctzll(block);
    return (at << 6) + __builtin_ctzll(words[at]);
}

/* Put a bin first into the list of its room. */
static inline void enter(
    uint64_t *words, uint64_t *summary, int32_t *by_room, int32_t *next_bin, int32_t chosen, int64_t room
) {
    words[room >> 6] |= UINT64_C(1) << (room & 63);
    summary[room >> 12] |= UINT64_C(1) << (room >> 6 & 63);
    next_bin[chosen] = by_room[room];
    by_room[room] = chosen + 1;
}

/* Put samples, in the order of bins->turns, into the fullest packs with room. */
void fill_window(Bins *bins, const int32_t *lengths, int64_t count, int64_t shift, int64_t limit, int64_t max_samples) {
    uint64_t *restrict words = bins->words, *restrict summary = bins->summary;
    int32_t *restrict by_room = bins->by_room, *restrict next_bin = bins->next_bin;
    int32_t *restrict following = bins->following, *restrict head = bins->head, *restrict size = bins->size;
    const int32_t *restrict turns = bins->turns;
    int64_t mask = bins->slots - 1, num_open = bins->num_open, num_summary = bins->summary_words;
    for (int64_t turn = 0; turn < count; turn++) {
        int32_t position = turns[turn], chosen;
        int64_t length = lengths[position], room = least_bit(words, summary, num_summary, length);
        if (room >= 0) {
            chosen = by_room[room] - 1;
            by_room[room] = next_bin[chosen];
            if (!by_room[room]) {
                words[room >> 6] &= ~(UINT64_C(1) << (room & 63));
                if (!words[room >> 6]) summary[room >> 12] &= ~(UINT64_C(1) << (room >> 6 & 63));
            }
        } else {
            chosen = bins->unused[mask - num_open];
            bins->opened[num_open++] = chosen;
            head[chosen] = -1;
            bins->first[chosen] = position + shift;
            size[chosen] = 0;
            room = limit;
        }
        following[position & mask] = head[chosen];
        head[chosen] = position;
        size[chosen]++;
        room -= length;
        bins->room[chosen] = (int32_t)room;
        if (room > 0 && size[chosen] < max_samples) /* a full bin is in no list */
            enter(words, summary, by_room, next_bin, chosen, room);
    }
    bins->num_open = num_open;
}

/* Empty the list of a room above 0, and the lists around it. */
void empty_list(Bins *bins, int64_t room) {
    bins->by_room[room] = 0;
    bins->words[room >> 6] = 0;
    bins->summary[room >> 12] = 0;
}

static void enter_open(Bins *bins) {
    for (int64_t at = 0; at < bins->num_open; at++) {
        int32_t chosen = bins->opened[at];
        enter(bins->words, bins->summary, bins->by_room, bins->next_bin, chosen, bins->room[chosen]);
    }
}

/* Return bins->closing sorted by bins->keys, which are evenly spread: a bucket per bin by high bits, then insertion. */
const int32_t *sort_by_hash(Bins *bins, int64_t count) {
    int bits = 1;
    while (INT64_C(1) << bits < count) bits++;
    int shift = 64 - bits;
    const uint64_t *restrict keys = bins->keys;
    uint64_t *restrict sorted_keys = bins->sorted_keys;
    int32_t *restrict buckets = bins->buckets, *restrict sorted = bins->sorted;
    memset(buckets, 0, (((size_t)1 << bits) + 1) * sizeof(int32_t));
    for (int64_t at = 0; at < count; at++) buckets[(keys[at] >> shift) + 1]++;
    for (int64_t at = 0; at < INT64_C(1) << bits; at++) buckets[at + 1] += buckets[at];
    for (int64_t at = 0; at < count; at++) {
        int32_t slot = buckets[keys[at] >> shift]++;
        sorted_keys[slot] = keys[at];
        sorted[slot] = bins->closing[at];
    }
    for (int64_t at = 1; at < count; at++) {
        uint64_t key = sorted_keys[at];
        int32_t chosen = sorted[at];
        int64_t slot = at;
        for (; slot > 0 && sorted_keys[slot - 1] > key; slot--) {
            sorted_keys[slot] = sorted_keys[slot - 1];
            sorted[slot] = sorted[slot - 1];
        }
        sorted_keys[slot] = key;
        sorted[slot] = chosen;
    }
    return sorted;
}

/* Close the first num_last open bins and all nearly full bins; return the number of them, in bins->closing. */
static int64_t close_bins(Bins *bins, int64_t num_last, const Rules *rules) {
    int64_t least_room = MAX(1, (int64_t)((double)rules->limit * CLOSED_BELOW));
    int64_t num_open = bins->num_open, num_closing = 0, num_kept = 0;
    for (int64_t at = 0; at < num_open; at++) {
        int32_t chosen = bins->opened[at], room = bins->room[chosen];
        if (room > 0) empty_list(bins, room); /* the bins that stay open are entered again below */
        if (at < num_last || room < least_room || bins->size[chosen] >= rules->max_samples) {
            bins->keys[num_closing] = pack_key(rules->seed, bins->first[chosen]);
            bins->closing[num_closing] = chosen;
            bins->unused[bins->slots - num_open + num_closing] = chosen;
            num_closing++;
        } else {
            bins->opened[num_kept++] = chosen;
        }
    }
    bins->num_open = num_kept;
    enter_open(bins);
    return num_closing;
}

/* Append the samples of bins as packs. */
void emit(const Bins *bins, const int32_t *emitted, int64_t count, Packs *packs) {
    const int32_t *restrict following = bins->following;
    int32_t *restrict order = packs->order;
    int64_t mask = bins->slots - 1, stop = packs->offsets[packs->num_packs];
    for (int64_t at = 0; at < count; at++) {
        int32_t chosen = emitted[at];
        stop += bins->size[chosen];
        int64_t write = stop;
        for (int32_t position = bins->head[chosen]; position >= 0; position = following[position & mask])
            order[--write] = position;
        packs->offsets[++packs->num_packs] = stop;
    }
}

/* Empty bins that a stretch left open. */
void reset_bins(Bins *bins) {
    for (int64_t at = 0; at < bins->num_open; at++) {
        int32_t room = bins->room[bins->opened[at]];
        if (room > 0) empty_list(bins, room);
    }
    for (int64_t at = 0; at < bins->slots; at++) bins->unused[at] = (int32_t)at;
}

/* Return the packs of a sequence, or of a stretch, which begins with a window; see py_best_fit. Write to `still` the
   firsts of the packs that stay open, and return their number; it may be the array of firsts. bins: for at least twice the
   window. A last stretch leaves them empty. */
int64_t best_fit_in(
    Bins *bins, const int32_t *lengths, int64_t count, const int64_t *carried, const int64_t *firsts, int64_t num_open,
    int64_t position, bool last, const Rules *rules, Packs *packs, int64_t *still
) {
    int64_t first_new = carried[num_open];
    packs->num_packs = packs->offsets[0] = 0;
    bins->num_open = num_open;
    for (int64_t number = 0; number < num_open; number++) {
        int32_t chosen = bins->unused[bins->slots - 1 - number];
        bins->opened[number] = chosen;
        bins->first[chosen] = firsts[number];
        bins->size[chosen] = (int32_t)(carried[number + 1] - carried[number]);
        bins->room[chosen] = (int32_t)rules->limit;
        bins->head[chosen] = -1;
        for (int64_t at = carried[number]; at < carried[number + 1]; at++) {
            bins->room[chosen] -= lengths[at];
            bins->following[at] = bins->head[chosen];
            bins->head[chosen] = (int32_t)at;
        }
    }
    enter_open(bins);
    for (int64_t start = first_new; start < count; start += rules->window) {
        int64_t stop = MIN(start + rules->window, count), num_carried = bins->num_open;
        if (stop - start <= FEW_SAMPLES)
            order_few(bins, lengths, start, stop, rules->share);
        else
            order_window(bins, lengths, start, stop, rules->share, false);
        fill_window(bins, lengths, stop - start, position - first_new, rules->limit, rules->max_samples);
        int64_t num_closing = close_bins(bins, last && stop == count ? bins->num_open : num_carried, rules);
        emit(bins, sort_by_hash(bins, num_closing), num_closing, packs);
    }
    emit(bins, bins->opened, bins->num_open, packs);
    for (int64_t at = 0; at < bins->num_open; at++) still[at] = bins->first[bins->opened[at]];
    return bins->num_open;
}

bool lengths_fit(const int32_t *lengths, int64_t count, int64_t limit) {
    int32_t shortest = 1, longest = 1;
    for (int64_t at = 0; at < count; at++) {
        shortest = MIN(shortest, lengths[at]);
        longest = MAX(longest, lengths[at]);
    }
    return count < INT32_MAX && shortest >= 1 && longest <= limit;
}

bool rules_fit(const Call *call, const Rules *rules) {
    bool fits = rules->limit >= 1 && rules->limit < INT32_MAX - 1 && rules->max_samples >= 1 && rules->window >= 1;
    return check(call, fits && rules->share >= 0 && rules->share <= 1, "limit, max_samples, window or share is wrong");
}

/* Return rules with a window of at most the samples to pack. */
Rules limited_window(const Rules *rules, int64_t count) {
    Rules limited = *rules;
    limited.window = MIN(rules->window, MAX(count, 1));
    return limited;
}

/* Return whether open packs, whose samples are the first ones, are without gaps and no larger than the limit. */
static bool carried_fit(Array carried, Array firsts, Array lengths, int64_t limit) {
    const int64_t *ends = carried.data;
    if (carried.count != firsts.count + 1 || !ascends(ends, carried.count, 0, lengths.count) || ends[0]) return false;
    for (int64_t number = 0; number < firsts.count; number++) {
        int64_t tokens = 0;
        for (int64_t at = ends[number]; at < ends[number + 1]; at++) tokens += ((int32_t *)lengths.data)[at];
        if (!tokens || tokens > limit) return false;
    }
    return true;
}

/* best_fit, even_fit(lengths int32[n], carried int64[open + 1], firsts int64[open], position, last, limit, max_samples, window,
                      share, seed; order int32[n], offsets int64[n + 1], still int64[n]) -> number of packs, number of open packs

   A stretch begins with a window. carried: offsets of the packs that are open before the stretch; lengths begins with
   the lengths of their samples. firsts: positions in the sequence of the first samples of these packs. position: of the
   stretch's first sample. last: the sequence ends with the stretch. share: of the fillers. Written: order and offsets
   over lengths; still: firsts of the packs that are still open, at the end of the order. */
static PyObject *window_by_window(const char *name, PyObject *const *args, Py_ssize_t num_args, bool evens) {
    Call call;
    Array lengths, carried, firsts, order, offsets, still;
    int64_t position, last, num_open = 0;
    Rules rules;
    if (!begin_call(
            &call, name, args, num_args, "illnnnnnxqILL", &lengths, &carried, &firsts, &position, &last,
            &rules.limit, &rules.max_samples, &rules.window, &rules.share, &rules.seed, &order, &offsets, &still
        ) ||
        !rules_fit(&call, &rules) ||
        !check(
            &call, lengths_fit(lengths.data, lengths.count, rules.limit) && carried_fit(carried, firsts, lengths, rules.limit),
            "lengths are from 1 to the limit, and open packs hold the first of them"
        ) ||
        !check(
            &call, order.count == lengths.count && offsets.count == order.count + 1 && still.count == order.count,
            "order, offsets and still have a size for all lengths"
        ))
        return end_call(&call, NULL);
    Packs packs = {order.data, offsets.data, 0};
    Py_BEGIN_ALLOW_THREADS;
    int64_t first_new = ((int64_t *)carried.data)[firsts.count];
    rules = limited_window(&rules, lengths.count - first_new);
    Bins bins = new_bins(&call, rules.window + MAX(rules.window, first_new), rules.window, rules.limit);
    Evened evened = {0};
    if (evens) {
        evened = new_evened(&call, MAX(rules.window, first_new) + rules.window);
        memcpy(still.data, firsts.data, (size_t)firsts.count * sizeof(int64_t));
    }
    if (!call.is_short && evens)
        num_open = even_fit_in(
            &evened, &bins, lengths.data, lengths.count, carried.data, firsts.count, position, last, &rules, &packs,
            still.data
        );
    else if (!call.is_short)
        num_open = best_fit_in(
            &bins, lengths.data, lengths.count, carried.data, firsts.data, firsts.count, position, last, &rules, &packs,
            still.data
        );
    Py_END_ALLOW_THREADS;
    return end_call(&call, Py_BuildValue("LL", packs.num_packs, num_open));
}

PyObject *py_best_fit(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    return window_by_window("best_fit", args, num_args, false);
}

PyObject *py_even_fit(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    return window_by_window("even_fit", args, num_args, true);
}

void next_fit(const int32_t *lengths, int64_t count, const Rules *rules, Packs *packs) {
    int64_t room = 0, samples_left = 0;
    packs->num_packs = 0;
    for (int64_t position = 0; position < count; position++) {
        if (lengths[position] > room || !samples_left) {
            packs->offsets[packs->num_packs++] = position;
            room = rules->limit;
            samples_left = rules->max_samples;
        }
        room -= lengths[position];
        samples_left--;
        packs->order[position] = (int32_t)position;
    }
    packs->offsets[packs->num_packs] = count;
}

static int64_t num_leaves(int64_t count) {
    int64_t leaves = 1;
    while (leaves < count) leaves *= 2;
    return leaves;
}

Tree new_tree(Call *call, int64_t count) {
    return (Tree){NEW(call, 2 * num_leaves(count), int32_t), NEW(call, count, int32_t)};
}

/* Put each sample into the first opened pack with room, found in a tree of maxima. */
void first_fit(Tree *tree, const int32_t *lengths, int64_t count, const Rules *rules, Packs *packs) {
    int32_t *rooms = tree->rooms, *pack_of = tree->pack_of;
    int64_t leaves = num_leaves(count), *ends = packs->offsets; /* first sizes, then ends, then beginnings */
    memset(rooms, 0, (size_t)(2 * leaves) * sizeof(int32_t));
    memset(ends, 0, (size_t)(count + 1) * sizeof(int64_t));
    packs->num_packs = 0;
    for (int64_t position = 0; position < count; position++) {
        int32_t length = lengths[position];
        int64_t node = 1, chosen = packs->num_packs;
        if (rooms[1] >= length) {
            while (node < leaves) node = rooms[2 * node] >= length ? 2 * node : 2 * node + 1;
            chosen = node - leaves;
        } else {
            rooms[leaves + packs->num_packs++] = (int32_t)rules->limit;
        }
        pack_of[position] = (int32_t)chosen;
        ends[chosen]++;
        node = leaves + chosen;
        rooms[node] = ends[chosen] < rules->max_samples ? rooms[node] - length : 0;
        while (node > 1) {
            node >>= 1;
            rooms[node] = MAX(rooms[2 * node], rooms[2 * node + 1]);
        }
    }
    for (int64_t pack = 1; pack < packs->num_packs; pack++) ends[pack] += ends[pack - 1];
    for (int64_t position = count - 1; position >= 0; position--)
        packs->order[--ends[pack_of[position]]] = (int32_t)position;
    packs->offsets[packs->num_packs] = count;
}

/* next_fit, first_fit(lengths int32[n], limit, max_samples; order int32[n], offsets int64[n + 1]) -> number of packs */
static PyObject *simple_fit(const char *name, PyObject *const *args, Py_ssize_t num_args, bool is_first_fit) {
    Call call;
    Array lengths, order, offsets;
    Rules rules = {.window = 1};
    if (!begin_call(
            &call, name, args, num_args, "innIL", &lengths, &rules.limit, &rules.max_samples, &order, &offsets
        ) ||
        !rules_fit(&call, &rules) ||
        !check(&call, lengths_fit(lengths.data, lengths.count, rules.limit), "lengths are from 1 to the limit") ||
        !check(
            &call, order.count == lengths.count && offsets.count == order.count + 1,
            "order and offsets have a size for all lengths"
        ))
        return end_call(&call, NULL);
    Packs packs = {order.data, offsets.data, 0};
    Py_BEGIN_ALLOW_THREADS;
    if (is_first_fit) {
        Tree tree = new_tree(&call, lengths.count);
        if (!call.is_short) first_fit(&tree, lengths.data, lengths.count, &rules, &packs);
    } else {
        next_fit(lengths.data, lengths.count, &rules, &packs);
    }
    Py_END_ALLOW_THREADS;
    return end_call(&call, Py_BuildValue("L", packs.num_packs));
}

PyObject *py_next_fit(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    return simple_fit("next_fit", args, num_args, false);
}

PyObject *py_first_fit(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    return simple_fit("first_fit", args, num_args, true);
}
