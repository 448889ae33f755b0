"""Helpers of other rooms' tests, and the tools."""

import sys
from pathlib import Path

HERE = Path(__file__).parents[1]
sys.path[:0] = [str(HERE / "training"), str(HERE / "resharding"), str(HERE.parent / "tools")]
