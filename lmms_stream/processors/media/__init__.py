"""Bytes of stored media -> what they are, and their pixels. Nothing here knows models.

formats   bytes -> MIME type; images that are small enough
stored    the media of a stored sample
images    bytes of an image -> pixels as shown
video     bytes of a video -> chosen frames as shown
resize    pixels -> pixels of another size
patches   pixels -> normalised patches
"""
