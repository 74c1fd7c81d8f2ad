"""Bytes of stored media -> what they are. Nothing here knows models.

formats   bytes -> MIME type; images that are small enough
stored    the media of a stored sample
"""
