"""The worked examples of the pages under docs/extending"""

import re
from pathlib import Path

PAGES = Path(__file__).parent.parent / "docs" / "extending"


def code_blocks(page: str) -> list[str]:
    """Return the fenced Python blocks of a page, in order

    Args:
        page: File name below docs/extending, such as `mixer.md`.
    """
    return re.findall(r"^```python\n(.*?)^```$", (PAGES / page).read_text(), re.MULTILINE | re.DOTALL)
