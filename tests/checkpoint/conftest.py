from __future__ import annotations

import sys
from pathlib import Path

# What a rank does in a case; the tests of conversion use it, too, and may be run without those here.
sys.path.append(str(Path(__file__).parent))
