"""References in rows -> bytes of images, audio and video, and what they are.

references  a path, bytes or base64 -> bytes
types       bytes -> MIME type; images that are small enough
stored      the media of a stored sample
"""
