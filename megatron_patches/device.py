"""Patches that make "the device" the CPU. Each replaces something that only raises without CUDA."""

import contextlib
import importlib
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_patches.registry import cpu_patch


class _Stream:
    """Work on the CPU is done when the call returns: every order of streams holds by itself."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def synchronize(self) -> None: ...

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: Any) -> None: ...


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


def _nothing(*_: Any, **__: Any) -> None: ...


@cpu_patch
def torch_cuda_answers_for_the_cpu() -> None:
    """Megatron asks torch.cuda to name, order and seed the device; without CUDA these calls raise.

    For megatron-core 0.16.1: DDP and the distributed optimizer (current_device, streams), the seed of
    tensor_parallel.random (manual_seed), is_graph_capturing, profiling ranges.
    """
    the_stream = _Stream()
    answers: dict[str, Any] = {
        "current_device": lambda: torch.device("cpu"),
        "synchronize": _nothing,
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": lambda *_, **__: the_stream,
        "default_stream": lambda *_, **__: the_stream,
        "stream": lambda _: the_stream,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        "is_current_stream_capturing": lambda: False,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)


@cpu_patch
def tensors_stay_on_the_cpu() -> None:
    """`tensor.cuda()` and `module.cuda()` return the object itself: there is nowhere else to go.

    For megatron-core 0.16.1: embeddings tied over pipeline stages (language_module), loaded optimizer states.
    """
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]


@cpu_patch
def random_state_is_the_cpus() -> None:
    """tensor_parallel.random reads and writes the CUDA generator's state through private torch functions.

    For megatron-core 0.16.1: the tracker that seeds tensor-parallel dropout and initialisation.
    """
    random = import_quietly("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()  # type: ignore[attr-defined]
    set_state = torch.set_rng_state
    random._set_cuda_rng_state = lambda state, *_, **__: set_state(state)  # type: ignore[attr-defined]


MODULES_WITH_LITERAL_CUDA = (
    "megatron.core.pipeline_parallel.schedules",  # total_num_tokens
    "megatron.core.optimizer.clip_grads",  # gradient norm
    "megatron.core.optimizer.optimizer",  # found_inf, _scale
    "megatron.core.utils",  # gradient norm without apex
    "megatron.core.models.common.embeddings.rope_utils",  # pinned memory: YaRN's cache under context parallelism
)
"""Modules that write device="cuda", or pin memory, on a path that a CPU run takes."""

_FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange")


class _TorchOnCpu(types.ModuleType):
    """`torch` as one Megatron module sees it: a factory's device="cuda" means the CPU, and nothing is pinned."""

    def __init__(self) -> None:
        super().__init__("torch")
        for name in _FACTORIES:
            setattr(self, name, self._on_cpu(getattr(torch, name)))

    @staticmethod
    def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            if kwargs.get("device") == "cuda":
                kwargs["device"] = "cpu"
            kwargs.pop("pin_memory", None)
            return factory(*args, **kwargs)

        return call

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@cpu_patch
def cuda_literal_means_cpu() -> None:
    """Some modules write device="cuda" where they mean the current device.

    For megatron-core 0.16.1: the modules in MODULES_WITH_LITERAL_CUDA, each for the reason beside its name.
    """
    torch_on_cpu = _TorchOnCpu()
    for name in MODULES_WITH_LITERAL_CUDA:
        import_quietly(name).torch = torch_on_cpu  # type: ignore[attr-defined]


@cpu_patch
def optimizers_accept_cpu_tensor_types() -> None:
    """The optimizers ask `parameter.type() == "torch.cuda.FloatTensor"`: in their eyes CPU tensors are CUDA ones.

    For megatron-core 0.16.1: distrib_optimizer, optimizer and clip_grads refuse other type names.
    """
    real = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return real(self, *args, **kwargs)
        name = real(self)
        asked_by = sys._getframe(1).f_globals.get("__name__", "")
        return name.replace("torch.", "torch.cuda.", 1) if asked_by.startswith("megatron.core.optimizer") else name

    torch.Tensor.type = type_  # type: ignore[method-assign, assignment]


@contextlib.contextmanager
def without_import_warnings() -> Iterator[None]:
    """Megatron warns on import about each CUDA extension that is missing; on a CPU all are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def import_quietly(name: str) -> types.ModuleType:
    """Import a Megatron module `without_import_warnings`."""
    with without_import_warnings():
        return importlib.import_module(name)
