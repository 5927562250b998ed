"""Makes the benchmarks importable: they are programs in a folder and not a package."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
