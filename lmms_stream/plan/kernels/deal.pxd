# C types of deal.py.

cimport cython

cdef long long FULL
cdef int SWAPS_LOOKED_AT, GOOD_ENOUGH

cpdef settle(long long[::1] homes, long long[::1] sizes, long long[::1] rooms)
cpdef deal(
    long long[::1] order, long long[::1] costs, long long[::1] lists, long long[:, :, ::1] heaps,
    long long packs_per_rank, long long[::1] dealt,
)

@cython.final
cdef class Dealer:
    cdef long long[::1] order
    cdef long long[:, ::1] shares
    cdef long long ranks
    cdef long long[:, ::1] loads, mine
    cdef long long[::1] counts, tried
    cpdef deal(self, const long long[:, ::1] bounds, long long[::1] dealt)
    cdef void sort(self, long long rank) noexcept nogil
    cdef long long deal_rounds(self, long long first, long long num_packs) noexcept nogil
    cdef long long larger(self, long long rank, long long tokens, long long patches) noexcept nogil
    cdef void swap(self, long long first, long long num_packs, long long enough) noexcept nogil
