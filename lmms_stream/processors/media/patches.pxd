# C types of patches.py, and its innermost loop.

cdef extern from *:
    """
    /* Write the values of the pixels of a patch: three areas of size * size floats, `to_channel` floats apart.
       Pixels to the right and the next patch of `target` are prefetched. */
    static void fill_patch(
        const unsigned char *restrict pixels, long long row_bytes, const float *restrict values,
        float *restrict target, long long to_channel, long long size)
    {
        for (long long y = 0; y < size; y++, pixels += row_bytes, target += size) {
            __builtin_prefetch(pixels + 256);
            for (int channel = 3; channel < 6; channel++)
                __builtin_prefetch(target + channel * to_channel, 1);
            for (long long x = 0; x < size; x++) {
                target[x] = values[pixels[3 * x]];
                target[x + to_channel] = values[256 + pixels[3 * x + 1]];
                target[x + 2 * to_channel] = values[512 + pixels[3 * x + 2]];
            }
        }
    }
    """
    void fill_patch(
        const unsigned char *pixels, long long row_bytes, const float *values, float *target, long long to_channel,
        long long size,
    ) noexcept nogil

cdef _fill(
    const unsigned char[:, :, ::1] frames, long long patch_size, long long merge_size, long long temporal_patch_size,
    const float[:, ::1] values, float[:, ::1] out,
)
