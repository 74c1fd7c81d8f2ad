"""A tiny Llama with random weights, for trying things on: python examples/tiny_model.py FOLDER TOKENIZER."""

import sys

from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

folder, path = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(path)
config = LlamaConfig(
    vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4
)
LlamaForCausalLM(config).save_pretrained(folder)
tokenizer.save_pretrained(folder)
