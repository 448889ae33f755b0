"""Run a function on a module right after it is first imported, without importing it now.

SGLang is never edited; where one of its modules needs another value, a hook sets it before anyone uses it.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

Patch = Callable[[ModuleType], None]


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds only the modules that have a patch, and lets the ordinary machinery load them."""

    def __init__(self) -> None:
        self.patches: dict[str, list[Patch]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.patches:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for patch in self.patches[fullname]:
                patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_finder = _AfterImport()


def after_import(module_name: str, patch: Patch) -> None:
    """Call `patch(module)` as soon as `module_name` has been executed; at once if it already was."""
    if module_name in sys.modules:
        patch(sys.modules[module_name])
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.patches.setdefault(module_name, []).append(patch)
