"""Sequence-mixing ops of Selectron, one folder per op.

Each folder has `reference.py`, the definition in plain torch, and `interface.py`, the public function that chooses an
implementation. Hugging Face's distribution `kernels` has the same import name, which `kernels.name_conflict` detects.
This file imports nothing, so that the check runs before any dependency is installed.
"""

# transformers asks the importable package `kernels` for its version to find out if it is Hugging Face's package. An
# installed selectron provides the version in its metadata. An uninstalled source tree has only this attribute, and
# transformers 5.0 fails without it. Zero is below every version that transformers accepts, so it ignores our package.
__version__ = "0"
