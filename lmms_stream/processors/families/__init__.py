"""What is special about a family of models that read media: a file each, and no other file names one.

files      a processor's folder or hub id -> its settings, as they are written there
settings   what a user may choose of how media are read
family     what a family says: counts from facts, positions, the tower's tensors
registry   a processor's folder -> its family; a file in this folder that has a FAMILY is one
vision     images and frames -> patches; frames: which frames of a video are read; clips: sounds -> mel features
qwen_vl    what the Qwen-VL families share
qwen2_vl, qwen2_5_vl, qwen3_vl; qwen2_audio
tiles      what families share whose towers read square tiles; tile_settings: how these are set
internvl, aya_vision, llava_onevision, idefics3, smolvlm, gemma3, llama4
omni       what the Qwen-Omni families share; qwen2_5_omni, qwen3_omni, with short_clips
"""
