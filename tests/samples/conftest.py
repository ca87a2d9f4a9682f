"""The drafter sample's modules, imported as its scripts import each other."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "samples" / "drafter"))
