from __future__ import annotations

import sys
from pathlib import Path

# Functions run by each rank of the pool, which imports them by name.
sys.path.append(str(Path(__file__).parent))
