# C types of window_fit.py.

from lmms_stream.plan.kernels.best_fit cimport Bins

cdef double CLOSED_BELOW
cdef int NUM_TURNS

cdef class WindowFit(Bins):
    cdef long long window, num_open, lost, num_firsts
    cdef double share
    cdef int[::1] pool, by_length, scratch, closes, waits
    cdef long long[::1] sort_keys
    cdef const long long[::1] firsts
    cdef long long pack(self, const int[::1] lengths, unsigned long long seed) noexcept nogil
    cdef void order_turns(self, const int[::1] lengths, long long count, int number) noexcept nogil
    cdef bint has_waited(self, int chosen, long long num_waiting) noexcept nogil
    cdef long long try_turns(self, const int[::1] lengths, long long count, long long num_waiting, int number) noexcept nogil
    cdef long long pack_pool(self, const int[::1] lengths, long long count, long long num_waiting) noexcept nogil
    cdef long long position_of(self, long long position, long long index) noexcept nogil
    cdef long long pack_stretch(self, const int[::1] lengths, long long num_waiting, long long position, bint last, unsigned long long seed) noexcept nogil

cpdef window_fit(
    const int[::1] lengths, firsts, long long position, bint last, long long limit,
    long long max_samples, long long window, unsigned long long seed,
)
