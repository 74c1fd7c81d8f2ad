# C types of best_fit.py.

cdef int FEW_SAMPLES
cdef double CLOSED_BELOW
cdef unsigned long long ONE, MIX_FIRST, MIX_SECOND, GOLDEN

cdef extern from *:
    int low_bit "__builtin_ctzll"(unsigned long long word) noexcept nogil

cdef unsigned long long mix(unsigned long long value) noexcept nogil
cdef int least_bit(Bins bins, int bit) noexcept nogil
cdef void set_bit(Bins bins, int bit) noexcept nogil
cdef void clear_bit(Bins bins, int bit) noexcept nogil

cdef class Packer:
    cdef long long limit, max_samples
    cdef int[::1] order
    cdef long long[::1] offsets
    cdef tuple packs
    cdef long long pack(self, const int[::1] lengths, unsigned long long seed) noexcept nogil
    cdef void sort(self, const long long[::1] keys, int[::1] numbers, int[::1] scratch, long long count) noexcept nogil

cdef class NextFit(Packer):
    cdef long long pack(self, const int[::1] lengths, unsigned long long seed) noexcept nogil

cdef class FirstFit(Packer):
    cdef int[::1] rooms, pack_of
    cdef long long[::1] filled
    cdef long long pack(self, const int[::1] lengths, unsigned long long seed) noexcept nogil

cdef class Bins(Packer):
    cdef unsigned long long[::1] words, summary, first, unsorted_keys, keys
    cdef int[::1] by_room, counts, next_bin, following, head, size, room, opened, unsorted, closing, unused, buckets
    cdef int[::1] turns, ints
    cdef long long num_ints
    cdef int[::1] part(self, long long count)
    cdef long long fill_window(self, const int[::1] lengths, long long num_samples, long long shift, long long num_open) noexcept nogil
    cdef void leave(self, int chosen) noexcept nogil
    cdef void enter(self, long long num_open) noexcept nogil
    cdef void key(self, long long number, int chosen, long long first, unsigned long long seed) noexcept nogil
    cdef void sort_by_hash(self, long long count) noexcept nogil
    cdef long long emit(self, const int[::1] bins, long long count, long long num_packs) noexcept nogil

cdef class BestFit(Bins):
    cdef long long window, num_open
    cdef double share
    cdef const long long[::1] carried, firsts
    cdef long long pack(self, const int[::1] lengths, unsigned long long seed) noexcept nogil
    cdef void sort_window(self, const int[::1] lengths, long long start, long long stop) noexcept nogil
    cdef void sort_few(self, const int[::1] lengths, long long start, long long stop) noexcept nogil
    cdef void open_again(self, const int[::1] lengths, long long num_carried) noexcept nogil
    cdef long long close(self, long long num_last, long long num_open, unsigned long long seed) noexcept nogil
    cdef long long pack_stretch(self, const int[::1] lengths, long long num_carried, long long position, bint last, unsigned long long seed) noexcept nogil
    cdef void close_all(self) noexcept nogil

cpdef best_fit(
    const int[::1] lengths, carried, firsts, long long position, bint last,
    long long limit, long long max_samples, long long window, double filler_share, unsigned long long seed,
)
cpdef next_fit(const int[::1] lengths, long long limit, long long max_samples)
cpdef first_fit(const int[::1] lengths, long long limit, long long max_samples)
