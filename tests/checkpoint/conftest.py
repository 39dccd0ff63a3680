from __future__ import annotations

import sys
from pathlib import Path

# Functions run by each rank. The tests of conversion also use them, and may be run alone.
sys.path.append(str(Path(__file__).parent))
