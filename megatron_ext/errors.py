"""The one exception that stands for a mistake of the user's, with the form of its message."""

from __future__ import annotations

from megatron_ext.credentials import redacted
from megatron_ext.printable import printable

EXIT_USER_ERROR = 2
"""Exit code of every command when the user's input is at fault."""

EXIT_STOPPED = 75
"""Exit code of work that was asked to stop and can be resumed (EX_TEMPFAIL of sysexits.h: try again later)."""


class UserError(Exception):
    """A mistake in what the user gave: a field, a file, a combination.

    The command line prints it as one line on standard error and exits with code 2, without a traceback.
    Control characters in it, from a file's text or a name, are shown as escapes, and credentials in addresses as ***.

    Args:
        where: the configuration field (dotted), command-line option or file at fault.
        problem: what is wrong with it, naming the offending value.
        mend: what the user can do about it.
    """

    def __init__(self, where: str, problem: str, mend: str) -> None:
        super().__init__(printable(redacted(f"{where}: {problem}; {mend}")))
        self.where = where
        self.problem = problem
        self.mend = mend

    def __reduce__(self) -> tuple[type[UserError], tuple[str, str, str]]:
        """Rebuild from its parts, so that the error survives the trip between processes."""
        return type(self), (self.where, self.problem, self.mend)
