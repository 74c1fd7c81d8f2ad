# C types of resize.py, and its innermost loops.

cdef extern from *:
    """
    #include <string.h>
    #define BLOCK 64 /* bytes that are added up together: their sums stay in registers */
    #define TILE 16 /* rows and columns that are transposed together */

    static inline unsigned char to_byte(int sum)
    {
        sum >>= 22;
        return sum < 0 ? 0 : sum > 255 ? 255 : sum;
    }

    /* Write the weighted sum of `number` rows of at most BLOCK bytes, `stride` bytes apart. */
    static void add_rows(
        const unsigned char *rows, long long stride, const int *weights, long long number,
        unsigned char *restrict out, long long width)
    {
        int sums[BLOCK];
        for (long long n = 0; n < width; n++)
            sums[n] = 1 << 21;
        for (long long row = 0; row < number; row++, rows += stride)
            for (long long n = 0; n < width; n++)
                sums[n] += rows[n] * weights[row];
        for (long long n = 0; n < width; n++)
            out[n] = to_byte(sums[n]);
    }

    #if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
    #include <immintrin.h>
    #define HAS_AVX2 __builtin_cpu_supports("avx2")
    /* The same sums of BLOCK bytes at a time. gcc 12 by itself takes three instructions to widen 8 bytes, not one. */
    __attribute__((target("avx2"))) static void add_blocks(
        const unsigned char *rows, long long stride, const int *weights, long long number,
        unsigned char *restrict out, long long width)
    {
        for (long long begin = 0; begin < width; begin += BLOCK) {
            long long at = begin + BLOCK <= width ? begin : width - BLOCK; /* the last block may overlap */
            const unsigned char *bytes = rows + at;
            __m256i sums[BLOCK / 8];
            for (int n = 0; n < BLOCK / 8; n++)
                sums[n] = _mm256_set1_epi32(1 << 21);
            for (long long row = 0; row < number; row++, bytes += stride) {
                __m256i weight = _mm256_set1_epi32(weights[row]);
                for (int n = 0; n < BLOCK / 8; n++) {
                    __m256i eight = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(bytes + 8 * n)));
                    sums[n] = _mm256_add_epi32(sums[n], _mm256_mullo_epi32(eight, weight));
                }
            }
            int whole[BLOCK];
            memcpy(whole, sums, sizeof whole);
            for (int n = 0; n < BLOCK; n++)
                out[at + n] = to_byte(whole[n]);
        }
    }
    #else
    #define HAS_AVX2 0
    #define add_blocks add_rows
    #endif

    /* Write `new_size` rows of `width` bytes: sums of bounds[2 * n + 1] rows from row bounds[2 * n] on. */
    static void weigh_rows(
        const unsigned char *rows, long long width, const int *weights, long long most, const long long *bounds,
        long long new_size, unsigned char *out)
    {
        for (long long n = 0; n < new_size; n++, bounds += 2, weights += most, out += width) {
            const unsigned char *first = rows + bounds[0] * width;
            if (HAS_AVX2 && width >= BLOCK)
                add_blocks(first, width, weights, bounds[1], out, width);
            else
                for (long long at = 0; at < width; at += BLOCK)
                    add_rows(
                        first + at, width, weights, bounds[1], out + at, width - at < BLOCK ? width - at : BLOCK);
        }
    }

    /* Alternate the bytes of the two halves of a tile. Four times, this transposes the tile. */
    static inline void interleave(const unsigned char *restrict tile, unsigned char *restrict out)
    {
        for (int n = 0; n < TILE * TILE / 2; n++) {
            out[2 * n] = tile[n];
            out[2 * n + 1] = tile[n + TILE * TILE / 2];
        }
    }

    static void transpose_tile(const unsigned char *rows, long long stride, unsigned char *columns, long long to_stride)
    {
        unsigned char tile[TILE * TILE], other[TILE * TILE];
        for (int row = 0; row < TILE; row++)
            memcpy(tile + TILE * row, rows + row * stride, TILE);
        interleave(tile, other);
        interleave(other, tile);
        interleave(tile, other);
        interleave(other, tile);
        for (int column = 0; column < TILE; column++)
            memcpy(columns + column * to_stride, tile + TILE * column, TILE);
    }

    /* Turn rows of bytes into columns. The last tile of each row and column may have bytes of the tile before. */
    static void transpose(
        const unsigned char *rows, long long num_rows, long long row_bytes, unsigned char *columns, long long to_stride)
    {
        if (num_rows < TILE || row_bytes < TILE) {
            for (long long row = 0; row < num_rows; row++)
                for (long long column = 0; column < row_bytes; column++)
                    columns[column * to_stride + row] = rows[row * row_bytes + column];
            return;
        }
        for (long long begin = 0; begin < row_bytes; begin += TILE)
            for (long long begin_row = 0; begin_row < num_rows; begin_row += TILE) {
                long long column = begin + TILE <= row_bytes ? begin : row_bytes - TILE;
                long long row = begin_row + TILE <= num_rows ? begin_row : num_rows - TILE;
                transpose_tile(
                    rows + row * row_bytes + column, row_bytes, columns + column * to_stride + row, to_stride);
            }
    }
    """
    void weigh_rows(
        const unsigned char *rows, long long width, const int *weights, long long most, const long long *bounds,
        long long new_size, unsigned char *out,
    ) noexcept nogil
    void transpose(
        const unsigned char *rows, long long num_rows, long long row_bytes, unsigned char *columns, long long to_stride,
    ) noexcept nogil

cdef int PRECISION_BITS, BILINEAR, BICUBIC, BAND
cdef double CUBIC

cpdef _weights(long long size, long long new_size, int filter, double reach)
cdef double _weight(double distance, int filter)
cdef double _sinc(double x)
cpdef _resize_rows(
    const unsigned char[:, ::1] image, const int[:, ::1] weights, const long long[:, ::1] bounds,
    unsigned char[:, ::1] out,
)
cpdef _resize_columns(
    const unsigned char[:, :, ::1] frames, const int[:, ::1] weights, const long long[:, ::1] bounds,
    unsigned char[:, :, ::1] out,
)
