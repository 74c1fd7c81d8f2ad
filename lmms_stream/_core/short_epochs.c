/* Many short epochs at once: order, packing and interleaving, as for one long epoch. */

#include "core.h"

/* NumPy's random streams: default_rng(words) and its shuffle, number for number.

   An epoch of a few samples needs its own generator, and NumPy takes longer to make one than to pack the samples. The
   seed is mixed as in SeedSequence (O'Neill, "Developing a seed_seq Alternative", 2015), numbers come from PCG64
   (O'Neill, 2014); a number that is too large is drawn again. */

#define NUM_POOL 4
#define MOST_WORDS 6 /* of a key */

typedef unsigned __int128 Wide;

typedef struct {
    Wide state, increment;
    uint32_t half; /* of the last number */
    bool has_half;
} Stream;

static uint32_t hash_word(uint32_t value, uint32_t *constant, uint32_t factor) {
    value ^= *constant;
    *constant *= factor;
    value *= *constant;
    return value ^ value >> 16;
}

static void mix_into(uint32_t *word, uint32_t hashed) {
    uint32_t mixed = UINT32_C(0xCA01F9DD) * *word - UINT32_C(0x4973F715) * hashed;
    *word = mixed ^ mixed >> 16;
}

/* Write SeedSequence(words).generate_state(num_seeds, uint64). */
static void seeds_of(const uint32_t *words, int64_t num_words, uint64_t *seeds, int64_t num_seeds) {
    uint32_t pool[NUM_POOL], constant = UINT32_C(0x43B0D7E5), factor = UINT32_C(0x931E8875);
    for (int64_t at = 0; at < NUM_POOL; at++) pool[at] = hash_word(at < num_words ? words[at] : 0, &constant, factor);
    for (int source = 0; source < NUM_POOL; source++)
        for (int target = 0; target < NUM_POOL; target++)
            if (source != target) mix_into(&pool[target], hash_word(pool[source], &constant, factor));
    for (int64_t at = NUM_POOL; at < num_words; at++)
        for (int target = 0; target < NUM_POOL; target++)
            mix_into(&pool[target], hash_word(words[at], &constant, factor));
    constant = UINT32_C(0x8B51F9DD);
    for (int64_t at = 0; at < num_seeds; at++) {
        uint64_t low = hash_word(pool[2 * at % NUM_POOL], &constant, UINT32_C(0x58F38DED));
        seeds[at] = low | (uint64_t)hash_word(pool[(2 * at + 1) % NUM_POOL], &constant, UINT32_C(0x58F38DED)) << 32;
    }
}

static void advance(Stream *stream) {
    Wide factor = (Wide)UINT64_C(0x2360ED051FC65DA4) << 64 | UINT64_C(0x4385DF649FCCF645);
    stream->state = stream->state * factor + stream->increment;
}

static Stream begin_stream(const uint32_t *words, int64_t num_words) {
    uint64_t seeds[4];
    seeds_of(words, num_words, seeds, 4);
    Stream stream = {0, ((Wide)seeds[2] << 64 | seeds[3]) << 1 | 1, 0, false};
    advance(&stream);
    stream.state += (Wide)seeds[0] << 64 | seeds[1];
    advance(&stream);
    return stream;
}

static uint32_t next_number(Stream *stream) {
    stream->has_half = !stream->has_half;
    if (!stream->has_half) return stream->half;
    advance(stream);
    uint64_t high = (uint64_t)(stream->state >> 64), value = high ^ (uint64_t)stream->state;
    int turn = (int)(high >> 58);
    value = value >> turn | value << (-turn & 63);
    stream->half = (uint32_t)(value >> 32);
    return (uint32_t)value;
}

/* Shuffle at most 2**32 values in the same way as the generator's shuffle, from the last value to the first. */
static void shuffle(const uint32_t *words, int64_t num_words, int64_t *values, int64_t count) {
    Stream stream = begin_stream(words, num_words);
    uint32_t mask = UINT32_MAX;
    for (int64_t last = count - 1; last > 0; last--) {
        while (mask >> 1 >= last) mask >>= 1;
        int64_t chosen = next_number(&stream) & mask;
        while (chosen > last) chosen = next_number(&stream) & mask;
        int64_t value = values[last];
        values[last] = values[chosen];
        values[chosen] = value;
    }
}

/* shuffle(words uint32[1 or more], values int64[n], shuffled) -> SeedSequence(words).generate_state(1, uint64)[0] */
PyObject *py_shuffle(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    Call call;
    Array words, values;
    uint64_t seed;
    if (!begin_call(&call, "shuffle", args, num_args, "wL", &words, &values) ||
        !check(&call, words.count >= 1 && values.count <= UINT32_MAX, "a key has words, and values are at most 2**32"))
        return end_call(&call, NULL);
    Py_BEGIN_ALLOW_THREADS;
    seeds_of(words.data, words.count, &seed, 1);
    shuffle(words.data, words.count, values.data, values.count);
    Py_END_ALLOW_THREADS;
    return end_call(&call, Py_BuildValue("K", seed));
}

enum { BEST_FIT, EVEN_FIT, WINDOW_N, FIRST_FIT, NEXT_FIT };
enum { PACKED = 1, PACKS, BLOCKS }; /* the last words of the streams' keys (see packing.block_seed and order.Turns) */

/* Segments of samples, or of packs. */
typedef struct {
    int32_t *sample_ids, *starts, *lengths;
} Segments;

/* A source; see kernels/short_epochs.py. */
typedef struct {
    int64_t seed, shuffles, reshuffles, num_nodes, block_size, strategy, keeps, num_samples, num_shards;
    const int64_t *sizes, *first_ids;
    const int32_t *lengths, *num_pieces;
    Rules rules;
} Source;

/* Scratch. ids: samples of an epoch. cut: segments of a block. packs, still: of a block. packed, ends, turns: packs of an
   epoch, node after node: segments, the end of each pack, and the turn of its block. numbers, blocks: permutations. */
typedef struct {
    Bins bins;
    Pool pool;
    Evened evened;
    Tree tree;
    Segments cut, packed;
    Packs packs;
    int64_t *ids, *ends, *still, *numbers, *blocks, *node_firsts, num_packs;
    int32_t *turns;
} Scratch;

/* Write the numbers below `count`, in the order of a block's stream if they are shuffled. */
static void permute(int64_t *numbers, int64_t count, bool shuffles, const uint32_t *words, int64_t num_words) {
    for (int64_t at = 0; at < count; at++) numbers[at] = at;
    if (shuffles && count > 1) shuffle(words, num_words, numbers, count);
}

/* Write the key of a block's stream, as in SeedSequence: an epoch from 2**32 on takes two words. Return its length. */
static int64_t key_of(uint32_t *words, const Source *source, int64_t epoch, int64_t node, int64_t block, uint32_t last) {
    int64_t at = 0;
    words[at++] = (uint32_t)source->seed;
    words[at++] = (uint32_t)epoch;
    if (epoch >> 32) words[at++] = (uint32_t)(epoch >> 32);
    words[at++] = (uint32_t)(node + 1);
    words[at++] = (uint32_t)block;
    words[at++] = last;
    return at;
}

/* Write the ids of an epoch's samples, shard after shard. */
static void lay_out(const Source *source, int64_t epoch, int64_t *shards, int64_t *ids) {
    uint32_t words[MOST_WORDS];
    int64_t length = key_of(words, source, epoch, 0, 0, 0);
    permute(shards, source->num_shards, source->shuffles, words, length - 3);
    for (int64_t turn = 0; turn < source->num_shards; turn++)
        for (int64_t index = 0; index < source->sizes[shards[turn]]; index++)
            *ids++ = source->first_ids[shards[turn]] + index;
}

/* Write the segments of samples; return their number. */
static int64_t cut_samples(const Source *source, const int64_t *ids, int64_t count, Segments *cut) {
    int64_t write = 0, limit = source->rules.limit;
    for (int64_t at = 0; at < count; at++)
        for (int64_t piece = 0; piece < source->num_pieces[ids[at]]; piece++) {
            cut->sample_ids[write] = (int32_t)ids[at];
            cut->starts[write] = (int32_t)(piece * limit);
            cut->lengths[write++] = (int32_t)MIN(source->lengths[ids[at]] - piece * limit, limit);
        }
    return write;
}

static void pack_block(const Source *source, Scratch *scratch, int64_t count, uint64_t seed) {
    static const int64_t no_samples = 0;
    Rules rules = limited_window(&source->rules, count);
    rules.seed = seed;
    const int32_t *lengths = scratch->cut.lengths;
    Packs *packs = &scratch->packs;
    if (source->strategy == BEST_FIT)
        best_fit_in(&scratch->bins, lengths, count, &no_samples, NULL, 0, 0, true, &rules, packs, scratch->still);
    else if (source->strategy == EVEN_FIT)
        even_fit_in(
            &scratch->evened, &scratch->bins, lengths, count, &no_samples, 0, 0, true, &rules, packs, scratch->still
        );
    else if (source->strategy == WINDOW_N)
        window_fit_in(
            &scratch->bins, &scratch->pool, lengths, count, NULL, 0, 0, true, &rules, packs, scratch->still
        );
    else if (source->strategy == FIRST_FIT)
        first_fit(&scratch->tree, lengths, count, &rules, packs);
    else
        next_fit(lengths, count, &rules, packs);
}

/* Append the packs of a canonical node to the packs of the nodes before. */
static void pack_node(const Source *source, Scratch *scratch, int64_t epoch, int64_t node) {
    int64_t packed_epoch = source->reshuffles ? epoch : 0;
    bool turns_again = source->shuffles && epoch != packed_epoch; /* packs made once are in a new order in each epoch */
    int64_t begin = source->num_samples * node / source->num_nodes;
    int64_t end = source->num_samples * (node + 1) / source->num_nodes;
    int64_t num_blocks = (end - begin + source->block_size - 1) / source->block_size;
    int64_t write = scratch->num_packs ? scratch->ends[scratch->num_packs - 1] : 0;
    uint32_t words[MOST_WORDS];
    permute(scratch->blocks, num_blocks, turns_again, words, key_of(words, source, epoch, node, 0, BLOCKS));
    for (int64_t turn = 0; turn < num_blocks; turn++) {
        int64_t block = scratch->blocks[turn], start = begin + block * source->block_size;
        int64_t *ids = scratch->ids + start, count = MIN(end - start, source->block_size);
        int64_t length = key_of(words, source, packed_epoch, node, block, PACKED);
        uint64_t seed;
        seeds_of(words, length, &seed, 1);
        if (source->shuffles) shuffle(words, length - 1, ids, count);
        pack_block(source, scratch, cut_samples(source, ids, count, &scratch->cut), seed);
        const Packs *packs = &scratch->packs;
        length = key_of(words, source, epoch, node, block, PACKS);
        permute(scratch->numbers, packs->num_packs, turns_again, words, length);
        for (int64_t number = 0; number < packs->num_packs; number++) {
            int64_t pack = scratch->numbers[number];
            for (int64_t segment = packs->offsets[pack]; segment < packs->offsets[pack + 1]; segment++, write++) {
                int32_t at = packs->order[segment], sample = scratch->cut.sample_ids[at];
                scratch->packed.sample_ids[write] = sample;
                scratch->packed.starts[write] = scratch->cut.starts[at];
                scratch->packed.lengths[write] = source->keeps ? source->lengths[sample] : scratch->cut.lengths[at];
            }
            scratch->ends[scratch->num_packs] = write;
            scratch->turns[scratch->num_packs++] = (int32_t)turn;
        }
    }
}

/* Packs of consecutive epochs, written; see EpochPacks in kernels/short_epochs.py. */
typedef struct {
    Segments segments;
    int64_t *offsets, num_packs;
    int32_t *nodes, *turns;
} EpochPacks;

/* Append the packs of an epoch. A round takes a pack of each node with packs left. */
static void interleave(const Scratch *scratch, int64_t num_nodes, EpochPacks *found) {
    int64_t write = found->offsets[found->num_packs], most = 0;
    const int64_t *firsts = scratch->node_firsts;
    for (int64_t node = 0; node < num_nodes; node++) most = MAX(most, firsts[node + 1] - firsts[node]);
    for (int64_t turn = 0; turn < most; turn++)
        for (int64_t node = 0; node < num_nodes; node++) {
            int64_t pack = firsts[node] + turn;
            if (pack >= firsts[node + 1]) continue;
            for (int64_t at = pack ? scratch->ends[pack - 1] : 0; at < scratch->ends[pack]; at++, write++) {
                found->segments.sample_ids[write] = scratch->packed.sample_ids[at];
                found->segments.starts[write] = scratch->packed.starts[at];
                found->segments.lengths[write] = scratch->packed.lengths[at];
            }
            found->nodes[found->num_packs] = (int32_t)node;
            found->turns[found->num_packs++] = scratch->turns[pack];
            found->offsets[found->num_packs] = write;
        }
}

static Segments new_segments(Call *call, int64_t count) {
    return (Segments){NEW(call, count, int32_t), NEW(call, count, int32_t), NEW(call, count, int32_t)};
}

static Scratch new_scratch(Call *call, const Source *source, int64_t num_segments) {
    int64_t window = MAX(1, MIN(source->rules.window, num_segments));
    Scratch scratch = {
        .cut = new_segments(call, num_segments),
        .packed = new_segments(call, num_segments),
        .packs = {NEW(call, num_segments, int32_t), NEW(call, num_segments + 1, int64_t), 0},
        .ids = NEW(call, source->num_samples, int64_t),
        .ends = NEW(call, num_segments, int64_t),
        .still = NEW(call, num_segments, int64_t),
        .numbers = NEW(call, MAX(num_segments, source->num_shards), int64_t),
        .blocks = NEW(call, source->num_samples, int64_t),
        .node_firsts = NEW(call, source->num_nodes + 1, int64_t),
        .turns = NEW(call, num_segments, int32_t),
    };
    if (source->strategy <= WINDOW_N) scratch.bins = new_bins(call, 2 * window, 2 * window, source->rules.limit);
    if (source->strategy == EVEN_FIT) scratch.evened = new_evened(call, 2 * window);
    if (source->strategy == WINDOW_N) scratch.pool = new_pool(call, 2 * window);
    if (source->strategy == FIRST_FIT) scratch.tree = new_tree(call, num_segments);
    return scratch;
}

/* Return whether the shards hold the samples, and samples of valid lengths are cut into pieces within them. */
static bool source_fits(const Source *source) {
    int64_t total = 0;
    for (int64_t shard = 0; shard < source->num_shards; shard++) {
        if (source->sizes[shard] < 0 || source->sizes[shard] > source->num_samples || source->first_ids[shard] != total)
            return false;
        total += source->sizes[shard];
    }
    for (int64_t at = 0; at < source->num_samples; at++) {
        int64_t pieces = source->num_pieces[at], length = source->lengths[at];
        if (length < 1 || pieces < 0 || (pieces && (pieces - 1) * source->rules.limit >= length)) return false;
    }
    return total == source->num_samples;
}

/* pack_epochs(seed, shuffles, reshuffles, num_nodes, block_size, sizes, first_ids int64[shards], lengths, num_pieces
               int32[samples], strategy, limit, max_samples, window, share, keeps, first, count; sample_ids, starts, lengths
               int32[n], offsets int64[n + 1], nodes, turns int32[n], first_packs int64[count + 1]) -> number of packs

   Write the packs of the epochs [first, first + count), in the order of their numbers. n: all segments of all epochs. */
PyObject *py_pack_epochs(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    Call call;
    Source source;
    Rules *rules = &source.rules;
    Array sizes, first_ids, lengths, pieces, ids, starts, tokens, offsets, nodes, turns, firsts;
    int64_t first, count, num_segments = 0;
    if (!begin_call(
            &call, "pack_epochs", args, num_args, "nnnnnlliinnnnxnnnIIILIIL", &source.seed, &source.shuffles,
            &source.reshuffles, &source.num_nodes, &source.block_size, &sizes, &first_ids, &lengths, &pieces,
            &source.strategy, &rules->limit, &rules->max_samples, &rules->window, &rules->share, &source.keeps, &first,
            &count, &ids, &starts, &tokens, &offsets, &nodes, &turns, &firsts
        ) ||
        !rules_fit(&call, rules))
        return end_call(&call, NULL);
    source.sizes = sizes.data;
    source.first_ids = first_ids.data;
    source.lengths = lengths.data;
    source.num_pieces = pieces.data;
    source.num_samples = lengths.count;
    source.num_shards = sizes.count;
    bool fits = first_ids.count == sizes.count && pieces.count == lengths.count && lengths.count < INT32_MAX &&
                in_range(&source.seed, 1, 0, INT64_C(1) << 32) && in_range(&source.num_nodes, 1, 1, INT32_MAX) &&
                source.block_size >= 1 && in_range(&source.strategy, 1, BEST_FIT, NEXT_FIT + 1) && source_fits(&source) &&
                first >= 0 && in_range(&count, 1, 0, INT32_MAX) && first <= INT64_MAX - count;
    for (int64_t at = 0; fits && at < source.num_samples; at++) num_segments += source.num_pieces[at];
    int64_t most = ids.count;
    if (!check(&call, fits && num_segments < INT32_MAX, "the shards hold the samples, and settings are in range") ||
        !check(
            &call,
            most == count * num_segments && starts.count == most && tokens.count == most && offsets.count == most + 1 &&
                nodes.count == most && turns.count == most && firsts.count == count + 1,
            "arrays to write have a size for all segments of all epochs"
        ))
        return end_call(&call, NULL);
    EpochPacks found = {{ids.data, starts.data, tokens.data}, offsets.data, 0, nodes.data, turns.data};
    int64_t *first_packs = firsts.data;
    Py_BEGIN_ALLOW_THREADS;
    Scratch scratch = new_scratch(&call, &source, num_segments);
    found.offsets[0] = first_packs[0] = 0;
    for (int64_t epoch = first; !call.is_short && epoch < first + count; epoch++) {
        lay_out(&source, source.reshuffles ? epoch : 0, scratch.numbers, scratch.ids);
        scratch.num_packs = 0;
        for (int64_t node = 0; node < source.num_nodes; node++) {
            pack_node(&source, &scratch, epoch, node);
            scratch.node_firsts[node + 1] = scratch.num_packs;
        }
        interleave(&scratch, source.num_nodes, &found);
        first_packs[epoch - first + 1] = found.num_packs;
    }
    Py_END_ALLOW_THREADS;
    return end_call(&call, Py_BuildValue("L", found.num_packs));
}
