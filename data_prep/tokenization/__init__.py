"""Tokenizers of three kinds behind one face: Hugging Face, tiktoken, RWKV."""
