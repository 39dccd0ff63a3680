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
        version = metadata.version("selectron")
    except metadata.PackageNotFoundError:
        version = "(not installed)"
    commit_id = commit()
    print(f"selectron {version}" + (f" (commit {commit_id})" if commit_id else ""))
    return 0
