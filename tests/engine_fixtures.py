"""Real SGLang servers of tiny models, started once for the whole test session.

`engines(family="qwen3", tensor_parallel=2)` gives a running one; the same arguments give the same server.
`synced(engine, model)` puts a model's weights into it, proven, through the real transport.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from tiny_models import OWN_SIZES, make_tiny_model
from traces import Traces

from slimerl.engine.client import EngineClient
from slimerl.engine.launcher import Server, detect_device, start_server
from slimerl.resilience.deadline import Deadline
from slimerl.samples.messages import EngineInfo
from slimerl.spec import RunSpec
from slimerl.spec.load import spec_from_tree

START_S = 240.0
ROUTED = "--enable-return-routed-experts"
"""For engines of models with experts: requests may ask for them."""


@dataclass(frozen=True)
class RunningEngine:
    info: EngineInfo
    server: Server
    model_path: Path

    def client(self, timeout_s: float = 30.0) -> EngineClient:
        return self.server.client(timeout_s)

    def ask(self, call: Callable[[EngineClient], Any], timeout_s: float = 30.0) -> Any:
        """One asynchronous call, from synchronous code."""

        async def once() -> Any:
            async with self.client(timeout_s) as client:
                return await call(client)

        return asyncio.run(once())


class Engines:
    """Starts servers on demand and keeps them until `close`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._running: dict[tuple[str, bool, int], RunningEngine] = {}
        self._started = 0

    def __call__(self, family: str = "qwen3", *, tied: bool = False, tensor_parallel: int = 1) -> RunningEngine:
        key = (family, tied, tensor_parallel)
        if key not in self._running:
            self._running[key] = self._start(*key)
        return self._running[key]

    @contextmanager
    def brief(self, *engines: tuple[str, int], **sizes: Any) -> Iterator[list[RunningEngine]]:
        """Servers of their own (family, tensor parallel size), started at once and stopped at the end: for a model
        that one module alone needs, or a server that does not outlive its test. `sizes`: as of `make_tiny_model`."""
        started = [self._launch(family, False, tensor_parallel, sizes) for family, tensor_parallel in engines]
        try:
            for engine in started:
                _wait_for(engine)
            yield started
        finally:
            _stop(started)

    def _start(self, family: str, tied: bool, tensor_parallel: int) -> RunningEngine:
        engine = self._launch(family, tied, tensor_parallel)
        try:
            _wait_for(engine)
        except BaseException:
            engine.server.stop()
            raise
        return engine

    def _launch(
        self, family: str, tied: bool, tensor_parallel: int, sizes: Mapping[str, Any] | None = None
    ) -> RunningEngine:
        name = f"{family}-{'tied' if tied else 'untied'}"
        name += "".join(f"-{key}-{value}" for key, value in (sizes or {}).items())
        model_path = self._directory / name
        if not model_path.exists():
            make_tiny_model(family, model_path, tied=tied, **(sizes or {}))
        routed = {"extra_args": [ROUTED]} if "num_experts_per_tok" in OWN_SIZES.get(family, {}) else {}
        spec = engine_spec(model_path, self._directory / f"{name}-tp{tensor_parallel}", tensor_parallel, **routed)
        server = start_server(spec, self._started, detect_device())
        self._started += 1
        info = EngineInfo(server.engine_id, server.url, server.admin_key, tensor_parallel)
        return RunningEngine(info, server, model_path)

    def close(self) -> None:
        """Stop all; whatever one leaves behind fails the session."""
        _stop(list(self._running.values()))


def _wait_for(engine: RunningEngine) -> None:
    asyncio.run(engine.server.wait_until_healthy(Deadline(f"{engine.server.engine_id} to start", START_S)))


def _stop(engines: Sequence[RunningEngine]) -> None:
    for engine in engines:
        traces = None
        if engine.server.process.poll() is None:
            root = psutil.Process(engine.server.process.pid)
            traces = Traces.of([root, *root.children(recursive=True)])
            traces.files.add(str(engine.server.private_dir.path))
        engine.server.stop()
        if traces is not None:
            traces.wait_until_gone()


def engine_spec(model_path: Path, run_dir: Path, tensor_parallel: int = 1, **engine: Any) -> RunSpec:
    """A run spec of which only the engine's part matters."""
    tree = {
        "name": "engine-test",
        "output_dir": str(run_dir),
        "model": {"path": str(model_path)},
        "data": {"train_path": "unused.jsonl", "max_prompt_tokens": 256},
        "training": {"steps": 1, "prompts_per_step": 8},
        "engine": {"tensor_parallel": tensor_parallel, "threads": 1, "max_total_tokens": 20_000, **engine},
    }
    return spec_from_tree(tree, "engine_fixtures")


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    running = Engines(tmp_path_factory.mktemp("engines"))
    yield running
    running.close()
