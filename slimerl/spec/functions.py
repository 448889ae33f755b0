"""Functions of the user's own, named in a spec by import path.

Flows in: `package.module:function` and the parameters that it must take. Flows out: the function.
Invariant: what is given back can be called with those parameters.
"""

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import Field

ImportPath = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]


class CustomFunctionError(ValueError):
    """A function of the user's cannot be loaded, or gave back what it must not; names the key and the function."""


def load_function(path: str, parameters: Sequence[str], key: str) -> Callable[..., Any]:
    """The function `package.module:function`, whose parameters without a default must be `parameters`, in order.

    Raises:
        CustomFunctionError: it cannot be imported, is none, or has other parameters.
    """
    module_name, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise CustomFunctionError(f"{key}: cannot load {path}: {error}; is it on PYTHONPATH?") from error
    if not callable(function):
        raise CustomFunctionError(f"{key}: {path} is a {type(function).__name__}, not a function")
    try:
        declared = inspect.signature(function).parameters.values()
    except ValueError:  # some of those written in C
        raise CustomFunctionError(
            f"{key}: {path} does not tell its parameters; it must take ({', '.join(parameters)})"
        ) from None
    wanted = [each.name for each in declared if each.default is inspect.Parameter.empty]
    if wanted != list(parameters):
        raise CustomFunctionError(f"{key}: {path} takes ({', '.join(wanted)}), it must take ({', '.join(parameters)})")
    return function
