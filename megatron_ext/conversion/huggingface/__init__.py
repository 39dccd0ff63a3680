"""Hugging Face folders: models, tokenizers and safetensors files."""
