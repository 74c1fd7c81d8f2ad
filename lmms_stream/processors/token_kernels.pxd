# C types of token_kernels.py, and its innermost loop.

cimport cython
from cpython.buffer cimport Py_buffer

cdef extern from *:
    """
    #include <string.h>
    /* gcc compiles a loop twice; the first call takes the version that the CPU has instructions for. */
    #if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__gnu_linux__)
    #define CLONES __attribute__((target_clones("avx2", "default")))
    #else
    #define CLONES
    #endif
    typedef int unaligned_int __attribute__((aligned(1)));

    #define WRITE_TOKENS(begin, end) \\
        for (long long n = begin; n < end; n++) { \\
            long long token = ((const unaligned_int *)tokens)[n]; \\
            ids[n] = token; \\
            positions[n] = n; \\
            labels[n] = n >= first && n < stop ? token : ignored_label; \\
        }

    /* Write a segment; its tokens [first, stop) are trained on. Vectors that cross cache lines would take 1.6 times as
       long: the tokens before a cache line of the rows come first. */
    CLONES static void write_segment(
        const void *tokens, long long length, long long first, long long stop, long long ignored_label,
        long long *restrict ids, long long *restrict labels, long long *restrict positions)
    {
        long long before = -((long long)(size_t)ids / 8) & 7;
        before = before < length ? before : length;
        WRITE_TOKENS(0, before)
        WRITE_TOKENS(before, length)
    }
    """
    ctypedef int unaligned_int
    void prefetch "__builtin_prefetch"(const void *address) noexcept nogil
    void write_segment(
        const void *tokens, long long length, long long first, long long stop, long long ignored_label,
        long long *ids, long long *labels, long long *positions,
    ) noexcept nogil

cdef enum:
    NUM_ARRAYS = 10

cdef struct Values:
    long long address, number

cdef int AHEAD, LINE, MOST_LINES, _FITS, _TORN, _OTHER_LENGTH, _BAD_SPAN

cdef void _prefetch(long long address) noexcept nogil
cdef long long _int32(long long address) noexcept nogil
cdef bint _find_values(long long at, long long stop, Values *values) noexcept nogil

@cython.final
cdef class Pack:
    cdef Py_buffer views[NUM_ARRAYS]
    cdef int num_views
    cdef Values *samples
    cdef const long long *addresses
    cdef const long long *indices
    cdef const long long *starts
    cdef const long long *lengths
    cdef const long long *expected
    cdef const long long *column_sizes
    cdef long long *num_loss_tokens
    cdef long long *input_ids
    cdef long long *labels
    cdef long long *position_ids
    cdef long long num_segments, num_columns, row_length, ids_column, spans_column, ignored_label, segment, value
    cdef long long *take(self, array, str name, long long number, bint writable) except NULL
    cdef long long find(self) noexcept nogil
    cdef int fill(self) noexcept nogil
