"""Argument parser of all commands."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron_ext.utils import error_reporting
from megatron_ext.utils.errors import EXIT_USER_ERROR
from megatron_ext.utils.resume_option import encode_resume_auto
from megatron_ext.utils.untrusted_paths import check_text

FREE_TEXT = {"prompt", "eos_token", "tiktoken_pattern"}
"""Options whose value is arbitrary text, not a name or path."""

_YAML_BLANKS = {ord("\n"): " ", ord("\t"): " "}


class Parser(argparse.ArgumentParser):
    """argparse parser with the error format of all commands: one line, exit code 2.

    Options may be given between positional arguments, in sub-commands too. argparse supports this only through
    `parse_intermixed_args`, and never in a sub-command.
    """

    _is_parsing = False

    def add_argument(self, *names: Any, **options: Any) -> Any:
        """Add an argument as argparse does. Optional positional arguments (`nargs="*"`) default to an empty list.

        Without a default, argparse would report them as required.
        """
        if options.get("nargs") == "*" and not names[0].startswith("-"):
            options.setdefault("default", [])
        return super().add_argument(*names, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, with intermixed arguments if possible.

        `parse_known_intermixed_args` calls this method again.
        """
        args = None if args is None else self._insert_defaults(args)
        if self._is_parsing or self._subparsers is not None:  # argparse cannot intermix with sub-commands
            return super().parse_known_args(args, namespace)
        self._is_parsing = True
        try:
            args = encode_resume_auto(sys.argv[1:] if args is None else args)
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_parsing = False

    def _insert_defaults(self, args: Sequence[str]) -> list[str]:
        """Insert the default of options with an optional integer if no number follows: `--trial key=value`."""
        defaults = {
            name: action.const
            for action in self._actions
            if action.nargs == "?" and action.type is int
            for name in action.option_strings
        }
        next_args = [*args[1:], ""] if args else []
        return [
            f"{arg}={defaults[arg]}" if defaults.get(arg) is not None and not after.lstrip("-").isdigit() else arg
            for arg, after in zip(args, next_args, strict=True)
        ]

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, and refuse names and paths with control characters."""
        parsed = super().parse_args(args, namespace)
        for action in self._actions:
            value = getattr(parsed, action.dest, None)
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, str | Path) and action.dest not in FREE_TEXT:
                    # An override is YAML, which may have several lines. Its value is checked with the field it sets.
                    text = str(item).translate(_YAML_BLANKS) if action.dest == "overrides" else str(item)
                    check_text(action.option_strings[-1] if action.option_strings else str(action.metavar), text)
        return parsed

    def error(self, message: str) -> NoReturn:
        """Print the error in one line, with a suggestion for a misspelt name, and exit with code 2."""
        message += self._suggestion(message)
        error_reporting.report_user_error(f"{message}; see `{self.prog} --help`")
        raise SystemExit(EXIT_USER_ERROR)

    def _suggestion(self, message: str) -> str:
        """Return a suggestion for an unknown option or choice; empty for other errors."""
        unknown = re.search(r"^unrecognized arguments: (?:.* )?(--[\w-]+)", message)
        if unknown:
            visible = (action for action in self._all_actions() if action.help != argparse.SUPPRESS)
            known = {name for action in visible for name in action.option_strings}
        else:
            unknown = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
            known = set(re.findall(r"[\w.-]+", unknown[2])) if unknown else set()
        if not unknown or unknown[1] in known:  # the name exists: an option of another sub-command, or a surplus value
            return ""
        completions = sorted(name for name in known if name.startswith(unknown[1]))
        close = completions or difflib.get_close_matches(unknown[1], sorted(known), n=1, cutoff=0.6)
        return f"; did you mean {close[0]}?" if close else ""

    def _all_actions(self) -> Iterator[argparse.Action]:
        """Iterate over the actions of this parser and of its sub-commands."""
        for action in self._actions:
            yield action
            if isinstance(action.choices, dict):
                for parser in action.choices.values():
                    yield from parser._all_actions()
