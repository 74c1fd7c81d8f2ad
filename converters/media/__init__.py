"""References in rows -> bytes of images, audio and video.

references  a path, bytes or base64 -> bytes, and a stored part with facts about them
"""
