"""Model families: one declarative table each. `family_of(config)` finds the one that a `config.json` names.

To add a family: write its table in a module of its own from the blocks of `blocks.py`, and list it here.
"""

from collections.abc import Mapping
from typing import Any

from slimerl.resharding.families.blocks import ConfigError
from slimerl.resharding.families.deepseek_v3 import DEEPSEEK_V3, KIMI_K2
from slimerl.resharding.families.family import Family, Form, model_dtype
from slimerl.resharding.families.glm4_moe import GLM4_MOE
from slimerl.resharding.families.llama import LLAMA
from slimerl.resharding.families.qwen2 import QWEN2
from slimerl.resharding.families.qwen3 import QWEN3
from slimerl.resharding.families.qwen3_moe import QWEN3_MOE
from slimerl.resharding.families.scales import BlockScales

_ALL = (LLAMA, QWEN2, QWEN3, QWEN3_MOE, GLM4_MOE, DEEPSEEK_V3, KIMI_K2)
FAMILIES = {family.model_type: family for family in _ALL}

__all__ = ["FAMILIES", "BlockScales", "ConfigError", "Family", "Form", "family_of", "model_dtype"]


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a `config.json`, by its model_type. Raises ConfigError naming the known ones."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ConfigError(f"config.json: model_type {model_type!r} has no table; known: {known}")
    return FAMILIES[model_type]
