# C types of resize.py.

cdef extern from *:
    """
    /* No pointer of a row points into another row: loops over bytes become vector instructions. */
    #if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__gnu_linux__)
    #define CLONES __attribute__((target_clones("avx2", "default")))
    #else
    #define CLONES
    #endif
    CLONES static void __pyx_f_11lmms_stream_10processors_5media_6resize__add_five(
        unsigned char *__restrict, unsigned char *__restrict, unsigned char *__restrict, unsigned char *__restrict,
        unsigned char *__restrict, int, int, int, int, int, int *__restrict, long long);
    CLONES static void __pyx_f_11lmms_stream_10processors_5media_6resize__clip(int *__restrict, unsigned char *__restrict, long long);
    """
    ctypedef unsigned char *Row "unsigned char *__restrict"
    ctypedef int *Sums "int *__restrict"

cdef int PRECISION_BITS, HALF, BILINEAR, BICUBIC, BAND, SPAN, TILE, TERMS
cdef double CUBIC

cpdef _weights(long long size, long long new_size, int filter, double reach)
cdef double _weight(double distance, int filter)
cdef double _sinc(double x)
cpdef _resize_rows(
    const unsigned char[:, ::1] image, const int[:, ::1] weights, const long long[::1] first,
    const long long[::1] number, unsigned char[:, ::1] out,
)
cpdef _resize_columns(
    const unsigned char[:, :, ::1] frames, const int[:, ::1] weights, const long long[::1] first,
    const long long[::1] number, unsigned char[:, :, ::1] out,
)
cdef void _add_rows(
    unsigned char *source, long long stride, long long number, int *weights, int *sums, unsigned char *out,
    long long width,
) noexcept nogil
cdef void _add_five(
    Row one, Row two, Row three, Row four, Row five, int a, int b, int c, int d, int e, Sums sums, long long width,
) noexcept nogil
cdef void _clip(Sums sums, Row out, long long width) noexcept nogil
cdef void _transpose(
    unsigned char *source, long long num_rows, long long row_bytes, unsigned char *target, long long target_row_bytes,
) noexcept nogil
cdef void _transpose_tile(
    unsigned char *source, long long stride, unsigned char *target, long long target_stride,
) noexcept nogil
cdef void _exchange(unsigned long long *rows, int one, int other, int bits, unsigned long long mask) noexcept nogil
