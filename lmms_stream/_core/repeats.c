/* Sketches of samples, and neighbours with equal sketches. */

#include "core.h"

WIDE static void keep_least(
    uint32_t *restrict least, const uint32_t *factors, const uint32_t *shifts, int64_t count, uint32_t hashed
) {
    for (int64_t number = 0; number < count; number++) {
        uint32_t value = factors[number] * hashed + shifts[number];
        least[number] = MIN(least[number], value);
    }
}

/* sketch(codes uint32[codes], stops int64[samples], sizes int64[samples], salts uint64[samples], factors uint32[hashes],
          shifts uint32[hashes]; sketches uint16[samples, hashes])

   Write sketches of the samples at codes[stops[i - 1] : stops[i]]. A sample shorter than a piece is one piece; the sketch
   of a sample without codes stays. sizes: of a piece. */
PyObject *py_sketch(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    Call call;
    Array codes, stops, sizes, salts, factor_array, shift_array, sketches;
    if (!begin_call(
            &call, "sketch", args, num_args, "wlluwwH", &codes, &stops, &sizes, &salts, &factor_array, &shift_array,
            &sketches
        ))
        return end_call(&call, NULL);
    int64_t num_samples = stops.count, num_hashes = factor_array.count;
    if (!check(
            &call,
            sizes.count == num_samples && salts.count == num_samples && shift_array.count == num_hashes &&
                sketches.count == num_samples * num_hashes && ascends(stops.data, num_samples, 0, codes.count) &&
                in_range(sizes.data, num_samples, 1, INT32_MAX),
            "arrays of samples have equal sizes, stops ascend to the codes, and a piece has a code"
        ))
        return end_call(&call, NULL);
    const uint32_t *factors = factor_array.data, *shifts = shift_array.data;
    Py_BEGIN_ALLOW_THREADS;
    uint32_t *restrict least = NEW(&call, num_hashes, uint32_t);
    int64_t start = 0;
    for (int64_t sample = 0; !call.is_short && sample < num_samples; sample++) {
        int64_t stop = ((int64_t *)stops.data)[sample], size = ((int64_t *)sizes.data)[sample];
        int64_t end = MAX(stop - size + 1, MIN(start + 1, stop));
        memset(least, 0xFF, (size_t)num_hashes * sizeof(uint32_t));
        for (int64_t first = start; first < end; first++) {
            uint64_t piece = UINT64_C(0xCBF29CE484222325) ^ ((uint64_t *)salts.data)[sample];
            for (int64_t at = first; at < MIN(first + size, stop); at++)
                piece = (piece ^ ((uint32_t *)codes.data)[at]) * UINT64_C(0x100000001B3);
            piece = (piece ^ (piece >> 32)) * UINT64_C(0xD6E8FEB86659FD93);
            keep_least(least, factors, shifts, num_hashes, (uint32_t)(piece >> 32));
        }
        for (int64_t number = 0; stop > start && number < num_hashes; number++)
            ((uint16_t *)sketches.data)[sample * num_hashes + number] = (uint16_t)(least[number] ^ least[number] >> 16);
        start = stop;
    }
    Py_END_ALLOW_THREADS;
    return end_call(&call, Py_BuildValue(""));
}

WIDE static int64_t count_equal(const uint16_t *one, const uint16_t *other, int64_t count) {
    int64_t num_equal = 0;
    for (int64_t number = 0; number < count; number++) num_equal += one[number] == other[number];
    return num_equal;
}

/* compare(sketches uint16[samples, values], values, indices int64[n], keys uint64[n], least; earlier int64[samples])

   Compare neighbours of equal keys, and write the earliest similar sketch of each. keys: ascending, of the sketches with
   these indices. least: number of equal values of similar sketches. */
PyObject *py_compare(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    Call call;
    Array sketch_array, index_array, key_array, earlier_array;
    int64_t num_values, least;
    if (!begin_call(
            &call, "compare", args, num_args, "hnlunL", &sketch_array, &num_values, &index_array, &key_array, &least,
            &earlier_array
        ) ||
        !check(
            &call,
            num_values >= 0 && sketch_array.count == num_values * earlier_array.count &&
                key_array.count == index_array.count &&
                in_range(index_array.data, index_array.count, 0, earlier_array.count),
            "sketches have `values` values, and indices and keys are of sketches"
        ))
        return end_call(&call, NULL);
    const uint16_t *sketches = sketch_array.data;
    const int64_t *indices = index_array.data;
    const uint64_t *keys = key_array.data;
    int64_t *earlier = earlier_array.data, first = 0;
    Py_BEGIN_ALLOW_THREADS;
    for (int64_t at = 1; at < index_array.count; at++) {
        if (keys[at] != keys[first]) {
            first = at;
            continue;
        }
        int64_t index = indices[at], others[2] = {indices[first], indices[at - 1]};
        for (int number = 0; number < 2; number++) {
            int64_t other = others[number];
            if (0 <= earlier[index] && earlier[index] <= other) continue;
            if (count_equal(sketches + index * num_values, sketches + other * num_values, num_values) >= least)
                earlier[index] = other;
        }
    }
    Py_END_ALLOW_THREADS;
    return end_call(&call, Py_BuildValue(""));
}
