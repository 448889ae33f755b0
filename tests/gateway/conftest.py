"""The rollout's own scene and fake engines, and the tools."""

import sys
from pathlib import Path

HERE = Path(__file__).parents[1]
sys.path[:0] = [str(HERE / "rollout"), str(HERE / "engine"), str(HERE.parent / "tools")]
