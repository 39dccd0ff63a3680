import sys
from pathlib import Path

# Where the programs, started by hand, find what they share.
sys.path.append(str(Path(__file__).parents[2] / "tools"))
