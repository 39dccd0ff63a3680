"""`selectron doctor`: print the installed packages and the implementations that a run on this machine would use."""

from __future__ import annotations

import argparse
import sys
from importlib import metadata
from pathlib import Path
from platform import python_version

from megatron_ext.platform.tested_versions import TESTED, untested_note


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no arguments."""


def run(args: argparse.Namespace) -> int:
    """Print versions, device, back-end and the implementation of each mixer's ops.

    Returns:
        0.
    """
    print(_version_line("python", python_version()))
    for name in ("selectron", *(name for name in TESTED if name != "python"), "apex"):
        version = _installed(name)
        print(_version_line(name, version) if version else f"{name:<24}not installed")
    sys.stdout.flush()  # the imports of torch and Megatron take seconds
    from megatron_ext.platform.device import choose_backend, select_platform

    platform = select_platform()
    print(f"{'device':<24}{platform.device} ({platform.communication})")
    print(f"{'back-end':<24}{choose_backend('auto', platform)}")
    conflict = _kernels_conflict()
    print(f"{'import kernels':<24}{conflict or 'ours'}")
    if conflict:  # the other lines need our `kernels`
        return 0
    from kernels.common.fla import triton_limits
    from megatron_ext.commands.op_choices import implementations

    triton = _installed("triton")
    if triton and _installed("flash-linear-attention"):
        print(f"{'fla and triton':<24}{triton_limits(triton)}")

    print("\nImplementation of each mixer op on this machine, in bf16 with default settings:")
    for name, choices in implementations(platform):
        if not choices:
            print(f"{name:<24}no op with a choice")
        for op, choice in choices:
            print(f"{name:<24}{op}: {choice.name} ({choice.reason})")
    return 0


def _installed(name: str) -> str | None:
    """Return the installed version of a distribution, None if there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _version_line(name: str, version: str) -> str:
    note = untested_note(name, version)
    return f"{name:<24}{version}{f' ({note})' if note else ''}"


def _kernels_conflict() -> str | None:
    """Return the problem with the import name `kernels`, or None.

    The check is loaded by path, because a foreign package of that name shadows ours.
    """
    import runpy

    path = Path(__file__).resolve().parents[2] / "kernels" / "name_conflict.py"
    conflict: str | None = runpy.run_path(str(path))["find_conflict"]()
    return conflict
