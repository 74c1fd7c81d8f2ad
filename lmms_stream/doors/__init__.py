"""Our classes as those of other packages, which are imported here and nowhere else.

mosaicml     of MosaicML Streaming's types, for programs that ask with isinstance: Composer, llm-foundry
"""
