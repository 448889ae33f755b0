"""Programs that a model may write, judged by a real worker: each hostile one is a wrong answer with a name of its own,
reaches nothing outside, and leaves nothing behind."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from sandbox_bench import OPTIONS, bench_with, request

from slimerl.resilience.deadline import Deadline
from slimerl.rewards.outcome import Scored, outcome_name

GIB = 2**30

# --- limits

LIMITS = {
    "hangs": ("while True: pass", "time_limit"),
    "sleeps past its deadline": ("import time; time.sleep(3600)", "time_limit"),
    "ignores signals": (
        "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except Exception: pass\n"
        "while True: pass",
        "time_limit",
    ),
    "allocates 64 GB": ("hoard = bytearray(64 * 2**30)", "memory_limit"),
    "allocates bit by bit": ("hoard = [b'x' * 2**20 * 16 for _ in range(64)]", "memory_limit"),
    "prints 1 GB": (
        "import sys\nblock = 'x' * 2**20\nfor _ in range(1024): sys.stdout.write(block)",
        "output_limit",
    ),
    "prints 1 GB of errors": (
        "import os\nblock = b'x' * 2**20\nfor _ in range(1024): os.write(2, block)",
        "output_limit",
    ),
    "writes 1 GB into a file": (
        "with open('f', 'wb') as f:\n    for _ in range(1024): f.write(bytes(2**20))",
        "raised",
    ),
    "writes 1 GB into many files": (
        "for n in range(1024):\n    with open(str(n), 'wb') as f: f.write(bytes(2**20))",
        "raised",
    ),
    "fork bomb": ("import os\nwhile True: os.fork()", "raised"),
    "fork bomb that goes on": (
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "time_limit",
    ),
    "threads without end": (
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
        "raised",
    ),
    "reads for ever": ("print(input())\nopen('/dev/zero').read()", "memory_limit"),
}


@pytest.mark.parametrize(("source", "verdict"), LIMITS.values(), ids=LIMITS)
def test_r1_a_program_beyond_a_limit_is_a_wrong_answer_with_a_name(bench, source, verdict):
    """Faults: time, memory, output, files, processes and threads without end. The worker goes on, and does not grow."""
    worker = bench.worker
    assert bench.judge(source) == Scored(0.0, False, verdict)
    assert bench.programs() == []
    assert bench.worker == worker
    assert worker.memory_info().rss < GIB // 4


def test_r1_ways_around_the_limits_are_refused(bench):
    """Faults: System V segments, memory files, and a file system of the program's own in a namespace of its own: each
    could take the machine's memory past every limit of the process. And what only a privileged program may do."""
    source = (
        "import ctypes, errno\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "calls = [lambda: libc.shmget(0, 2**30, 0o1600), lambda: libc.memfd_create(b'x', 0),\n"
        "         lambda: libc.unshare(0x10000000), lambda: libc.syscall(56, 0x10000011, 0, 0, 0, 0),\n"
        "         lambda: libc.mount(b'x', b'/tmp', b'tmpfs', 0, b''), lambda: libc.ptrace(0, 0, 0, 0),\n"
        "         lambda: libc.sethostname(b'x', 1)]\n"
        "refused = sum(call() == -1 and ctypes.get_errno() == errno.EPERM for call in calls)\n"
        "print(refused)"
    )
    assert bench.judge(source, json.dumps({"tests": [{"stdout": "7"}]})) == Scored(1.0, True)


# --- nothing outside is reached


def test_r1_a_program_has_no_network(bench):
    """Fault: connections to a listener on this machine, by TCP and by an abstract name, and to a public address."""
    name = f"\0slimerl-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(name)
        unix.listen()
        source = (
            "import socket\n"
            "reached = 0\n"
            f"here = ('127.0.0.1', {tcp.getsockname()[1]})\n"
            f"for family, address in [(2, here), (1, {name!r}), (2, ('1.1.1.1', 53))]:\n"
            "    try:\n"
            "        socket.socket(family).connect(address)\n"
            "        reached += 1\n"
            "    except OSError: pass\n"
            "print(reached)"
        )
        assert bench.judge(source, json.dumps({"tests": [{"stdout": "0"}]})) == Scored(1.0, True)
        tcp.settimeout(0)
        unix.settimeout(0)
        for listener in (tcp, unix):
            with pytest.raises(BlockingIOError):
                listener.accept()


def test_r1_a_program_writes_nowhere_but_into_its_directory(bench, tmp_path):
    """Fault: it tries the run directory, temporary directories, the home, the interpreter, and its own source."""
    targets = [
        tmp_path,
        tempfile.gettempdir(),
        Path.home(),
        sys.base_prefix,
        "/",
        "/usr",
        "/dev",
        "/dev/shm",
        "/program",
    ]
    mark = f"mark-{os.getpid()}"
    source = (
        "import os\n"
        f"for place in {[str(each) for each in targets]!r}:\n"
        "    try:\n"
        f"        with open(os.path.join(place, {mark!r}), 'w') as file: file.write('x')\n"
        "    except OSError: pass\n"
        "try: open('/program/main.py', 'w')\n"
        "except OSError: print(sorted(os.listdir('/tmp')))"
    )
    # What it takes for /tmp is its own directory, and the one place where it can write.
    assert bench.judge(source, json.dumps({"tests": [{"stdout": f"['{mark}']"}]})) == Scored(1.0, True)
    assert not [place for place in targets if (Path(place) / mark).exists()]
    assert bench.judge("import os; print(os.listdir('/tmp'))", json.dumps({"tests": [{"stdout": "[]"}]})).correct


def test_r1_a_program_sees_neither_other_processes_nor_the_run_directory(bench, tmp_path):
    """Fault: it looks for this process's environment, the run's address file, the machine's users and tokens."""
    secret = tmp_path / "rollout.json"
    secret.write_text("token")
    paths = [f"/proc/{os.getpid()}/environ", "/proc/1/cmdline", "/proc/self/maps", secret, __file__, "/etc/passwd"]
    source = (
        "import os\n"
        f"print([path for path in {[str(path) for path in paths]!r} if os.path.exists(path)],\n"
        "      [name for name in os.environ if name not in ('PATH', 'HOME', 'LANG', 'OMP_NUM_THREADS')],\n"
        "      [fd for fd in range(3, 100) if os.path.exists(f'/dev/fd/{fd}')], os.getuid() == 0)\n"
        "for fd in range(3, 100):\n"
        "    try: os.fstat(fd); print('descriptor', fd)\n"
        "    except OSError: pass"
    )
    assert bench.judge(source, json.dumps({"tests": [{"stdout": "[] [] [] False"}]})) == Scored(1.0, True)


@pytest.mark.parametrize("call", ["os.kill(os.getppid(), 9)", "os.kill(-1, 9)", "os.killpg(0, 9)"])
def test_r1_a_program_that_kills_its_parent_kills_nobody(bench, call):
    worker = bench.worker
    bench.judge(f"import os\n{call}")
    assert bench.worker == worker
    assert worker.is_running()
    assert bench.judge("print(input())").correct


def test_r1_a_program_that_closes_its_output_still_ends_by_itself(bench):
    begun = time.monotonic()
    assert bench.judge("import os\nprint(input(), flush=True)\nos.close(1); os.close(2)") == Scored(1.0, True)
    assert time.monotonic() - begun < OPTIONS["test_wall_s"]


def test_r1_a_daemon_does_not_outlive_its_program(bench):
    """Fault: a double fork into a session of its own, which holds the output open."""
    source = (
        "import os, time\n"
        "print(input(), flush=True)\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0: time.sleep(3600)\n"
        "    os._exit(0)\n"
        "os.wait()"
    )
    begun, worker = time.monotonic(), bench.worker
    assert bench.judge(source) == Scored(1.0, True)
    assert time.monotonic() - begun < OPTIONS["test_wall_s"]
    assert bench.programs() == []
    assert bench.worker == worker


# --- nothing is left


@pytest.mark.parametrize("how", ["deadline", "kill"])
def test_r1_a_program_dies_with_its_worker(how):
    """Fault: the worker is killed while a program runs, by the pool at its deadline or by the machine."""
    with bench_with(test_wall_s=60.0, timeout_s=61.0) as bench:
        if how == "deadline":
            bench.pool.timeout_s = 2.0
        scoring = bench.loop.create_task(bench.pool.score(request("import time; time.sleep(3600)")))

        async def until_it_runs() -> list[psutil.Process]:
            async with asyncio.timeout(20):
                while not (running := bench.programs()):
                    await asyncio.sleep(0.02)
            return running

        programs = bench.loop.run_until_complete(until_it_runs())
        if how == "kill":
            bench.worker.kill()
        outcome = bench.loop.run_until_complete(scoring)
        assert outcome.reason == ("timeout" if how == "deadline" else "worker_died")
        Deadline("the program to end", 10).wait_until(
            lambda: not any(each.is_running() for each in programs), poll_s=0.02
        )
        bench.pool.timeout_s = 60.0
        assert bench.judge("print(input())").correct
        assert bench.pool.take_events() == Counter(worker_replaced=1)


def test_r1_many_executions_leave_nothing_behind(tmp_path, monkeypatch):
    """Processes, descriptors, temporary files, mounts and memory after 150 programs, two of five of them hostile; the
    executions per second are printed."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    programs = ["print(input())"] * 3 + ["import os\nwhile True: os.fork()", "print('x' * 2**22)"]
    with bench_with() as bench:
        for source in programs:
            bench.judge(source)
        worker = bench.worker
        before, memory = _held(worker), worker.memory_info().rss
        begun, used = time.monotonic(), _cpu_s(worker)
        for number in range(150):
            bench.judge(programs[number % len(programs)])
        seconds, cpu_s = time.monotonic() - begun, _cpu_s(worker) - used
        print(f"sandbox: {150 / seconds:.0f} executions/s with one worker, {cpu_s / 150 * 1e3:.1f} ms of CPU each")
        assert bench.worker == worker
        assert _held(worker) == before
        assert worker.memory_info().rss < memory + 8 * 2**20
        assert list(tmp_path.iterdir()) == []


def _cpu_s(worker: psutil.Process) -> float:
    return sum(worker.cpu_times()[:4])


def _held(worker: psutil.Process) -> tuple[int, ...]:
    """Descriptors, threads, children, mounts."""
    mounts = len(Path(f"/proc/{worker.pid}/mounts").read_text().splitlines())
    return worker.num_fds(), worker.num_threads(), len(worker.children(recursive=True)), mounts


# --- where it cannot be had

WITHOUT_NAMESPACES = (
    "from slimerl.rewards.sandbox.system_calls import refuse_dangerous_calls\n"
    "refuse_dangerous_calls()\n"  # the same filter, for a whole machine: no clone into namespaces
)


def test_code_is_refused_where_namespaces_cannot_be_had():
    """Fault: the kernel refuses new namespaces. A worker does not start, and the doctor's question is answered no."""
    program = WITHOUT_NAMESPACES + (
        "import asyncio, runpy\n"
        "from slimerl.rewards.build import build_reward\n"
        "from slimerl.rewards.outcome import RewardUnavailable\n"
        "from slimerl.spec.reward import CodeReward\n"
        "try: asyncio.run(build_reward(CodeReward(kind='code')).start())\n"
        "except RewardUnavailable as error: print(error)\n"
        "runpy.run_module('slimerl.rewards.sandbox', run_name='__main__')"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    for text in (ended.stdout, ended.stderr):
        assert "no new namespaces can be made here" in text
        assert "kernel.unprivileged_userns_clone=1" in text


def test_every_verdict_is_counted_under_its_own_name():
    verdicts = {verdict for _, verdict in LIMITS.values()}
    names = {outcome_name(Scored(0.0, False, verdict)) for verdict in verdicts}
    assert names == {f"wrong_{verdict}" for verdict in verdicts}
