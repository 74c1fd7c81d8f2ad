"""Bytes of stored media -> what they are, and their pixels. Nothing here knows models.

formats        bytes -> MIME type
fact_types     what is known of an image, a video, a sound
jpeg           a JPEG, decoded strictly
deep_grey      grey images of more than 8 bits -> 8 bits
image_header   the size of an image; images that are small enough
sound_header   samples of WAV and FLAC
containers     videos and sounds, opened by PyAV
av_facts       frames and rates of videos, samples of other sounds, by PyAV
facts          media -> the facts about them; those that a stored part has
intervals      the seconds of a video that are read
stored         the media of a stored sample
memory         where large arrays of media lie
images         bytes of an image -> pixels as shown
video          bytes of a video -> chosen frames as shown
resize         pixels -> pixels of another size
patches        pixels -> normalised patches
sound          bytes of a sound -> its samples, at a rate
mel            samples -> mel features
waveform       samples -> a picture for people to look at
"""
