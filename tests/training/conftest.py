from __future__ import annotations

import sys
from pathlib import Path

# The questions of few-shot tasks are a module of the evaluation's tests, even if those tests are not collected.
sys.path.append(str(Path(__file__).parents[1] / "evaluation" / "fewshot"))
