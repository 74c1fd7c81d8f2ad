# C types of token_kernels.py.

cimport cython

cdef extern from *:
    void prefetch "__builtin_prefetch"(const void *address) noexcept nogil

cdef int AHEAD, LINE, _FITS, _TORN, _OTHER_LENGTH, _BAD_SPAN

cdef void _prefetch(long long address) noexcept nogil
cdef long long _uint32(long long address) noexcept nogil
cdef long long _int32(long long address) noexcept nogil

@cython.final
cdef class Samples:
    cdef const long long[::1] addresses, indices, column_sizes
    cdef long long ids_column, spans_column
    cdef long long[:, ::1] found
    cdef bint find_array(self, long long segment, int column, long long at, long long stop) noexcept nogil
    cdef long long find(self) noexcept nogil

@cython.final
cdef class Rows:
    cdef const long long[::1] starts, lengths, expected
    cdef long long ignored_label, segment, value
    cdef long long[::1] input_ids, labels, position_ids, num_loss_tokens
    cdef void write(self, long long at, long long tokens, long long length, long long first, long long stop) noexcept nogil
    cdef int fill(self, Samples samples) noexcept nogil
