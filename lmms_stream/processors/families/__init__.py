"""What is special about a family of models that read media: a file each, and no other file names one.

files      a processor's folder or hub id -> its settings, as they are written there
settings   what a user may choose of how media are read
family     what a family says: counts from facts, positions, the tower's tensors
registry   a processor's folder -> its family; a file in this folder that has a FAMILY is one
qwen_vl    what the Qwen-VL families share; frames: which frames of a video they read
qwen2_vl, qwen2_5_vl, qwen3_vl
"""
