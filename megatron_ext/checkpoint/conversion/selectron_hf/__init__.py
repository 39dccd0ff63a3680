"""The model for transformers: files that a converted checkpoint holds beside its weights.

They are copied as they are, so they know torch and transformers alone, and each other by relative imports, which
transformers follows. Everything is batch first here. Not imported by the rest of the package: transformers is optional.
"""
