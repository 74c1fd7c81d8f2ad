/* Sources of a mixture that take turns.

   With a thousand sources, a loop over all sources for every pack would take most of a step. Sources that lack too little
   for a turn wait in a heap, sorted by the turn in which they lack enough. Sources that lack enough are in another heap,
   sorted by deadline. The lack of a source is updated when the source is looked at.

   Turns by tokens have two clocks. Shares are of the tokens that were given. Deadlines count turns as if all packs were
   full, because the tokens up to a later phase are not known, and its turns are; as packs are at most full, a deadline in
   a heap may be too early, and is computed again before its source is chosen. */

#include "core.h"

#define NEVER (INT64_C(1) << 62)

typedef struct {
    int64_t key, source;
} Entry; /* of a heap; ties go to the first source */

/* Shares of k sources in each phase. quotas: int64[phases, k], with sum unit / full. ends: the turn that ends each phase,
   times `full`, the tokens of a full pack; 1 to count packs. */
typedef struct {
    const int64_t *quotas, *ends;
    int64_t num_sources, num_phases, unit, least, full;
} Shares;

/* Tokens of the next packs of each source: int64[k, most], of which those from used to have are known. goes_on: whether
   the last of them is perhaps not the last pack of its epoch. most: 0 to count packs. */
typedef struct {
    const int64_t *tokens, *have;
    int64_t *used, most;
    const uint8_t *goes_on;
} Sizes;

/* State of sources that take turns. credits: lack of each source, in `unit`ths of a pack. left: packs left in each
   source. taken: packs of each source. clock: packs, or tokens, given so far. known: the clock at which a credit was
   updated. givers: sources in the order of their first turn since `taken` was 0. */
typedef struct {
    int64_t *credits, *left, *taken, *known, *deadlines, *givers;
    Entry *waiting, *ready;
    int64_t num_waiting, num_ready, num_givers, phase, clock;
    Sizes sizes;
} Turns;

/* Return the quotient, rounded down; the divisor is above 0. */
static inline int64_t floored(int64_t value, int64_t divisor) { return value / divisor - (value % divisor < 0); }

/* Return the last turn in which a source, lacking `lack` before `turn`, does not yet lack more than `most`. */
static int64_t deadline_of(const Shares *shares, int64_t source, int64_t lack, int64_t turn, int64_t phase) {
    int64_t most = shares->unit - shares->least;
    for (int64_t row = phase; row < shares->num_phases; row++) {
        int64_t stop = shares->ends[row], quota = shares->quotas[row * shares->num_sources + source];
        if (quota > 0 && stop > turn) {
            int64_t waits = floored(most - lack, quota) - 1;
            if (turn + waits < stop - 1) return turn + waits; /* at the last turn of a phase the next phase decides */
            lack += quota * (stop - turn);
        }
        turn = MAX(turn, stop);
    }
    return NEVER;
}

/* Return the first turn in which a source lacks at least `least`, at a constant quota; lack: before `turn`. */
static int64_t eligible_at(const Shares *shares, int64_t source, int64_t lack, int64_t turn, int64_t phase) {
    int64_t quota = shares->quotas[phase * shares->num_sources + source];
    if (lack + quota >= shares->least) return turn;
    return quota > 0 ? turn + floored(shares->least - lack + quota - 1, quota) - 1 : NEVER;
}

static inline bool is_before(Entry one, Entry other) {
    return one.key < other.key || (one.key == other.key && one.source < other.source);
}

static void push(Entry *heap, int64_t size, int64_t key, int64_t source) {
    Entry added = {key, source};
    int64_t here = size;
    for (; here > 0 && !is_before(heap[(here - 1) / 2], added); here = (here - 1) / 2) heap[here] = heap[(here - 1) / 2];
    heap[here] = added;
}

/* Remove the first source from a heap of `size` sources, and return it. */
static int64_t pop(Entry *heap, int64_t size) {
    int64_t source = heap[0].source, here = 0;
    Entry moved = heap[--size];
    for (int64_t child = 1; child < size; child = 2 * here + 1) {
        if (child + 1 < size && is_before(heap[child + 1], heap[child])) child++;
        if (is_before(moved, heap[child])) break;
        heap[here] = heap[child];
        here = child;
    }
    heap[here] = moved;
    return source;
}

/* Return the state before the first turn; all sources wait. */
static Turns begin_turns(
    Call *call, const Shares *shares, const Sizes *sizes, int64_t *credits, int64_t *left, int64_t *taken
) {
    int64_t count = shares->num_sources;
    Turns turns = {
        .credits = credits,
        .left = left,
        .taken = taken,
        .known = NEW(call, count, int64_t),
        .deadlines = NEW(call, count, int64_t),
        .givers = NEW(call, count, int64_t),
        .waiting = NEW(call, count, Entry),
        .ready = NEW(call, count, Entry),
        .num_waiting = count,
        .sizes = *sizes,
    };
    for (int64_t source = 0; !call->is_short && source < count; source++) {
        turns.deadlines[source] = deadline_of(shares, source, credits[source], 0, 0);
        push(turns.waiting, source, eligible_at(shares, source, credits[source], 0, 0), source);
    }
    return turns;
}

static void begin_phase(Turns *turns, const Shares *shares) {
    const int64_t *quotas = shares->quotas + turns->phase * shares->num_sources;
    for (int64_t source = 0; source < shares->num_sources; source++) {
        turns->credits[source] += quotas[source] * (turns->clock - turns->known[source]);
        turns->known[source] = turns->clock;
    }
    turns->phase++;
    for (int64_t at = 0; at < turns->num_waiting; at++) { /* each prefix is a heap before the next source is pushed */
        int64_t source = turns->waiting[at].source;
        push(turns->waiting, at, eligible_at(shares, source, turns->credits[source], turns->clock, turns->phase), source);
    }
}

/* Update what a source lacks. */
static void update(Turns *turns, const Shares *shares, int64_t source) {
    int64_t quota = shares->quotas[turns->phase * shares->num_sources + source];
    turns->credits[source] += quota * (turns->clock - turns->known[source]);
    turns->known[source] = turns->clock;
}

/* Return the first ready source and its tokens, or -1 without a source with known tokens. */
static int64_t next_source(Turns *turns, const Shares *shares, int64_t turn, int64_t *cost) {
    Sizes *sizes = &turns->sizes;
    *cost = 1;
    while (turns->num_ready) {
        int64_t source = pop(turns->ready, turns->num_ready--);
        if (!sizes->most) return source;
        update(turns, shares, source);
        Entry entry = {deadline_of(shares, source, turns->credits[source], turn * shares->full, turns->phase), source};
        if (turns->num_ready && is_before(turns->ready[0], entry)) {
            push(turns->ready, turns->num_ready++, entry.key, source);
            continue;
        }
        if (sizes->used[source] >= sizes->have[source]) return -1;
        *cost = sizes->tokens[source * sizes->most + sizes->used[source]++];
        return source;
    }
    return -1;
}

/* Take the turns from `turn` to `count`, or until a source ends; return the next turn, -1 if no source is ready. */
static int64_t take(Turns *turns, const Shares *shares, int64_t turn, int64_t count) {
    bool is_done = false;
    turns->num_givers = 0;
    while (turn < count && !is_done) {
        if (turns->phase + 1 < shares->num_phases && turn * shares->full >= shares->ends[turns->phase]) {
            begin_phase(turns, shares);
            continue;
        }
        while (turns->num_waiting > 0 && turns->waiting[0].key <= turns->clock) {
            int64_t source = pop(turns->waiting, turns->num_waiting--);
            push(turns->ready, turns->num_ready++, turns->deadlines[source], source);
        }
        int64_t cost, source = next_source(turns, shares, turn, &cost);
        if (source < 0) return -1;
        turn++;
        turns->clock += cost;
        update(turns, shares, source);
        turns->credits[source] -= shares->unit / shares->full * cost;
        if (!turns->taken[source]++) turns->givers[turns->num_givers++] = source;
        is_done = --turns->left[source] == 0;
        int64_t lack = turns->credits[source];
        turns->deadlines[source] = deadline_of(shares, source, lack, turn * shares->full, turns->phase);
        push(turns->waiting, turns->num_waiting++, eligible_at(shares, source, lack, turns->clock, turns->phase), source);
    }
    return turn;
}

/* Update what all sources lack. */
static void end_turns(Turns *turns, const Shares *shares) {
    for (int64_t source = 0; source < shares->num_sources; source++) update(turns, shares, source);
}

/* Return whether quotas, ends and numbers of shares fit k sources. The last phase never ends. */
static bool read_shares(const Call *call, Array quotas, Array ends, Shares *shares) {
    shares->quotas = quotas.data;
    shares->ends = ends.data;
    shares->num_phases = ends.count;
    return check(
        call,
        ends.count >= 1 && shares->num_sources >= 1 && quotas.count == ends.count * shares->num_sources &&
            shares->ends[ends.count - 1] == NEVER && ascends(shares->ends, ends.count, 0, NEVER) &&
            in_range(quotas.data, quotas.count, 0, INT64_C(1) << 62) && shares->unit >= 1 && shares->least >= 1 &&
            shares->full >= 1 && shares->full <= INT32_MAX,
        "each phase has a quota of each source, and the last phase never ends"
    );
}

/* Return whether tokens, and the numbers of used and known tokens, are of k sources. */
static bool read_sizes(
    const Call *call, Array tokens, Array used, Array have, Array goes_on, int64_t num_sources, Sizes *sizes
) {
    *sizes = (Sizes){tokens.data, have.data, used.data, tokens.count / num_sources, goes_on.data};
    bool fits = tokens.count % num_sources == 0 && used.count == num_sources && have.count == num_sources &&
                goes_on.count == num_sources && in_range(tokens.data, tokens.count, 0, INT64_C(1) << 31);
    for (int64_t source = 0; fits && source < num_sources; source++)
        fits = 0 <= sizes->used[source] && sizes->used[source] <= sizes->have[source] && sizes->have[source] <= sizes->most;
    return check(call, fits, "tokens of packs are known for each source");
}

static const char *const NO_SOURCE = "no source lacks enough for a turn: credits have a sum other than 0, or tokens are missing";

/* take_turns(count, left, credits int64[k], changed, quotas int64[phases, k], ends int64[phases], unit, least, taken
              int64[k], changed, tokens int64[k, n], used int64[k], changed, have int64[k], goes_on bool[k], full)
   -> number of packs

   Let k sources give up to `count` packs in turn, until a source has no packs left. left: packs left in each source, 1 or
   more. credits: lack of each source in `unit`ths of a pack; their sum is 0. Each turn goes to the source with the
   earliest deadline, among sources that lack at least `least` (see mixture.py). least: at most unit / k, to leave at
   least one source. */
PyObject *py_take_turns(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    Call call;
    Array left, credits, quotas, ends, taken, tokens, used, have, goes_on;
    Shares shares;
    Sizes sizes;
    int64_t count, turn = 0;
    if (!begin_call(
            &call, "take_turns", args, num_args, "nLLllnnLlLltn", &count, &left, &credits, &quotas, &ends, &shares.unit,
            &shares.least, &taken, &tokens, &used, &have, &goes_on, &shares.full
        ))
        return end_call(&call, NULL);
    shares.num_sources = credits.count;
    if (!read_shares(&call, quotas, ends, &shares) ||
        !read_sizes(&call, tokens, used, have, goes_on, shares.num_sources, &sizes) ||
        !check(
            &call,
            left.count == credits.count && taken.count == credits.count && in_range(left.data, left.count, 1, INT64_MAX),
            "arrays of sources have equal sizes, and each source has packs left"
        ))
        return end_call(&call, NULL);
    Py_BEGIN_ALLOW_THREADS;
    Turns turns = begin_turns(&call, &shares, &sizes, credits.data, left.data, taken.data);
    if (!call.is_short) turn = take(&turns, &shares, 0, count);
    if (!call.is_short && turn >= 0) end_turns(&turns, &shares);
    Py_END_ALLOW_THREADS;
    if (!check(&call, turn >= 0, NO_SOURCE)) return end_call(&call, NULL);
    return end_call(&call, Py_BuildValue("L", turn));
}

/* Known epochs of k sources. at, packs: the current epoch, and its consumed packs. counts: packs of the known epochs,
   source after source. firsts: index in counts of each source's epoch 0. until: source, epoch and number of the last pack
   to take; source -1 for no limit. */
typedef struct {
    int64_t *at, *packs;
    const int64_t *counts, *firsts, *until;
} Epochs;

/* Return the packs left in a source's epoch, or up to the last pack to take, or to the last with known tokens. */
static int64_t left_in(const Epochs *epochs, const Sizes *sizes, int64_t source) {
    int64_t left = epochs->counts[epochs->firsts[source] + epochs->at[source]] - epochs->packs[source];
    if (epochs->until[0] == source && epochs->at[source] == epochs->until[1])
        left = epochs->until[2] + 1 - epochs->packs[source];
    return sizes->most ? MIN(left, sizes->have[source] - sizes->used[source]) : left;
}

static int by_number(const void *one, const void *other) {
    int64_t left = *(const int64_t *)one, right = *(const int64_t *)other;
    return (left > right) - (left < right);
}

/* Write the ranges that givers have given as rows, and go on in their epochs; return the first giver with an ended epoch,
   or -1. */
static int64_t settle_givers(Turns *turns, Epochs *epochs, int64_t (*row)[4]) {
    int64_t ended = -1;
    qsort(turns->givers, (size_t)turns->num_givers, sizeof(int64_t), by_number);
    for (int64_t number = 0; number < turns->num_givers; number++) {
        int64_t source = turns->givers[number], first = epochs->packs[source];
        epochs->packs[source] += turns->taken[source];
        turns->taken[source] = 0;
        if (row) {
            int64_t values[4] = {source, epochs->at[source], first, epochs->packs[source]};
            memcpy(row++, values, sizeof(values));
        }
        if (ended < 0 && epochs->packs[source] == epochs->counts[epochs->firsts[source] + epochs->at[source]])
            ended = source;
    }
    return ended;
}

/* Return whether a giver has too few known tokens. batch: packs of the next step, where a step has ended; else 1. */
static bool lacks_tokens(const Turns *turns, int64_t batch) {
    const Sizes *sizes = &turns->sizes;
    for (int64_t number = 0; sizes->most && number < turns->num_givers; number++) {
        int64_t source = turns->givers[number], num_known = sizes->have[source] - sizes->used[source];
        if (!num_known || (sizes->goes_on[source] && num_known < batch)) return true;
    }
    return false;
}

/* take_epochs(count, at, packs int64[k], changed, counts int64[…], first_counts int64[k + 1], credits int64[k], changed,
               quotas int64[phases, k], ends int64[phases], unit, least, until int64[3], stop, batch; rows int64[n, 4],
               tokens, used, have, goes_on, full as for take_turns)
   -> number of packs, number of rows, the source whose known epochs have ended or -1

   Let k sources give `count` packs in turn, through the epochs with known pack counts; see Epochs and take_turns. stop,
   batch: packs to the end of the first step, and packs of a step. rows: written, taken ranges as source, epoch, first and
   stop, which end at each end of a step, and of an epoch of any source; nothing is written if n is 0. The loop ends at a
   source whose known epochs have ended, where tokens are missing, and when the rows of another epoch might not fit. */
PyObject *py_take_epochs(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    Call call;
    Array at, packs, counts, firsts, credits, quotas, ends, until, row_array, tokens, used, have, goes_on;
    Shares shares;
    Sizes sizes;
    int64_t count, stop, batch, done = 0, num_rows = 0, over = -1;
    if (!begin_call(
            &call, "take_epochs", args, num_args, "nLLllLllnnlnnLlLltn", &count, &at, &packs, &counts, &firsts, &credits,
            &quotas, &ends, &shares.unit, &shares.least, &until, &stop, &batch, &row_array, &tokens, &used,
            &have, &goes_on, &shares.full
        ))
        return end_call(&call, NULL);
    int64_t num_sources = shares.num_sources = at.count, most_rows = row_array.count / 4;
    const int64_t *first_counts = firsts.data;
    bool fits = packs.count == num_sources && credits.count == num_sources && firsts.count == num_sources + 1 &&
                until.count == 3 && row_array.count % 4 == 0 && ascends(first_counts, firsts.count, 0, counts.count);
    for (int64_t source = 0; fits && source < num_sources; source++)
        fits = in_range((int64_t *)at.data + source, 1, 0, first_counts[source + 1] - first_counts[source]);
    fits = fits && in_range(until.data, 1, -1, num_sources) && stop >= 1 && batch >= 1;
    if (!check(&call, fits, "arrays of sources have equal sizes, their epochs are known, and steps have packs") ||
        !read_shares(&call, quotas, ends, &shares) ||
        !read_sizes(&call, tokens, used, have, goes_on, num_sources, &sizes))
        return end_call(&call, NULL);
    Epochs epochs = {at.data, packs.data, counts.data, first_counts, until.data};
    int64_t(*rows)[4] = row_array.data;
    bool writes = most_rows > 0, is_found = false, is_missing = false;
    Py_BEGIN_ALLOW_THREADS;
    int64_t *left = NEW(&call, num_sources, int64_t), *taken = NEW(&call, num_sources, int64_t);
    for (int64_t source = 0; left && source < num_sources; source++) left[source] = left_in(&epochs, &sizes, source);
    Turns turns = begin_turns(&call, &shares, &sizes, credits.data, left, taken);
    while (!call.is_short && done >= 0 && done < count && over < 0 && !is_found && !is_missing &&
           (!writes || num_rows + num_sources <= most_rows)) {
        if (num_sources == 1) {
            taken[0] = MIN(count - done, left[0]);
            left[0] -= taken[0];
            turns.credits[0] = turns.givers[0] = 0;
            turns.num_givers = 1;
            done += taken[0];
        } else { /* the end of an epoch changes only the packs left in its source */
            done = take(&turns, &shares, done, writes ? MIN(count, stop) : count);
            if (done < 0) break;
            is_missing = lacks_tokens(&turns, done == stop ? batch : 1);
            if (done == stop) stop += batch;
        }
        int64_t ended = settle_givers(&turns, &epochs, writes ? rows + num_rows : NULL);
        if (writes) num_rows += turns.num_givers;
        is_found = epochs.until[0] >= 0 && epochs.at[epochs.until[0]] == epochs.until[1] &&
                   epochs.packs[epochs.until[0]] > epochs.until[2];
        if (ended < 0) continue;
        if (first_counts[ended] + epochs.at[ended] + 1 == first_counts[ended + 1]) {
            over = ended;
        } else {
            epochs.at[ended]++;
            epochs.packs[ended] = 0;
            left[ended] = left_in(&epochs, &sizes, ended);
        }
    }
    if (!call.is_short && done >= 0 && num_sources > 1) end_turns(&turns, &shares);
    Py_END_ALLOW_THREADS;
    if (!check(&call, done >= 0, NO_SOURCE)) return end_call(&call, NULL);
    return end_call(&call, Py_BuildValue("LLL", done, num_rows, over));
}
