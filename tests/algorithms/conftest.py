"""The generated table of all algorithms is a tool of `tools/`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
