"""What is special about a family of models that read media: a file each, and no other file names one.

files      a processor's folder or hub id -> its settings, as they are written there
settings   what a user may choose of how media are read
family     what a family says: counts from facts, positions, the tower's tensors
registry   a processor's folder -> its family; a file in this folder that has a FAMILY is one
vision     images and frames -> patches; frames: which frames of a video are read; clips: sounds -> mel features
qwen_vl    what the Qwen-VL families share
qwen2_vl, qwen2_5_vl, qwen3_vl; qwen2_audio
tiles      what families share whose towers read square tiles; tile_settings: how these are set
internvl, llava_onevision, gemma3
installed  transformers' processor of a folder, asked about media
as_installed: families without code of their own for media; asked: a processor of any family -> its kinds of media
idefics3 (and SmolVLM), llama4: what such processors do not say
omni       what the Qwen-Omni families share; qwen2_5_omni, qwen3_omni
"""
