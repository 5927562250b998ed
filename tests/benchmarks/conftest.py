"""Benchmarks are programs in a folder, not a package: they find each other, and tests find them, by that folder."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
