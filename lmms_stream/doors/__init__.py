"""Other projects' programs over the core: their names, files and arguments, each in a folder.

huggingface  FSDP2SFTTrainer: transformers' Trainer and TRL's SFTTrainer by their arguments and members
lmms_engine  LMMS Engine's modules, datasets and launch files
relax        prompts for reinforcement learning behind Relax's names: lmms_stream.rl
trl          TRL's names, with its trainers replaced
llama_factory   LLaMA-Factory's lists of datasets, and their rows
mosaicml     our classes as subclasses of MosaicML Streaming's, for programs with isinstance checks
torchtitan   torchtitan's dataloader on the packs of a PackedLoader

The core does not import this folder.
"""
