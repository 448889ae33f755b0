"""The shim reaches the engine's processes alone, and what it stands in for never computes in silence."""

import subprocess
import sys


def run(code: str) -> str:
    """In a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_process_that_only_imports_the_rooms_code_is_left_as_it_was() -> None:
    out = run(
        "import sys; before = list(sys.meta_path)\n"
        "import slimerl.engine.inside.serve, slimerl.engine.launcher\n"
        "import importlib.util, os\n"
        "print(sys.meta_path == before, importlib.util.find_spec('sgl_kernel'), os.environ.get('TORCHDYNAMO_DISABLE'))"
    )
    assert out == "True None None"


def test_a_stand_in_can_be_imported_and_decorate_but_says_its_name_when_it_is_to_compute() -> None:
    out = run(
        "from slimerl.engine.inside.cpu_shim import install; install(); install()\n"
        "import triton, triton.language as tl, sgl_kernel\n"
        "from sgl_kernel.anything import Kernel, compute\n"
        "@triton.jit\n"
        "def kernel(): return 7\n"
        "@triton.autotune(configs=[])\n"
        "def tuned(): return 8\n"
        "class Mine(Kernel): pass\n"
        "print(kernel(), tuned(), triton.cdiv(7, 2), triton.next_power_of_2(5), type(Mine(1)).__name__)\n"
        "try: compute(1)\n"
        "except NotImplementedError as error: print(error)\n"
    )
    assert out.splitlines() == [
        "7 8 4 8 Mine",
        "sgl_kernel.anything.compute needs CUDA, but the engine runs without it",
    ]


def test_transformers_is_told_the_truth_about_packages_that_are_not_there() -> None:
    out = run(
        "from slimerl.engine.inside.cpu_shim import install; install()\n"
        "from transformers.utils import is_torchvision_available\n"
        "print(is_torchvision_available())"
    )
    assert out == "False"


def test_a_hook_changes_a_module_when_it_is_imported_and_one_that_already_is() -> None:
    out = run(
        "from slimerl.engine.inside.import_hooks import after_import\n"
        "import json\n"
        "for name in ('json', 'colorsys', 'colorsys'):\n"
        "    after_import(name, lambda module: setattr(module, 'seen', getattr(module, 'seen', 0) + 1))\n"
        "import colorsys\n"
        "print(json.seen, colorsys.seen, colorsys.rgb_to_hsv(0, 0, 1)[2])"
    )
    assert out == "1 2 1"


LAUNCH = """
import multiprocessing, threading, types
from slimerl.engine.inside.cpu_shim import _fork_workers
multiprocessing.set_start_method("spawn")
class Engine:
    @classmethod
    def _launch_scheduler_processes(cls, server_args, *, option=None):
        return multiprocessing.get_start_method()
    @classmethod
    def _launch_detokenizer_subprocesses(cls, server_args):
        raise RuntimeError("it did not start")
_fork_workers(types.SimpleNamespace(Engine=Engine))
def method(dp_size=1, numa_node=None):
    args = types.SimpleNamespace(dp_size=dp_size, numa_node=numa_node)
    return Engine._launch_scheduler_processes(args, option=1)
print(method(), method(dp_size=2), method(numa_node=[0]))
try: Engine._launch_detokenizer_subprocesses(types.SimpleNamespace(dp_size=1, numa_node=None))
except RuntimeError: print(multiprocessing.get_start_method())
end = threading.Event()
other = threading.Thread(target=end.wait); other.start()
print(method())
end.set(); other.join()
"""


def test_workers_are_forked_where_nothing_speaks_against_it_and_nothing_else_is() -> None:
    """Not where a controller starts them, a NUMA node is wanted, or a thread runs; nor anything started later."""
    assert run(LAUNCH).split() == ["fork", "spawn", "spawn", "spawn", "spawn"]


ORPHAN = """
import os, signal, time
from slimerl.engine.inside.serve import _tie_forked_processes
_tie_forked_processes()
reader, writer = os.pipe()
middle = os.fork()
if middle == 0:
    if os.fork() == 0:
        os.write(writer, b"ready")
        time.sleep(60)
    time.sleep(60)
os.close(writer)
os.read(reader, 5)
os.kill(middle, signal.SIGKILL)
print(os.read(reader, 1))
"""


def test_a_forked_worker_ends_with_whoever_forked_it() -> None:
    """The pipe ends when the last of those that could write into it is gone."""
    assert run(ORPHAN) == "b''"
