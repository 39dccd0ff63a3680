"""`selectron --version`: print the version."""

from __future__ import annotations

from importlib import metadata

from megatron_ext.utils.git_info import commit


def run() -> int:
    """Print the version, and the commit if run from a checkout.

    Returns:
        0.
    """
    try:
        number = metadata.version("selectron")
    except metadata.PackageNotFoundError:
        number = "(not installed)"
    known = commit()
    print(f"selectron {number}" + (f" (commit {known})" if known else ""))
    return 0
