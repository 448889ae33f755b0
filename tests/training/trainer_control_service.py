"""A control service over real HTTP that hands out prepared samples, in place of the rollout role."""

import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from slimerl.samples.messages import (
    ADDRESS_FILE,
    TOKEN_HEADER,
    BatchManifest,
    BatchTrained,
    EvaluateReply,
    EvaluateRequest,
    FetchRequest,
    NextBatchRequest,
    Refusal,
    ServiceAddress,
    Status,
    decode,
    encode,
)
from slimerl.samples.sample import Sample

TOKEN = "right"


def prepared_samples(step: int, groups: int = 3, size: int = 4, vocabulary: int = 130) -> list[Sample]:
    """Groups of samples with rewards 0 and 1, as the policy of version step - 1 would have made them."""
    random = np.random.default_rng(step)
    samples = []
    for group in range(groups):
        prompt = tuple(random.integers(0, vocabulary, int(random.integers(2, 6))).tolist())
        for number in range(size):
            sample = Sample(f"{step}/{group}/{number}", f"{step}/{group}", f"{group}", prompt)
            length = int(random.integers(1, 12))
            sample.append(
                random.integers(0, vocabulary, length).tolist(),
                logprobs=random.uniform(-6, -3, length).tolist(),
                version=step - 1,
            )
            sample.reward, sample.correct = float(number % 2), bool(number % 2)
            samples.append(sample)
    return samples


class ControlService:
    """`requests`: (path, message) in the order of arrival. Use as a context manager.

    Args of the constructor: `evaluation_polls`: how often it is asked for an evaluation that was begun until it has
    ended.
    """

    def __init__(self, run_dir: Path, steps: int, evaluation_polls: int = 1) -> None:
        self.evaluation_polls = evaluation_polls
        self.samples = {step: prepared_samples(step) for step in range(1, steps + 1)}
        self.requests: list[tuple[str, Any]] = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(200, b"ok")

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers[TOKEN_HEADER] != TOKEN:
                    return self._answer(401, encode(Refusal("wrong token")))
                return self._answer(*service.answer(self.path, body))

            def _answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = ServiceAddress(f"http://127.0.0.1:{self._server.server_port}", TOKEN, 0)
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / ADDRESS_FILE).write_bytes(msgspec.json.encode(self.address))
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> "ControlService":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, path: str, body: bytes) -> tuple[int, bytes]:
        if path == "/batches/next":
            step = decode(body, NextBatchRequest).step
            self.requests.append((path, step))
            if step not in self.samples:
                return 503, encode(Refusal(f"there is no step {step}"))
            metas = [sample.meta() for sample in self.samples[step]]
            return 200, encode(BatchManifest(f"step-{step}", step, metas, {"rollout/staleness_max": 0.0}))
        if path == "/samples/fetch":
            wanted = decode(body, FetchRequest).sample_ids
            self.requests.append((path, wanted))
            by_id = {sample.sample_id: sample for step in self.samples.values() for sample in step}
            return 200, encode([by_id[each].payload() for each in wanted])
        if path == "/batches/trained":
            self.requests.append((path, decode(body, BatchTrained)))
            return 200, b""
        if path == "/evaluate/begin":
            step = decode(body, EvaluateRequest).step
            self.requests.append((path, step))
            asked = self.of(path).count(step)
            return 200, encode(Status(0, 0, 0, 0, 0, {}, [], [], [step] if asked <= self.evaluation_polls else []))
        if path == "/evaluate":
            self.requests.append((path, decode(body, EvaluateRequest).step))
            return 200, encode(EvaluateReply(0, 0, 0.25, 8, 0, 5.0, 0.1, {"eval/set/pass_at_1": 0.5}))
        return 404, encode(Refusal(f"no such path {path}"))

    def of(self, path: str) -> list[Any]:
        return [message for found, message in self.requests if found == path]

    def ids(self, steps: Sequence[int]) -> list[str]:
        return sorted(sample.sample_id for step in steps for sample in self.samples[step])
