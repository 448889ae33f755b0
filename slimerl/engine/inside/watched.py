"""Which tensors does a model's `load_weights` really write, and as what?

SGLang answers a name that it does not know with success and ignores the tensor; it converts dtypes in silence. The
only general witness is the write itself: a watched tensor notes when an operation copies it into a plain one.
Works in the threads that some models load in, and through views, casts and concatenations.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map


class WriteLog:
    """What was seen: names written, and conversions as `(name, sent dtype, kept dtype)`."""

    def __init__(self) -> None:
        self.written: set[str] = set()
        self.converted: set[tuple[str, str, str]] = set()
        self.reading: str | None = None
        """The tensor last handed to the loader; names the culprit when it raises."""

    def watch(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same tensors, watched."""
        for name, tensor in tensors:
            self.reading = name
            yield name, _watched(tensor, self, frozenset({name}), tensor.dtype)


class _Watched(torch.Tensor):
    """A tensor that remembers where its bytes came from; shares memory with `plain`."""

    plain: torch.Tensor
    write_log: WriteLog
    origins: frozenset[str]
    sent_as: torch.dtype

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        sources: list[_Watched] = []

        def unwrap(value: Any) -> Any:
            if isinstance(value, _Watched):
                sources.append(value)
                return value.plain
            return value

        target = args[0] if args and _writes_first_argument(func) else None
        result = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))
        if isinstance(target, torch.Tensor) and not isinstance(target, _Watched):
            _note_write(target, sources)
            return result
        return tree_map(_rewrap(sources), result)


def _writes_first_argument(func: Any) -> bool:
    arguments = func._schema.arguments
    return bool(arguments) and arguments[0].alias_info is not None and arguments[0].alias_info.is_write


def _note_write(target: torch.Tensor, sources: list[_Watched]) -> None:
    for source in sources:
        log = source.write_log
        log.written |= source.origins
        if target.dtype != source.sent_as:
            log.converted |= {(name, _short(source.sent_as), _short(target.dtype)) for name in source.origins}


def _rewrap(sources: list[_Watched]) -> Callable[[Any], Any]:
    origins = frozenset[str]().union(*(source.origins for source in sources))

    def wrap(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and not isinstance(value, _Watched):
            return _watched(value, sources[0].write_log, origins, sources[0].sent_as)
        return value

    return wrap


def _watched(tensor: torch.Tensor, log: WriteLog, origins: frozenset[str], sent_as: torch.dtype) -> _Watched:
    watched = torch.Tensor._make_subclass(_Watched, tensor)
    watched.plain, watched.write_log, watched.origins, watched.sent_as = tensor, log, origins, sent_as
    return watched


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
