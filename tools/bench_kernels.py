"""Time our attention kernels and their peers on one GPU: `selectron bench kernels` without the rest of Selectron.

    PYTHONPATH=. python tools/bench_kernels.py --lengths 2048x50 --heads 16x128 --output out

Needs torch and Triton only. Options, report and exit codes are those of the command.
"""

from __future__ import annotations

import argparse
import sys

from kernels.bench import options
from kernels.bench.cases import OptionError


def main() -> int:
    """Run the benchmark. Return 0 on success, 1 if a result is wrong, 2 for a user error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_arguments(parser)
    try:
        return options.run(parser.parse_args())
    except OptionError as error:
        print(f"selectron: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
