"""Text files, each of which is one document."""

from __future__ import annotations

from collections.abc import Iterator

from data_prep.documents import Advance, MalformedError, Problems
from data_prep.reading.fields import Fields, Found
from data_prep.reading.inputs import InputFile
from data_prep.reading.registry import register
from data_prep.reading.whole_files import read_text
from megatron_ext.utils.printable import printable

SUFFIXES = (
    *(".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".html", ".css", ".sql", ".sh"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".js", ".ts", ".go", ".rs", ".rb", ".r"),
    *(".jl", ".scala", ".kt", ".swift", ".php", ".pl", ".lua", ".hs", ".ml"),
)


@register(*SUFFIXES, is_plain_text=True)
def read_text_file(file: InputFile, fields: Fields, problems: Problems, advance: Advance) -> Iterator[Found]:
    """Read a text file as one document; its domain is its first-level folder. A file without text is malformed."""
    try:
        text = read_text(file, advance)
    except MalformedError as error:
        problems.report(file.location, None, error.reason, error.detail, error.hint)
        return
    assert fields.default is not None, "the corpus has given its name"
    yield Found("", text, printable(file.parts[0]) if len(file.parts) > 1 else fields.default)
