"""Exception for user errors, with its message format and exit codes."""

from __future__ import annotations

from megatron_ext.utils.credentials import redact
from megatron_ext.utils.printable import printable

EXIT_USER_ERROR = 2
"""Exit code of every command on a user error."""

EXIT_STOPPED = 75
"""Exit code of work that stopped on request and can be resumed (EX_TEMPFAIL of sysexits.h: try again later)."""


class UserError(Exception):
    """Error in the user's input: a field, a file or a combination.

    The command line prints it as one line on standard error and exits with code 2, without a traceback. Control
    characters in it, from a file's text or a name, are shown as escapes, and credentials in URLs as ***.

    Args:
        where: configuration field (dotted), command-line option or file with the error.
        problem: description of the error with the offending value.
        hint: hint how to fix it.
    """

    def __init__(self, where: str, problem: str, hint: str) -> None:
        super().__init__(printable(redact(f"{where}: {problem}; {hint}")))
        self.where = where
        self.problem = problem
        self.hint = hint

    def __reduce__(self) -> tuple[type[UserError], tuple[str, str, str]]:
        """Pickle by its arguments, so that the error can be passed between processes."""
        return type(self), (self.where, self.problem, self.hint)
