/* Declarations of the core's files.

   Functions with the name of an entry point and the prefix py_ read the arguments, check their ranges, and release the
   interpreter's lock for the loops. Other functions trust their arguments. */

#ifndef LMMS_STREAM_CORE_H
#define LMMS_STREAM_CORE_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MOST_VIEWS 16
#define MOST_BLOCKS 64

#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

/* A loop over whole numbers with a second version, of equal results, for CPUs with AVX2; the loader chooses it. */
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__clang__)
#define WIDE __attribute__((target_clones("avx2", "default")))
#elif defined(__x86_64__) && defined(__gnu_linux__)
#define WIDE __attribute__((target_clones("avx2", "default"), optimize("O3")))
#else
#define WIDE
#endif

/* A contiguous array of an argument. count: number of all values. */
typedef struct {
    void *data;
    int64_t count;
} Array;

/* Buffers and memory of a call, freed by end_call. is_short: memory was not to be had. */
typedef struct {
    const char *name;
    Py_buffer views[MOST_VIEWS];
    void *blocks[MOST_BLOCKS];
    int num_views, num_blocks;
    bool is_short;
} Call;

bool begin_call(Call *call, const char *name, PyObject *const *args, Py_ssize_t num_args, const char *codes, ...);
PyObject *end_call(Call *call, PyObject *result);
bool check(const Call *call, bool is_right, const char *rule);
bool in_range(const int64_t *values, int64_t count, int64_t least, int64_t stop);
bool ascends(const int64_t *values, int64_t count, int64_t first, int64_t most);
void *zeros(Call *call, int64_t count, size_t size);
#define NEW(call, count, type) ((type *)zeros(call, count, sizeof(type)))

/* Return splitmix64's finalizer: a bijection of 64-bit words without visible pattern (Steele et al., 2014). */
static inline uint64_t mix(uint64_t value) {
    value = (value ^ (value >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    value = (value ^ (value >> 27)) * UINT64_C(0x94D049BB133111EB);
    return value ^ (value >> 31);
}

/* Return the key of a pack's turn. first: position of its first sample in the sequence. */
static inline uint64_t pack_key(uint64_t seed, int64_t first) {
    return mix(seed + (uint64_t)first * UINT64_C(0x9E3779B97F4A7C15));
}

/* Settings of packing. limit: tokens of a pack. window: samples placed together. share: see best_fit.c. */
typedef struct {
    int64_t limit, max_samples, window;
    double share;
    uint64_t seed;
} Rules;

/* Packs of a sequence, written: positions, pack after pack, and num_packs + 1 offsets. */
typedef struct {
    int32_t *order;
    int64_t *offsets;
    int64_t num_packs;
} Packs;

/* Open packs, and scratch for a window.

   Bins with r tokens of room form a linked list, from by_room[r] - 1 (0: none) through next_bin. A two-level bitmap
   over r finds the least sufficient r in a few instructions: bit w of the summary is set if word w has a bit. The
   samples of a bin form a linked list through following, last sample first. The slot of a sample in following is
   position & (slots - 1): slots are used again. */
typedef struct {
    uint64_t *words, *summary;
    int64_t summary_words, slots, num_open;
    int32_t *by_room, *next_bin, *following, *head, *size, *room;
    int32_t *opened; /* open bins; bins from the last window come first */
    int32_t *unused; /* a stack */
    int64_t *first;  /* position of a bin's first sample in the sequence */
    int32_t *turns, *counts, *closing, *buckets, *sorted;
    uint64_t *keys, *sorted_keys;
} Bins;

Bins new_bins(Call *call, int64_t num_positions, int64_t window, int64_t limit);
void order_window(Bins *bins, const int32_t *lengths, int64_t start, int64_t stop, double share, bool takes_part);
void fill_window(Bins *bins, const int32_t *lengths, int64_t count, int64_t shift, int64_t limit, int64_t max_samples);
void empty_list(Bins *bins, int64_t room);
const int32_t *sort_by_hash(Bins *bins, int64_t count);
void emit(const Bins *bins, const int32_t *emitted, int64_t count, Packs *packs);
int64_t best_fit_in(
    Bins *bins, const int32_t *lengths, int64_t count, const int64_t *carried, const int64_t *firsts, int64_t num_open,
    int64_t position, bool last, const Rules *rules, Packs *packs, int64_t *still
);
void reset_bins(Bins *bins);

/* Packs while samples are exchanged. The samples of a pack form a linked list, longest first. ranks, merged: packs sorted
   by work. Others: a window of best_fit. */
typedef struct {
    int64_t *head, *following, *size, *room, *work, *ranks, *merged, *offsets, *carried;
    int32_t *lengths, *before, *of_window, *order;
} Evened;

Evened new_evened(Call *call, int64_t count);
int64_t even_fit_in(
    Evened *evened, Bins *bins, const int32_t *lengths, int64_t count, const int64_t *carried, int64_t num_open,
    int64_t position, bool last, const Rules *rules, Packs *packs, int64_t *still
);

/* Samples to pack by window_fit: positions, and their lengths. The first num_waiting are of the window before. */
typedef struct {
    int32_t *positions, *lengths;
    int64_t count, num_waiting;
    uint8_t *closes; /* written, whether each pack is done */
} Pool;

Pool new_pool(Call *call, int64_t count);
int64_t window_fit_in(
    Bins *bins, Pool *pool, const int32_t *lengths, int64_t count, const int64_t *firsts, int64_t num_waiting,
    int64_t position, bool last, const Rules *rules, Packs *packs, int64_t *still
);
void next_fit(const int32_t *lengths, int64_t count, const Rules *rules, Packs *packs);

/* A tree of the rooms of packs, for first_fit: node n has children 2n and 2n + 1. */
typedef struct {
    int32_t *rooms, *pack_of;
} Tree;

Tree new_tree(Call *call, int64_t count);
void first_fit(Tree *tree, const int32_t *lengths, int64_t count, const Rules *rules, Packs *packs);
bool lengths_fit(const int32_t *lengths, int64_t count, int64_t limit);
bool rules_fit(const Call *call, const Rules *rules);
Rules limited_window(const Rules *rules, int64_t count);

#endif
