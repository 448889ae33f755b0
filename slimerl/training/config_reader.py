"""Reading a Hugging Face `config.json` so that nothing in it is ignored by accident.

Flows in: the parsed file. Flows out: values, checked. Invariant: after `finish`, each key was read, can only have the
value that it has, or is known to have no effect on what the model computes.
"""

import sys
from collections.abc import Mapping
from typing import Any

from slimerl.resharding.families.blocks import LARGEST_INTEGER

WITHOUT_EFFECT = frozenset(
    (
        *("architectures", "torch_dtype", "dtype", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache"),
        *("initializer_range", "transformers_version", "max_window_layers", "_name_or_path", "is_llama_config"),
        *("transformers.js_config", "auto_map", "ep_size"),
        # names of a classifier's outputs; how many there are, its tensors say
        *("id2label", "label2id", "num_labels", "problem_type"),
        # losses and outputs of pre-training; the policy is trained by the algorithm's loss alone
        *("router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "output_router_logits"),
    )
)
"""Keys that do not change what the model computes."""


class UnsupportedModel(ValueError):
    """The model cannot be built exactly; the message names the key of `config.json`, or of the spec."""


def as_number(key: str, value: Any) -> float:
    """Raises UnsupportedModel where it is no finite number."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not abs(value) <= sys.float_info.max:
        raise UnsupportedModel(f"config.json: {key} = {value!r} is not a number")
    return float(value)


def at_least(least: float, key: str, value: float) -> float:
    """Raises UnsupportedModel where it is less."""
    if value < least:
        raise UnsupportedModel(f"config.json: {key} = {value:g} is less than {least:g}; correct it")
    return value


class ConfigReader:
    """`config.json` with a memory of which keys were asked for. A key whose value is null counts as absent, but for
    `is_null`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return self._config.get(key) is not None

    def is_null(self, key: str) -> bool:
        """Stated to be null, where that means something else than absence."""
        self._read.add(key)
        return key in self._config and self._config[key] is None

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        value = self._config.get(key)
        return default if value is None else value

    def required(self, key: str) -> Any:
        """Raises UnsupportedModel where the key is absent."""
        value = self.get(key)
        if value is None:
            raise UnsupportedModel(f"config.json: '{key}' is missing")
        return value

    def integer(self, key: str, default: int | None = None, least: int = 1, most: int = LARGEST_INTEGER) -> int:
        """Raises UnsupportedModel where it is absent without a default, no integer, or not in [least, most]."""
        value = self.required(key) if default is None else self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
            raise UnsupportedModel(f"config.json: {key} = {value!r} is not {kind}")
        if value > most:
            shown = value if len(str(value)) < 20 else f"a number of {len(str(value))} digits"
            raise UnsupportedModel(
                f"config.json: {key} = {shown} is more than any model has, at most {most}; correct it"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Raises UnsupportedModel where it is absent without a default, or no number."""
        value = self.required(key) if default is None else self.get(key, default)
        return as_number(key, value)

    def flag(self, key: str, default: bool) -> bool:
        """Raises UnsupportedModel where it is neither true nor false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise UnsupportedModel(f"config.json: {key} = {value!r} is neither true nor false")
        return value

    def only(self, key: str, *buildable: Any, why: str = "") -> None:
        """The key may be absent or have one of these values. Raises UnsupportedModel."""
        value = self.get(key)
        if value is not None and value not in buildable:
            because = f": {why}" if why else ""
            raise UnsupportedModel(f"config.json: {key} = {value!r} is not supported, only {buildable[0]!r}{because}")

    def never(self, key: str, fix: str) -> None:
        """The key must be absent. Raises UnsupportedModel."""
        if (value := self.get(key)) is not None:
            raise UnsupportedModel(f"config.json: {key} = {value!r} is not supported: {fix}")

    def finish(self) -> None:
        """Raises UnsupportedModel naming a key that nothing has asked for."""
        for key, value in self._config.items():
            if key not in self._read | WITHOUT_EFFECT:
                raise UnsupportedModel(
                    f"config.json: unknown key '{key}' = {value!r}; if it does not change what the model computes, "
                    "add it to WITHOUT_EFFECT in slimerl/training/config_reader.py"
                )
