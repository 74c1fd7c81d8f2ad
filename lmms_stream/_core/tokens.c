/* Packs of tokenized samples, straight from their memory-mapped shards.

   Values of a file need no alignment. Files and machines are little-endian. */

#include "core.h"

enum { FITS, TORN, OTHER_LENGTH, BAD_SPAN }; /* outcomes of a pack; all but FITS come with a segment's number */
#define AHEAD 2                              /* number of segments that tokens are prefetched ahead */
#define LINE 64                              /* bytes of a cache line */

/* Tokens of a sample, and the bounds of its loss spans: int32 values in a file. */
typedef struct {
    const uint8_t *tokens, *bounds;
    int64_t num_tokens, num_bounds;
} Sample;

static inline int64_t uint32_at(const uint8_t *data) {
    uint32_t value;
    memcpy(&value, data, sizeof(value));
    return value;
}

static inline int64_t int32_at(const uint8_t *data, int64_t index) {
    int32_t value;
    memcpy(&value, data + 4 * index, sizeof(value));
    return value;
}

/* Find the int32 values of an MDS array of any shape, in `size` bytes; return their number, -1 if it is torn. */
static int64_t find_values(const uint8_t *data, int64_t size, const uint8_t **values) {
    if (size < 1) return -1;
    int64_t header = 1 + (data[0] >> 2) * (INT64_C(1) << (data[0] & 3));
    *values = data + header;
    return header <= size && (size - header) % 4 == 0 ? (size - header) / 4 : -1;
}

/* Find the tokens and bounds in a sample of `size` bytes; return false if its columns do not fill it. */
static bool find_sample(
    const uint8_t *data, int64_t size, const int64_t *column_sizes, int64_t num_columns, int64_t ids_column,
    int64_t spans_column, Sample *sample
) {
    int64_t at = 0, varying = 0;
    const uint8_t *ids = NULL, *spans = NULL;
    int64_t ids_size = 0, spans_size = 0;
    for (int64_t column = 0; column < num_columns; column++) at += column_sizes[column] < 0 ? 4 : 0;
    if (at > size) return false;
    for (int64_t column = 0; column < num_columns; column++) {
        int64_t column_size = column_sizes[column] < 0 ? uint32_at(data + 4 * varying++) : column_sizes[column];
        if (column_size > size - at) return false;
        if (column == ids_column) {
            ids = data + at;
            ids_size = column_size;
        }
        if (column == spans_column) {
            spans = data + at;
            spans_size = column_size;
        }
        at += column_size;
    }
    if (at != size) return false;
    sample->num_tokens = find_values(ids, ids_size, &sample->tokens);
    sample->num_bounds = find_values(spans, spans_size, &sample->bounds);
    return sample->num_tokens >= 0 && sample->num_bounds >= 0 && sample->num_bounds % 2 == 0;
}

static void prefetch(const Sample *sample, int64_t start, int64_t length) {
    for (int64_t byte = 0; byte < 4 * length; byte += LINE) __builtin_prefetch(sample->tokens + 4 * start + byte);
}

static inline int64_t within(int64_t value, int64_t least, int64_t most) { return MIN(MAX(value, least), most); }

WIDE static void write_tokens(
    const uint8_t *tokens, int64_t length, int64_t ignored, int64_t *restrict ids, int64_t *restrict labels,
    int64_t *restrict positions
) {
    for (int64_t n = 0; n < length; n++) {
        ids[n] = int32_at(tokens, n);
        labels[n] = ignored;
        positions[n] = n;
    }
}

/* Write a segment into three rows; return the number of tokens that are trained on, -1 - n if span n is wrong. */
static int64_t write_segment(
    const Sample *sample, int64_t start, int64_t length, int64_t ignored, int64_t *restrict ids, int64_t *restrict labels,
    int64_t *restrict positions
) {
    /* The first token of a segment is not trained on: no token before it predicts it. */
    int64_t stop = MIN(1, length), num_trained = 0, before = 0;
    write_tokens(sample->tokens + 4 * start, length, ignored, ids, labels, positions);
    for (int64_t bound = 0; bound < sample->num_bounds; bound += 2) {
        int64_t first = int32_at(sample->bounds, bound), last = int32_at(sample->bounds, bound + 1);
        if (first < before || first >= last || last > sample->num_tokens) return -1 - bound / 2;
        before = first;
        first = within(first - start, stop, length);
        stop = within(last - start, first, length);
        memcpy(labels + first, ids + first, (size_t)(stop - first) * sizeof(int64_t));
        num_trained += stop - first;
    }
    return num_trained;
}

/* fill(addresses, indices, starts, lengths, expected int64[segments], column_sizes int64[columns], ids_column,
        spans_column, ignored_label; input_ids, labels, position_ids int64[tokens], num_loss_tokens int64[segments])
   -> outcome, the segment that does not fit, a value about it

   Write the segments one after another into the three rows. Loss spans ascend; they may overlap. Segment s is the tokens
   [starts[s], starts[s] + lengths[s]) of sample indices[s] of the shard at addresses[s], with a checked table of offsets.
   The sample must have expected[s] tokens; for -1, any sufficient number. column_sizes: bytes of each column of a sample,
   -1 if they vary. num_loss_tokens: written for each segment. */
PyObject *py_fill(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    Call call;
    Array address_array, index_array, start_array, length_array, expected_array, columns, ids, labels, positions, trained;
    int64_t ids_column, spans_column, ignored, outcome = FITS, segment = 0, value = 0, write = 0;
    if (!begin_call(
            &call, "fill", args, num_args, "llllllnnnLLLL", &address_array, &index_array, &start_array, &length_array,
            &expected_array, &columns, &ids_column, &spans_column, &ignored, &ids, &labels, &positions, &trained
        ))
        return end_call(&call, NULL);
    int64_t count = index_array.count;
    if (!check(
            &call,
            address_array.count == count && start_array.count == count && length_array.count == count &&
                expected_array.count == count && trained.count == count && labels.count == ids.count &&
                positions.count == ids.count,
            "arrays of segments, and of tokens, have equal sizes"
        ) ||
        !check(
            &call,
            in_range(index_array.data, count, 0, UINT32_MAX) && in_range(start_array.data, count, 0, INT64_C(1) << 40) &&
                in_range(length_array.data, count, 0, INT64_C(1) << 40) && in_range(&ids_column, 1, 0, columns.count) &&
                in_range(&spans_column, 1, 0, columns.count),
            "indices, starts and lengths are not negative, and columns exist"
        ))
        return end_call(&call, NULL);
    const int64_t *indices = index_array.data, *starts = start_array.data, *lengths = length_array.data;
    const int64_t *addresses = address_array.data, *expected = expected_array.data;
    Py_BEGIN_ALLOW_THREADS;
    Sample *samples = NEW(&call, count, Sample);
    for (int64_t at = 0; at < count; at++) /* reads all over the shards would wait for one line after another */
        __builtin_prefetch((const uint8_t *)addresses[at] + 4 * (indices[at] + 1));
    for (int64_t at = 0; at < count; at++)
        __builtin_prefetch((const uint8_t *)addresses[at] + uint32_at((const uint8_t *)addresses[at] + 4 * (indices[at] + 1)));
    for (segment = 0; !call.is_short && segment < count && outcome == FITS; segment++) {
        const uint8_t *shard = (const uint8_t *)addresses[segment], *offsets = shard + 4 * (indices[segment] + 1);
        int64_t begin = uint32_at(offsets), size = uint32_at(offsets + 4) - begin;
        if (!find_sample(shard + begin, size, columns.data, columns.count, ids_column, spans_column, &samples[segment]))
            outcome = TORN;
    }
    if (outcome == FITS) segment = 0;
    for (; !call.is_short && segment < count && outcome == FITS; segment++) {
        int64_t start = starts[segment], length = lengths[segment], num_tokens = samples[segment].num_tokens;
        if ((expected[segment] >= 0 && expected[segment] != num_tokens) || start + length > num_tokens ||
            length > ids.count - write) {
            outcome = OTHER_LENGTH;
            value = num_tokens;
            continue;
        }
        if (segment + AHEAD < count) prefetch(&samples[segment + AHEAD], starts[segment + AHEAD], lengths[segment + AHEAD]);
        int64_t number = write_segment(
            &samples[segment], start, length, ignored, (int64_t *)ids.data + write, (int64_t *)labels.data + write,
            (int64_t *)positions.data + write
        );
        if (number < 0) {
            outcome = BAD_SPAN;
            value = -1 - number;
        }
        ((int64_t *)trained.data)[segment] = number;
        write += length;
    }
    Py_END_ALLOW_THREADS;
    return end_call(&call, Py_BuildValue("LLL", outcome, outcome == FITS ? 0 : segment - 1, value));
}
