"""Tokenizers with a common interface: Hugging Face, tiktoken, RWKV."""
