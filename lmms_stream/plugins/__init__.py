"""Parts that a run imports only if its file, model or URL names them: see lmms_stream/registry.py.

families    families of models with media, except Qwen-VL
tasks       losses, except the loss of causal language models
stores      Google Cloud Storage, Azure, the Hugging Face hub, other clouds
engines     Ray, for conversions
parallel    tensor, expert and sequence parallelism
peers       shards from the caches of other nodes

The core imports no plugin.
"""
