"""Bytes of stored media -> facts and pixels. Nothing here knows models.

formats        bytes -> MIME type
types          facts of an image, a video, a sound; the seconds of a video to read; memory of large arrays
image_header   the size of an image, also of JPEG and deep grey images; limits of sizes
containers     videos and sounds, opened by PyAV: frames and rates of videos, samples of sounds
facts          media -> facts; samples of WAV and FLAC; facts of a stored sample
images         bytes of an image -> pixels, turned by EXIF
video          bytes of a video -> chosen frames, turned
pixels         pixels -> pixels of another size; pixels -> normalised patches
sound          bytes of a sound -> samples at a rate -> mel features; a picture of samples
"""
