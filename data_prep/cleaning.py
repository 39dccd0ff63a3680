"""Text cleaning as a datatrove step: one Unicode form, one line ending, no control characters.

Line endings (CR LF, CR, vertical tab, form feed, and U+0085, next line) become LF. NUL and other control characters
(Unicode category Cc) except tab and LF are removed. The text is converted to normalization form C (Unicode Standard
Annex 15). A document with only whitespace left is dropped. The step's statistics count changed and dropped documents by
reason: `changed_*` counts documents, `removed_*` characters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from datatrove.data import Document
from datatrove.pipeline.filters.base_filter import BaseFilter
from datatrove.pipeline.writers.disk_base import DiskWriter

from data_prep.combining_marks import normalize
from data_prep.ledger import DropCounter, Ledger
from megatron_ext.utils.errors import UserError

_LINE_ENDS = re.compile(r"\r\n?|[\x0b\x0c\x85]")
_CONTROLS = re.compile(r"[\x01-\x08\x0e-\x1f\x7f-\x9f]")  # NUL is counted separately; line endings are replaced before


@dataclass(frozen=True, kw_only=True)
class CleaningOptions:
    """Options of text cleaning.

    Attributes:
        unicode_form: normalization form; None leaves the text unchanged.
        line_ends: convert all line endings to LF.
        controls: remove control characters.
        nul: `remove` NUL characters, `drop` documents with a NUL character (often binary data), or `stop` with an error
            at the first NUL character.
    """

    unicode_form: Literal["NFC", "NFKC"] | None = "NFC"
    line_ends: bool = True
    controls: bool = True
    nul: Literal["remove", "drop", "stop"] = "remove"


class Clean(BaseFilter):
    """datatrove filter that cleans the text of documents and drops empty documents.

    The step's statistics are `changed_line_ends`, `changed_nul`, `changed_controls`, `changed_unicode`, `changed`
    (documents with any of these changes), `removed_nul`, `removed_controls` (characters), `dropped_nul` and
    `dropped_empty`.

    Args:
        options: options of the cleaning.
        exclusion_writer: receives the dropped documents, and writes or counts them.
        ledger: receives the counts of changed documents by split.
    """

    name = "clean"

    def __init__(
        self,
        options: CleaningOptions | None = None,
        exclusion_writer: DiskWriter | DropCounter | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        super().__init__(exclusion_writer)
        self.options = options or CleaningOptions()
        self.ledger = ledger

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        """Clean a document in place.

        Returns:
            True, or False and the reason for dropping it.

        Raises:
            UserError: the document contains a NUL character and `nul` is `stop`.
        """
        before = doc.text
        if "\0" in doc.text and not self._remove_nul(doc):
            return False, "nul"
        if self.options.line_ends:
            self._change(doc, _LINE_ENDS.sub("\n", doc.text), "line_ends")
        if self.options.controls:
            text, removed = _CONTROLS.subn("", doc.text)
            self._change(doc, text, "controls", removed)
        if self.options.unicode_form is not None:
            self._change(doc, normalize(doc.text, self.options.unicode_form), "unicode")
        if doc.text != before:
            self.stat_update("changed")
        return True if doc.text.strip() else (False, "empty")

    def _remove_nul(self, doc: Document) -> bool:
        if self.options.nul == "stop":
            raise UserError(
                doc.id, "the text contains a NUL character", "repair it, or pass --nul remove or --nul drop"
            )
        if self.options.nul == "drop":
            return False
        self._change(doc, doc.text.replace("\0", ""), "nul", doc.text.count("\0"))
        return True

    def _change(self, doc: Document, text: str, reason: str, removed: int = 0) -> None:
        if text == doc.text:
            return
        doc.text = text
        self.stat_update(f"changed_{reason}")
        if self.ledger is not None:
            self.ledger.changed[doc.metadata["split"], reason] += 1
        if removed:
            self.stat_update(f"removed_{reason}", value=removed)
