"""Lets the unmodified SGLang 0.5.23 serve on a machine without CUDA (torch for CPU, no triton, no sgl_kernel).

Flows in: nothing; `install()` is called by `serve.py` in the engine's processes alone, before SGLang is imported.
Flows out: stand-ins for packages that SGLang imports at module level but never runs on the `torch_native` path.
Invariant: a stand-in that SGLang does call raises and names itself; nothing computes a wrong number in silence.
"""

import importlib.abc
import importlib.machinery
import multiprocessing
import os
import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

from slimerl.engine.inside.batched_decode import install_batched_decode
from slimerl.engine.inside.import_hooks import after_import
from slimerl.engine.inside.invariant_linear import install_invariant_linear
from slimerl.engine.inside.keyed_sampler import install_keyed_sampler

_KERNEL_PACKAGES = ("triton", "sgl_kernel", "cutlass", "quack")
_MULTIMODAL_PACKAGES = ("torchvision", "torchaudio", "soundfile", "IPython")
_STAND_INS = frozenset({*_KERNEL_PACKAGES, *_MULTIMODAL_PACKAGES})

_CALLED_AS_DECORATORS = ("triton", "cutlass", "quack")
"""At import time SGLang calls these only to decorate its kernels; the kernels themselves never run here."""


class _Placeholder:
    """Base of the classes that a stand-in hands out, so that SGLang can subclass and construct them."""

    def __init__(self, *_args: object, **_options: object) -> None:
        pass


class _StandIn(ModuleType):
    """A module whose every attribute is another stand-in, or a class where the name is capitalised."""

    __version__ = "3.0.0"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, _StandInFinder(), is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full_name = f"{self.__name__}.{name}"
        value: Any
        if name[0].isupper():
            value = type(name, (_Placeholder,), {"__module__": self.__name__})
        else:
            value = sys.modules.get(full_name) or _StandIn(full_name)
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **options: Any) -> Any:
        if not self.__name__.startswith(_CALLED_AS_DECORATORS):
            raise NotImplementedError(f"{self.__name__} needs CUDA, but the engine runs without it")
        if len(args) == 1 and callable(args[0]) and not options:
            return args[0]
        return lambda function: function

    def __getitem__(self, _item: object) -> "_StandIn":
        return self


class _StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, _path: Any, _target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] not in _STAND_INS or _asked_by(sys._getframe(1), "transformers.utils.import_utils"):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "triton":  # used for sizes at import time, outside of any kernel
            module.cdiv = lambda a, b: -(a // -b)  # type: ignore[attr-defined]
            module.next_power_of_2 = lambda n: 1 << (n - 1).bit_length() if n > 0 else 1  # type: ignore[attr-defined]


def _asked_by(frame: FrameType | None, module_name: str) -> bool:
    """Is the import made by `module_name`? (transformers probes for packages and must be told the truth.)"""
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("importlib", "_frozen")):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == module_name


def _do_not_pin_host_memory(module: ModuleType) -> None:
    """`--enable-return-routed-experts` registers its host buffer with CUDA."""
    nothing: Callable[..., None] = lambda *_args, **_options: None  # noqa: E731
    module._cuda_host_register = nothing  # type: ignore[attr-defined]


def _fork_workers(module: ModuleType) -> None:
    """Spawned, each worker would import SGLang once more: 5 s of a core, for two to five of them. Forked, it has what
    the first process has imported."""
    for name in ("_launch_scheduler_processes", "_launch_detokenizer_subprocesses"):
        _fork_within(module.Engine, name)


def _fork_within(engine: type, name: str) -> None:
    stock = getattr(engine, name).__func__

    def launch(cls: type, server_args: Any, *args: Any, **options: Any) -> Any:
        if not _may_fork(server_args):
            return stock(cls, server_args, *args, **options)
        multiprocessing.set_start_method("fork", force=True)
        try:
            return stock(cls, server_args, *args, **options)
        finally:
            multiprocessing.set_start_method("spawn", force=True)

    setattr(engine, name, classmethod(launch))


def _may_fork(server_args: Any) -> bool:
    """Where threads run, whoever is forked may wait for ever for a lock that one of them held. With several groups for
    data parallelism a controller starts the workers, from threads; binding to NUMA nodes wants spawned processes."""
    controlled = server_args.dp_size * (getattr(server_args, "attn_dp_size", None) or 1) > 1
    threads = len(os.listdir("/proc/self/task"))
    return not controlled and not server_args.numa_node and threads == 1


def _dispatch_latent_attention(module: ModuleType) -> None:
    """DeepSeek: `torch_native` has no handler and would fall back to triton's."""
    module.AttentionBackendRegistry.register("torch_native", lambda _attention, _batch: module.AttnForwardMethod.MLA)


def install() -> None:
    """Must run before SGLang or torch's compiler is imported; calling it again changes nothing."""
    if any(isinstance(finder, _StandInFinder) for finder in sys.meta_path):
        return
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # inductor would take the stand-in for a real triton
    sys.meta_path.insert(0, _StandInFinder())
    after_import("sglang.srt.mem_cache.pool_host.common", _do_not_pin_host_memory)
    after_import("sglang.srt.models.deepseek_common.attention_backend_handler", _dispatch_latent_attention)
    after_import("sglang.srt.entrypoints.engine", _fork_workers)
    install_batched_decode()
    install_invariant_linear()
    install_keyed_sampler()
