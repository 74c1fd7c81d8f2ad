# C types of patches.py.

cdef _fill(
    const unsigned char[:, :, ::1] frames, long long patch_size, long long merge_size, long long temporal_patch_size,
    const float[:, ::1] values, float[:, ::1] out,
)
