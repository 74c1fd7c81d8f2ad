/* Pixels -> patches, and pixels of another size. */

#include "core.h"
#include <math.h>

/* to_patches(frames uint8[frames, height, width, 3], num_frames, height, width, patch_size, merge_size,
              temporal_patch_size, levels float32[3, 256]; patches float32[…])

   Normalise pixels and copy them to patches; see patches.py. levels: value of each byte of a channel. */
PyObject *py_to_patches(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    Call call;
    Array frames, levels, patches;
    int64_t num_frames, height, width, size, merge, times;
    if (!begin_call(
            &call, "to_patches", args, num_args, "bnnnnnnfF", &frames, &num_frames, &height, &width, &size, &merge, &times,
            &levels, &patches
        ))
        return end_call(&call, NULL);
    bool fits = num_frames >= 1 && height >= 1 && width >= 1 && size >= 1 && merge >= 1 && times >= 1;
    fits = fits && MAX(MAX(num_frames, height), MAX(width, times)) < 1 << 20 && size <= height && merge <= height;
    fits = fits && height % (size * merge) == 0 && width % (size * merge) == 0 && levels.count == 3 * 256;
    if (!check(
            &call,
            fits && frames.count == num_frames * height * width * 3 &&
                patches.count == (num_frames + times - 1) / times * times * height * width * 3,
            "frames are cut into whole patches, and `patches` has their size"
        ))
        return end_call(&call, NULL);
    Py_BEGIN_ALLOW_THREADS;
    int64_t area = size * size, num_rows = height / size, num_columns = width / size;
    for (int64_t frame = 0; frame < num_frames; frame++)
        for (int64_t row = 0; row < num_rows; row++)
            for (int64_t column = 0; column < num_columns; column++) {
                int64_t group = (frame / times * (num_rows / merge) + row / merge) * (num_columns / merge) + column / merge;
                int64_t number = (group * merge + row % merge) * merge + column % merge;
                float *patch = (float *)patches.data + (number * 3 * times + frame % times) * area;
                float *restrict red = patch, *restrict green = patch + times * area;
                float *restrict blue = patch + 2 * times * area;
                const float *restrict of_byte = levels.data;
                const uint8_t *pixel = (uint8_t *)frames.data + ((frame * height + row * size) * width + column * size) * 3;
                for (int64_t y = 0; y < size; y++, pixel += (width - size) * 3)
                    for (int64_t x = 0; x < size; x++, pixel += 3) {
                        *red++ = of_byte[pixel[0]];
                        *green++ = of_byte[256 + pixel[1]];
                        *blue++ = of_byte[512 + pixel[2]];
                    }
                for (int64_t again = 1; frame == num_frames - 1 && again < times - frame % times; again++)
                    for (int channel = 0; channel < 3; channel++) {
                        float *pixels = patch + channel * times * area;
                        memcpy(pixels + again * area, pixels, (size_t)area * sizeof(float));
                    }
            }
    Py_END_ALLOW_THREADS;
    return end_call(&call, Py_BuildValue(""));
}

#define PRECISION_BITS 22 /* of a weight */
#define PI 3.141592653589793
#define CUBIC (-0.5) /* the parameter a of Keys (1981), "Cubic convolution interpolation for digital image processing" */
#define SPAN 1024 /* bytes of a row that are added up together: their sums stay in the fastest cache */
#define TERMS 5   /* rows that are added together: the filter's reach if an image hardly changes its size */

enum { BILINEAR, BICUBIC, LANCZOS };
static const double REACHES[] = {1.0, 2.0, 3.0}; /* in pixels on each side, times the scale if an image is made smaller */

static double sinc(double x) { return x != 0.0 ? sin(x * PI) / (x * PI) : 1.0; }

static double weight_at(double distance, int64_t filter) {
    double x = fabs(distance);
    if (filter == BILINEAR) return MAX(1.0 - x, 0.0);
    if (filter == LANCZOS) return x < 3.0 ? sinc(x) * sinc(x / 3.0) : 0.0;
    if (x < 1.0) return ((CUBIC + 2.0) * x - (CUBIC + 3.0)) * x * x + 1;
    return x < 2.0 ? (((x - 5) * x + 8) * x - 4) * CUBIC : 0.0;
}

/* Weights of old pixels in each new pixel, whole numbers of 2^-22: `most` each. */
typedef struct {
    int32_t *weights;
    int64_t *first, *number, most;
} Filter;

/* Return the filter of a side. The steps and roundings equal Pillow's (src/libImaging/Resample.c). */
static Filter new_filter(Call *call, int64_t size, int64_t new_size, int64_t kind) {
    double scale = (double)size / (double)new_size, stretch = MAX(scale, 1.0), support = REACHES[kind] * stretch;
    int64_t most = (int64_t)ceil(support) * 2 + 1;
    Filter made = {
        NEW(call, new_size * most, int32_t), NEW(call, new_size, int64_t), NEW(call, new_size, int64_t), most
    };
    double *exact = NEW(call, most, double);
    for (int64_t pixel = 0; !call->is_short && pixel < new_size; pixel++) {
        double center = ((double)pixel + 0.5) * scale, total = 0;
        int64_t start = MAX((int64_t)(center - support + 0.5), 0), stop = MIN((int64_t)(center + support + 0.5), size);
        for (int64_t old = start; old < stop; old++) {
            exact[old - start] = weight_at(((double)old - center + 0.5) * (1.0 / stretch), kind);
            total += exact[old - start];
        }
        for (int64_t old = 0; old < stop - start; old++) {
            double weight = (total != 0.0 ? exact[old] / total : exact[old]) * (1 << PRECISION_BITS);
            made.weights[pixel * most + old] = (int32_t)(weight < 0 ? weight - 0.5 : weight + 0.5);
        }
        made.first[pixel] = start;
        made.number[pixel] = stop - start;
    }
    return made;
}

/* Write the weighted sum of rows of bytes, `stride` bytes apart. Rows are added by fives: zero weights follow the last
   weight, and repeat the last row. */
WIDE static void add_rows(
    const uint8_t *source, int64_t stride, int64_t number, const int32_t *weights, int64_t width, uint8_t *restrict out
) {
    int32_t sums[SPAN];
    for (int64_t at = 0; at < width; at += SPAN) {
        int64_t count = MIN(SPAN, width - at);
        for (int64_t term = 0; term < number; term += TERMS) {
            const uint8_t *rows[TERMS];
            int32_t of[TERMS];
            for (int row = 0; row < TERMS; row++) {
                rows[row] = source + MIN(term + row, number - 1) * stride + at;
                of[row] = term + row < number ? weights[term + row] : 0;
            }
            for (int64_t n = 0; n < count; n++) {
                int32_t sum = term ? sums[n] : 1 << (PRECISION_BITS - 1);
                for (int row = 0; row < TERMS; row++) sum += rows[row][n] * of[row];
                sums[n] = sum;
            }
        }
        for (int64_t n = 0; n < count; n++) {
            int32_t level = sums[n] >> PRECISION_BITS;
            level = level < 0 ? 0 : level;
            out[at + n] = (uint8_t)(level > 255 ? 255 : level);
        }
    }
}

/* resize_height(frames uint8[frames, height, row_bytes], num_frames, height, row_bytes, new_height, filter;
                 out uint8[frames, new_height, row_bytes]) */
PyObject *py_resize_height(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    Call call;
    Array frames, out;
    int64_t num_frames, height, row_bytes, new_height, kind;
    if (!begin_call(
            &call, "resize_height", args, num_args, "bnnnnnB", &frames, &num_frames, &height, &row_bytes, &new_height, &kind,
            &out
        ))
        return end_call(&call, NULL);
    bool fits = num_frames >= 0 && height >= 1 && row_bytes >= 0 && new_height >= 1 && kind >= BILINEAR && kind <= LANCZOS;
    fits = fits && MAX(MAX(num_frames, height), MAX(row_bytes, new_height)) <= 1 << 20;
    if (!check(
            &call,
            fits && frames.count == num_frames * height * row_bytes && out.count == num_frames * new_height * row_bytes,
            "frames and out have the given sizes"
        ))
        return end_call(&call, NULL);
    Py_BEGIN_ALLOW_THREADS;
    Filter filter = new_filter(&call, height, new_height, kind);
    for (int64_t frame = 0; !call.is_short && frame < num_frames; frame++)
        for (int64_t row = 0; row < new_height; row++)
            add_rows(
                (uint8_t *)frames.data + (frame * height + filter.first[row]) * row_bytes, row_bytes, filter.number[row],
                filter.weights + row * filter.most, row_bytes,
                (uint8_t *)out.data + (frame * new_height + row) * row_bytes
            );
    Py_END_ALLOW_THREADS;
    return end_call(&call, Py_BuildValue(""));
}

#define BAND 64 /* rows that are resized in width together */
#define TILE 16 /* rows and columns that are transposed together */

typedef uint8_t Lanes __attribute__((vector_size(TILE)));

#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
#define SHUFFLED(one, other, ...) __builtin_shufflevector(one, other, __VA_ARGS__)
#else
#define SHUFFLED(one, other, ...) __builtin_shuffle(one, other, (Lanes){__VA_ARGS__})
#endif

/* Transpose 16 rows of 16 bytes: four times, row n is interleaved with row n + 8. */
WIDE static void transpose_tile(const uint8_t *source, int64_t stride, uint8_t *target, int64_t target_stride) {
    Lanes rows[TILE], mixed[TILE];
    for (int row = 0; row < TILE; row++) memcpy(&rows[row], source + row * stride, TILE);
    for (int turn = 0; turn < 4; turn++) {
        for (int row = 0; row < TILE / 2; row++) {
            Lanes one = rows[row], other = rows[row + TILE / 2];
            mixed[2 * row] = SHUFFLED(one, other, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            mixed[2 * row + 1] = SHUFFLED(one, other, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
        memcpy(rows, mixed, sizeof(rows));
    }
    for (int row = 0; row < TILE; row++) memcpy(target + row * target_stride, &rows[row], TILE);
}

/* Turn rows of bytes into columns of the target. The last tiles of rows and columns may overlap those before. */
static void transpose(
    const uint8_t *source, int64_t num_rows, int64_t row_bytes, int64_t stride, uint8_t *target, int64_t target_stride
) {
    if (num_rows < TILE || row_bytes < TILE) {
        for (int64_t row = 0; row < num_rows; row++)
            for (int64_t column = 0; column < row_bytes; column++)
                target[column * target_stride + row] = source[row * stride + column];
        return;
    }
    for (int64_t begin = 0; begin < row_bytes; begin += TILE)
        for (int64_t begin_row = 0; begin_row < num_rows; begin_row += TILE) {
            int64_t column = MIN(begin, row_bytes - TILE), row = MIN(begin_row, num_rows - TILE);
            transpose_tile(source + row * stride + column, stride, target + column * target_stride + row, target_stride);
        }
}

/* resize_width(rows uint8[rows, 3 * width], num_rows, width, new_width, filter; out uint8[rows, 3 * new_width])

   A band of rows is transposed first, and the pixels of a column become contiguous. */
PyObject *py_resize_width(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    Call call;
    Array rows, out;
    int64_t num_rows, width, new_width, kind;
    if (!begin_call(&call, "resize_width", args, num_args, "bnnnnB", &rows, &num_rows, &width, &new_width, &kind, &out))
        return end_call(&call, NULL);
    bool fits = num_rows >= 0 && num_rows < INT64_C(1) << 31 && width >= 1 && new_width >= 1 && kind >= BILINEAR;
    if (!check(
            &call,
            fits && kind <= LANCZOS && MAX(width, new_width) <= 1 << 20 && rows.count == num_rows * width * 3 &&
                out.count == num_rows * new_width * 3,
            "rows and out have the given sizes"
        ))
        return end_call(&call, NULL);
    Py_BEGIN_ALLOW_THREADS;
    Filter filter = new_filter(&call, width, new_width, kind);
    int64_t band = MIN(BAND, num_rows), stride = 3 * band;
    uint8_t *columns = NEW(&call, 3 * width * band, uint8_t), *new_columns = NEW(&call, 3 * new_width * band, uint8_t);
    for (int64_t begin = 0; !call.is_short && begin < num_rows; begin += band) {
        int64_t row = MIN(begin, num_rows - band); /* the last band may have rows of the band before */
        transpose((uint8_t *)rows.data + row * 3 * width, band, 3 * width, 3 * width, columns, band);
        for (int64_t pixel = 0; pixel < new_width; pixel++)
            add_rows(
                columns + filter.first[pixel] * stride, stride, filter.number[pixel], filter.weights + pixel * filter.most,
                stride, new_columns + pixel * stride
            );
        transpose(new_columns, 3 * new_width, band, band, (uint8_t *)out.data + row * 3 * new_width, 3 * new_width);
    }
    Py_END_ALLOW_THREADS;
    return end_call(&call, Py_BuildValue(""));
}
