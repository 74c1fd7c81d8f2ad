# C types of turns.py.

cimport cython

cdef long long LAST

cdef long long _eligible(long long lack, long long quota, long long turn, long long least) noexcept nogil
cdef void _push(long long[:, ::1] heap, long long size, long long key, long long source) noexcept nogil
cdef void _pop(long long[:, ::1] heap, long long size) noexcept nogil

@cython.final
cdef class TurnHeaps:
    cdef long long[::1] left, credits, known, deadlines, taken, used, have
    cdef const long long[::1] ends
    cdef const long long[:, ::1] quotas, tokens
    cdef const unsigned char[::1] goes_on
    cdef long long[:, ::1] waiting, ready, givers
    cdef long long unit, least, full, num_waiting, num_ready, num_givers, phase, clock
    cdef bint counts_tokens
    cpdef void begin(self) noexcept nogil
    cdef long long deadline(self, long long source, long long turn) noexcept nogil
    cdef void update(self, long long source) noexcept nogil
    cdef void wait(self, long long source, long long at) noexcept nogil
    cpdef long long take(self, long long turn, long long count) noexcept nogil
    cpdef void end(self) noexcept nogil

@cython.final
cdef class SourceEpochs:
    cdef TurnHeaps turns
    cdef long long[::1] at, packs
    cdef const long long[::1] counts, first_counts, until
    cdef long long[:, ::1] rows
    cdef long long num_rows, over
    cdef void find_left(self, long long source) noexcept nogil
    cdef long long pass_epochs(self, long long count) noexcept nogil
    cdef long long take(self, long long count, long long stop, long long batch) noexcept nogil

