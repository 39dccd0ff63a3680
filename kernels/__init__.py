"""Selectron's sequence-mixing ops. A folder an op: reference.py (the meaning), interface.py (the choice).

Hugging Face's distribution `kernels` has the same import name; `kernels.ownership` finds it. This file stays free of
imports, so that the check runs before anything else is installed.
"""

# transformers asks the importable package `kernels` for a version, to learn whether it is Hugging Face's. An installed
# selectron answers by its metadata; an uninstalled source tree has only this attribute, and transformers 5.0 fails on
# its absence. Zero is below every version that transformers accepts, so it leaves our package alone.
__version__ = "0"
