/* Even fit: exchange samples between packs of best fit, for similar work of packs.

   The work of a pack is the sum of len**2 over its samples. Packs of best fit have hardly any room left. Two packs can
   only exchange samples with almost equal sums of tokens: two of 1000 tokens for three of 1500, 300 and 200. */

#include "core.h"

#define NUM_TURNS 16  /* each turn compares each pack with another pack */
#define CHOSEN_BITS 8 /* maximum samples of a pack to exchange in a turn; all their subsets are compared */
#define LEAST_GAP 6   /* powers of 1/2: shares of the mean work, */
#define LEAST_GAIN 8  /* and of the difference of two packs */
#define NUM_SUBSETS (1 << CHOSEN_BITS)

/* Subsets of some samples of a pack, by masks. sums: tokens << CHOSEN_BITS | mask, ascending. works: of each mask. */
typedef struct {
    int64_t samples[CHOSEN_BITS], sums[NUM_SUBSETS], works[NUM_SUBSETS], count;
} Subsets;

/* Insert a sample into the list of a pack. */
static void put(Evened *packs, int64_t pack, int64_t sample) {
    int64_t length = packs->lengths[sample], at = packs->head[pack], before = -1;
    for (; at >= 0 && packs->lengths[at] > length; at = packs->following[at]) before = at;
    packs->following[sample] = at;
    *(before < 0 ? &packs->head[pack] : &packs->following[before]) = sample;
    packs->size[pack]++;
    packs->room[pack] -= length;
    packs->work[pack] += length * length;
}

/* Add the subsets with another sample: merge the sorted sums with and without the sample, from the largest on. */
static void add_sample(Subsets *subsets, int64_t sample, int64_t length, int64_t number) {
    int64_t count = subsets->count, added = (length << CHOSEN_BITS) | (INT64_C(1) << number);
    int64_t one = count - 1, other = count - 1;
    while (other >= 0) { /* sums[0] is the empty subset: `one` stays at 0 */
        int64_t without = subsets->sums[one], included = subsets->sums[other] + added, is_without = without > included;
        subsets->sums[one + other + 1] = MAX(without, included);
        one -= is_without;
        other -= 1 - is_without;
    }
    for (int64_t mask = 0; mask < count; mask++) subsets->works[count + mask] = subsets->works[mask] + length * length;
    subsets->samples[number] = sample;
    subsets->count *= 2;
}

/* Choose samples of a pack, evenly from long to short, others in each turn. */
static void choose(const Evened *packs, int64_t pack, int64_t turn, Subsets *subsets) {
    int64_t size = packs->size[pack], count = MIN(size, CHOSEN_BITS), at = packs->head[pack], number = 0;
    subsets->sums[0] = subsets->works[0] = 0;
    subsets->count = 1;
    for (int64_t place = 0; number < count; place++, at = packs->following[at])
        if (place >= (number * size + turn * size / NUM_TURNS) / count) {
            add_sample(subsets, at, packs->lengths[at], number);
            number++;
        }
}

/* Move the samples of a mask from a pack to another. */
static void move(Evened *packs, int64_t pack, int64_t other, const Subsets *subsets, int64_t mask) {
    int64_t before = -1, at = packs->head[pack], number = 0;
    while (mask >> number) {
        int64_t sample = at, length = packs->lengths[at];
        at = packs->following[at];
        bool is_chosen = sample == subsets->samples[number], moves = is_chosen && mask >> number & 1;
        number += is_chosen;
        if (!moves) {
            before = sample;
            continue;
        }
        *(before < 0 ? &packs->head[pack] : &packs->following[before]) = at;
        packs->size[pack]--;
        packs->room[pack] += length;
        packs->work[pack] -= length * length;
    }
    for (int64_t place = 0; place < number; place++)
        if (mask >> place & 1) put(packs, other, subsets->samples[place]);
}

/* Exchange the subsets of two packs with the most similar work of the packs afterwards. most: samples of a pack. */
static void exchange(Evened *packs, int64_t heavy, int64_t light, const Subsets *of_heavy, const Subsets *of_light, int64_t most) {
    int64_t gap = packs->work[heavy] - packs->work[light], room_heavy = packs->room[heavy], room_light = packs->room[light];
    int64_t best = gap >> LEAST_GAIN, enough = gap / 2 - gap / 16, given = -1, received = -1, first = 0;
    for (int64_t number = 0; number < of_heavy->count; number++) {
        int64_t tokens = of_heavy->sums[number] >> CHOSEN_BITS, mask = of_heavy->sums[number] & (NUM_SUBSETS - 1);
        int64_t least = (tokens - room_light) * NUM_SUBSETS, end = (tokens + room_heavy + 1) * NUM_SUBSETS;
        while (first < of_light->count && of_light->sums[first] < least) first++;
        for (int64_t at = first; at < of_light->count && of_light->sums[at] < end; at++) {
            int64_t other = of_light->sums[at] & (NUM_SUBSETS - 1), moved = of_heavy->works[mask] - of_light->works[other];
            int64_t gain = MIN(moved, gap - moved);
            if (gain <= best) continue;
            int64_t change = __builtin_popcountll((uint64_t)other) - __builtin_popcountll((uint64_t)mask);
            if (packs->size[heavy] + change > most || packs->size[light] - change > most) continue;
            best = gain;
            given = mask;
            received = other;
        }
        if (best >= enough) break;
    }
    if (given < 0) return;
    move(packs, heavy, light, of_heavy, given);
    move(packs, light, heavy, of_light, received);
}

/* Sort packs by work, ties by number: merges of runs of doubled sizes. */
static void rank_packs(Evened *packs, int64_t count) {
    for (int64_t pack = 0; pack < count; pack++) packs->ranks[pack] = pack;
    for (int64_t width = 1; width < count; width *= 2) {
        for (int64_t begin = 0; begin < count; begin += 2 * width) {
            int64_t middle = MIN(begin + width, count), end = MIN(begin + 2 * width, count), one = begin, other = middle;
            for (int64_t write = begin; write < end; write++) {
                bool takes_one = other == end || (one < middle && packs->work[packs->ranks[one]] <= packs->work[packs->ranks[other]]);
                packs->merged[write] = packs->ranks[takes_one ? one++ : other++];
            }
        }
        memcpy(packs->ranks, packs->merged, (size_t)count * sizeof(int64_t));
    }
}

/* Exchange samples of packs for similar work; change order and offsets in place. No pack has more than `limit` tokens, nor
   more work than the heaviest pack had. */
static void even_out(Evened *packs, const int32_t *lengths, int32_t *order, int64_t *offsets, int64_t num_packs, const Rules *rules) {
    Subsets of_heavy, of_light;
    int64_t total = 0, half = num_packs / 2, write = 0;
    for (int64_t pack = 0; pack < num_packs; pack++) {
        packs->head[pack] = -1;
        packs->size[pack] = packs->work[pack] = 0;
        packs->room[pack] = rules->limit;
        for (int64_t sample = offsets[pack]; sample < offsets[pack + 1]; sample++) {
            packs->lengths[sample] = lengths[order[sample]];
            put(packs, pack, sample);
        }
        total += packs->work[pack];
    }
    int64_t least_gap = total / MAX(num_packs, 1) >> LEAST_GAP;
    for (int64_t turn = 0; turn < NUM_TURNS; turn++) {
        rank_packs(packs, num_packs);
        for (int64_t number = 0; number < half; number++) {
            int64_t heavy = packs->ranks[num_packs - 1 - number];
            int64_t light = packs->ranks[(number + turn * half / NUM_TURNS) % half];
            if (packs->work[heavy] - packs->work[light] <= least_gap) continue;
            choose(packs, heavy, turn, &of_heavy);
            choose(packs, light, turn, &of_light);
            exchange(packs, heavy, light, &of_heavy, &of_light, rules->max_samples);
        }
    }
    memcpy(packs->before, order, (size_t)offsets[num_packs] * sizeof(int32_t));
    for (int64_t pack = 0; pack < num_packs; pack++) {
        for (int64_t at = packs->head[pack]; at >= 0; at = packs->following[at]) order[write++] = packs->before[at];
        offsets[pack + 1] = write;
    }
}

Evened new_evened(Call *call, int64_t count) {
    Evened packs = {
        .head = NEW(call, count, int64_t),
        .following = NEW(call, count, int64_t),
        .size = NEW(call, count, int64_t),
        .room = NEW(call, count, int64_t),
        .work = NEW(call, count, int64_t),
        .ranks = NEW(call, count, int64_t),
        .merged = NEW(call, count, int64_t),
        .offsets = NEW(call, count + 1, int64_t),
        .carried = NEW(call, count + 1, int64_t),
        .lengths = NEW(call, count, int32_t),
        .before = NEW(call, count, int32_t),
        .of_window = NEW(call, count, int32_t),
        .order = NEW(call, count, int32_t),
    };
    return packs;
}

/* Return the packs of best_fit_in, evened among the packs that a window closes. `still` begins with firsts. */
int64_t even_fit_in(
    Evened *evened, Bins *bins, const int32_t *lengths, int64_t count, const int64_t *carried, int64_t num_open,
    int64_t position, bool last, const Rules *rules, Packs *packs, int64_t *still
) {
    int64_t first_new = carried[num_open], num_waiting = first_new;
    int32_t *waiting = packs->order; /* the samples behind the packs that are done */
    packs->num_packs = packs->offsets[0] = 0;
    memcpy(evened->carried, carried, (size_t)(num_open + 1) * sizeof(int64_t));
    for (int64_t at = 0; at < count; at++) waiting[at] = (int32_t)at;
    for (int64_t start = first_new; start < count; start += rules->window) {
        int64_t stop = MIN(start + rules->window, count), num_samples = num_waiting + stop - start;
        int64_t write = packs->offsets[packs->num_packs];
        Packs window = {evened->order, evened->offsets, 0};
        waiting = packs->order + write;
        for (int64_t at = 0; at < num_samples; at++) evened->of_window[at] = lengths[waiting[at]];
        num_open = best_fit_in(
            bins, evened->of_window, num_samples, evened->carried, still, num_open, position + start - first_new,
            last && stop == count, rules, &window, still
        );
        reset_bins(bins);
        int64_t num_closed = window.num_packs - num_open, closed = window.offsets[num_closed];
        even_out(evened, evened->of_window, window.order, window.offsets, num_closed, rules);
        memcpy(evened->before, waiting, (size_t)num_samples * sizeof(int32_t));
        for (int64_t at = 0; at < num_samples; at++) waiting[at] = evened->before[window.order[at]];
        for (int64_t pack = 1; pack <= num_closed; pack++)
            packs->offsets[++packs->num_packs] = write + window.offsets[pack];
        for (int64_t pack = 0; pack <= num_open; pack++)
            evened->carried[pack] = window.offsets[num_closed + pack] - closed;
        num_waiting = num_samples - closed;
    }
    for (int64_t pack = 0, write = packs->offsets[packs->num_packs]; pack < num_open; pack++)
        packs->offsets[++packs->num_packs] = write + evened->carried[pack + 1];
    return num_open;
}
