# C types of links.py.

cimport cython

cdef int ASKED, UNDER_WAY, DONE
cdef double FOREVER

cpdef use_needed_last(
    const long long[::1] steps, const long long[::1] shards, const long long[::1] sizes, long long limit,
    int[::1] used_at, unsigned char[::1] held, const long long[::1] victims, long long since, long long used,
    unsigned char[::1] missed,
)

@cython.final
cdef class Links:
    cdef double bytes_per_s, latency_s
    cdef long long at_once, ahead, taken_ahead
    cdef const long long[::1] bounds, steps, released, at_hand, sizes, by_step, by_hand
    cdef signed char[::1] kinds
    cdef unsigned char[::1] busy
    cdef double[::1] ended, now, served
    cdef double[:, ::1] until, begins
    cdef long long[::1] num_under_way, num_waiting, first_waiting, asked, front, urgent, needed, taken, hand
    cdef long long[::1] hand_begun, hand_ended, untaken
    cdef long long[:, ::1] under_way, waiting
    cpdef wait(self, const unsigned char[::1] begins, double step_time_s, double[::1] waits)
    cdef bint is_busy(self, long long node, long long step) noexcept nogil
    cdef void ask(self, long long node, long long step) noexcept nogil
    cdef void take(self, long long node, long long step) noexcept nogil
    cdef double have(self, long long node, long long step) noexcept nogil
    cdef void run(self, long long node, long long step, double until) noexcept nogil
    cdef bint go_on(self, long long node, long long step, double until) noexcept nogil
    cdef void fill(self, long long node, long long step) noexcept nogil
    cdef long long next(self, long long node, long long step) noexcept nogil
