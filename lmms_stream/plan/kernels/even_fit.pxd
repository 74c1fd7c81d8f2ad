# C types of even_fit.py.

from lmms_stream.plan.kernels.best_fit cimport BestFit, Packer

cdef int NUM_TURNS, CHOSEN_BITS, LEAST_GAP, LEAST_GAIN

cdef class Subsets:
    cdef long long[::1] samples, sums, works
    cdef void add(self, long long length, int number) noexcept nogil

cdef class EvenFit(Packer):
    cdef long long window, num_open
    cdef BestFit best
    cdef long long[::1] lengths, head, following, size, room, work, before, carried, firsts
    cdef int[::1] of_window, tokens, ranks, scratch
    cdef Subsets of_heavy, of_light
    cdef long long pack(self, const int[::1] lengths, unsigned long long seed) noexcept nogil
    cdef void put(self, long long pack, long long sample) noexcept nogil
    cdef long long choose(self, long long pack, long long turn, Subsets subsets) noexcept nogil
    cdef void move(self, long long pack, long long other, Subsets subsets, long long mask) noexcept nogil
    cdef void exchange(self, long long heavy, long long light, Subsets of_heavy, Subsets of_light, long long num_heavy, long long num_light) noexcept nogil
    cdef bint count_fits(self, long long heavy, long long light, long long given, long long received) noexcept nogil
    cdef void even_out(self, long long num_packs) noexcept nogil
    cdef long long pack_stretch(self, const int[::1] lengths, long long num_carried, long long position, bint last, unsigned long long seed) noexcept nogil

cpdef even_fit(
    const int[::1] lengths, carried, firsts, long long position, bint last,
    long long limit, long long max_samples, long long window, double filler_share, unsigned long long seed,
)
