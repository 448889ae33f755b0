"""From a name in a spec to an environment.

Flows in: `reasoning_gym`, `verifiers`, or the import path of a function of the user's, and its options.
Flows out: an `Environment`. The packages behind the first two are imported only when they are named.
"""

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from slimerl.environments.environment import Environment
from slimerl.spec.functions import CustomFunctionError

ADAPTERS = {
    "reasoning_gym": ("slimerl.environments.reasoning_gym_adapter", "reasoning-gym"),
    "verifiers": ("slimerl.environments.verifiers_adapter", "'verifiers>=0.1.8,<0.1.9'"),
}
"""Name → our module, and what pip installs."""


class MissingExtra(CustomFunctionError):
    """A package that the environment needs is not installed."""


def make_environment(name: str, options: Mapping[str, Any]) -> Environment:
    """Raises CustomFunctionError, or what the environment's own function raises."""
    made = load_maker(name, options)(**options)
    if not (callable(getattr(made, "reset", None)) and callable(getattr(made, "step", None))):
        raise CustomFunctionError(
            f"agent.environment: {name} made a {type(made).__name__}, which has no reset and step; see "
            "slimerl/environments/environment.py"
        )
    return made


def load_maker(name: str, options: Mapping[str, Any]) -> Any:
    """What makes the environment, and takes these options. Raises CustomFunctionError."""
    make = _function(name)
    try:
        inspect.signature(make).bind(**options)
    except TypeError as error:
        raise CustomFunctionError(f"agent.options: {name} cannot be made from {dict(options)}: {error}") from error
    return make


def _function(name: str) -> Any:
    if name in ADAPTERS:
        module, package = ADAPTERS[name]
        try:
            return importlib.import_module(module).make
        except ImportError as error:
            raise MissingExtra(
                f"agent.environment: {name} is not installed here ({error}); pip install {package}"
            ) from error
    module_name, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module_name), function)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise CustomFunctionError(f"agent.environment: cannot load {name}: {error}; is it on PYTHONPATH?") from error
