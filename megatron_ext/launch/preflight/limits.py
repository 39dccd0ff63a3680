"""Requirements for a node, as options of `selectron preflight` and of `selectron launch`, whose jobs run it."""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import dataclass, field, fields
from typing import Any

from megatron_ext.utils.errors import UserError

_UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[KMGT]?B?)", re.IGNORECASE)


def parse_size(text: str) -> float:
    """Parse a number of bytes such as `10GB`, `500 MB`, `1TB` or a bare number.

    Raises:
        ValueError: the text is not a size.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError("is not a size; give one like 10GB")
    unit = match["unit"].upper()
    return float(match["number"]) * _UNITS[unit if unit.endswith("B") or not unit else f"{unit}B"]


def _parse_number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError("is not a number of 0 or more; give one")
    return number


def _parse_fraction(text: str) -> float:
    number = _parse_number(text)
    if number > 1:
        raise ValueError("is above 1; give a fraction from 0 to 1")
    return number


def _parse_seconds(text: str) -> float:
    number = _parse_number(text)
    if number < 1:
        raise ValueError("is less than a second; give seconds")
    return number


def _limit(default: str, read: Any, unit: str, text: str) -> Any:
    """Declare a limit and its option. `default` is written as a user would write it, for example "1GB"."""
    metadata = {"default": default, "read": read, "unit": unit, "help": f"{text} (default {default})"}
    return field(default=read(default), metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Requirements for a node, each an option of the same name. Units are bytes, seconds, GB/s and fractions."""

    min_disk: float = _limit("1GB", parse_size, "SIZE", "minimum free space for the run folder")
    min_tmp: float = _limit("250MB", parse_size, "SIZE", "minimum free space for temporary files (TMPDIR)")
    min_shm: float = _limit("32MB", parse_size, "SIZE", "minimum free space in /dev/shm")
    min_memory: float = _limit("500MB", parse_size, "SIZE", "minimum free memory of a node")
    min_gpu_memory: float = _limit("0.9", _parse_fraction, "FRACTION", "minimum free fraction of a GPU's memory")
    max_clock_offset: float = _limit("2", _parse_number, "SECONDS", "maximum clock offset from the first node")
    min_bandwidth: float = _limit("0", _parse_number, "GB/S", "minimum all-reduce bandwidth between two nodes")
    min_bandwidth_fraction: float = _limit(
        "0.5", _parse_fraction, "FRACTION", "minimum bandwidth relative to the median of the other pairs"
    )
    pair_timeout: float = _limit("30", _parse_seconds, "SECONDS", "timeout of the connection between two nodes")
    node_timeout: float = _limit("300", _parse_seconds, "SECONDS", "timeout of a node's report")


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Add an option for each limit. `parse_limits` parses their values."""
    group = parser.add_argument_group("node requirements checked before training")
    for limit in fields(Limits):
        option = "--" + limit.name.replace("_", "-")
        group.add_argument(option, metavar=limit.metadata["unit"], help=limit.metadata["help"])


def parse_limits(args: argparse.Namespace) -> Limits:
    """Parse the limits from the options.

    Raises:
        UserError: an option is invalid.
    """
    values = {}
    for limit in fields(Limits):
        text = getattr(args, limit.name)
        if text is None:
            continue
        try:
            values[limit.name] = limit.metadata["read"](text)
        except ValueError as error:
            problem, hint = str(error).split("; ")
            raise UserError("--" + limit.name.replace("_", "-"), f"{text!r} {problem}", hint) from None
    return Limits(**values)


def limit_arguments(args: argparse.Namespace) -> list[str]:
    """Return all limits as arguments of `selectron preflight`, for the job's script. Users can edit them there."""
    parse_limits(args)
    return [
        word
        for limit in fields(Limits)
        for word in ("--" + limit.name.replace("_", "-"), getattr(args, limit.name) or limit.metadata["default"])
    ]
