"""Other projects' programs over the core: their names, files and arguments, each in a folder.

lmms_engine  LMMS Engine's modules, datasets and launcher
relax        Relax's modules, datasets and data sources
trl          TRL's names, with its trainers replaced
mosaicml     our classes as those of MosaicML Streaming, for programs that ask with isinstance

The core imports none of them.
"""
