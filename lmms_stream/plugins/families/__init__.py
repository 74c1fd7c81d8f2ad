"""Families of models with images, videos and sound: a file each, with a FAMILY; see processors/families/registry.py.

tiles       what families share whose towers read square tiles
omni        what the families of text, images, videos and sound share
"""
