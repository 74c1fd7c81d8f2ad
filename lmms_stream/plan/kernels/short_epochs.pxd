# C types of short_epochs.py.

from lmms_stream.plan.kernels.best_fit cimport Packer

cdef int PACKED, PACKS, BLOCKS
cdef unsigned long long LOW, INIT_A, MULT_A, INIT_B, MULT_B, MIX_L, MIX_R, PCG_HIGH, PCG_LOW

cdef class EpochPacker:
    cdef unsigned long long seed
    cdef bint shuffles, reshuffles, keeps
    cdef long long num_nodes, block_size
    cdef Packer packer
    cdef tuple arrays
    cdef const int[::1] sample_lengths, num_pieces
    cdef const long long[::1] sizes, first_ids
    cdef unsigned long long[::1] state, entropy, block_word
    cdef long long[::1] ids, numbers, block_numbers, ends, node_firsts, offsets
    cdef int[::1] of_turns, nodes, turns
    cdef int[:, ::1] cut, packed, segments
    cdef void permute(self, long long[::1] numbers, long long size, bint is_shuffled, long long num_words) noexcept nogil
    cdef long long set_key(self, long long epoch, long long node, long long block, long long stream) noexcept nogil
    cdef void lay_out(self, long long epoch) noexcept nogil
    cdef long long cut_block(self, long long start, long long stop) noexcept nogil
    cdef long long pack_node(self, long long epoch, long long node, long long num_packs) noexcept nogil
    cdef long long interleave(self, long long num_packs) noexcept nogil
    cdef long long pack_epoch(self, long long epoch, long long num_packs) noexcept nogil

cpdef pack_epochs(facts, rules, long long first, long long count)

cdef unsigned long long _hash(unsigned long long value, unsigned long long constant) noexcept nogil
cdef unsigned long long _mix(unsigned long long one, unsigned long long other) noexcept nogil
cpdef void seeded_words(const unsigned long long[::1] entropy, unsigned long long[::1] words) noexcept nogil
cpdef void begin_stream(const unsigned long long[::1] entropy, unsigned long long[::1] state) noexcept nogil
cdef void _advance(unsigned long long[::1] state) noexcept nogil
cdef unsigned long long _next_32(unsigned long long[::1] state) noexcept nogil
cpdef void shuffle(unsigned long long[::1] state, long long[::1] values) noexcept nogil
