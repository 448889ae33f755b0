"""The planner's tests use the linear program and the layout matrix of `tools/`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
