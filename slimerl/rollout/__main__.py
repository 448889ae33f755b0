"""The rollout role: `python -m slimerl.rollout SPEC [--process NUMBER] [--take-over] [KEY=VALUE]…`.

Flows in: the spec, its data and tokenizer. Flows out: the control service, announced in RUN_DIR/rollout.json.
With `--take-over` it goes on where a process ended, or ends with 1 where that cannot be.
Ends with 0 on SIGTERM or `/shutdown`, with 2 where spec, data or tokenizer cannot be used.
"""

import asyncio
import json
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from slimerl.engine.local_resources import NoAddress
from slimerl.engine.protocol import SamplingParams
from slimerl.resilience import heartbeat
from slimerl.resilience.imports import without_collections
from slimerl.resilience.processes import die_with_parent
from slimerl.rewards.build import reads_prompt, reads_tokens, reward_of_run
from slimerl.rewards.outcome import RewardUnavailable, RunningReward
from slimerl.rollout.agents.build import RunningAgent, announced, build_agent
from slimerl.rollout.announcing import gateway_key, gateway_listening, service_listening
from slimerl.rollout.dispatch import Dispatcher
from slimerl.rollout.engines import EngineClients, Engines
from slimerl.rollout.evaluation import Evaluation, HeldOutSet
from slimerl.rollout.evaluation_engines import EvaluationEngines
from slimerl.rollout.full_collections import defer_full_collections
from slimerl.rollout.gateway.build import build_gateway
from slimerl.rollout.gateway.external import ExternalAgents
from slimerl.rollout.journal_file import TAKE_OVER, JournalFile, forget_journal
from slimerl.rollout.journal_places import journal_of
from slimerl.rollout.judge import Judge
from slimerl.rollout.kv_fleet import EngineModel
from slimerl.rollout.kv_memory import Memory
from slimerl.rollout.kv_router import KvRouter
from slimerl.rollout.loop_lag import LoopLag
from slimerl.rollout.parts import Parts
from slimerl.rollout.prompts import Prompt, PromptStream, read_rows, tokenize_rows
from slimerl.rollout.router import LeastLoaded, Router
from slimerl.rollout.scheduler import Scheduler, SchedulerSettings
from slimerl.rollout.service import ControlService
from slimerl.rollout.several import Place, beside_it, gate_of, ledger_of, ordered, service_kind
from slimerl.rollout.shard_scheduler import ShardScheduler
from slimerl.rollout.speculation.dispatcher import Speculation, SpeculativeDispatcher
from slimerl.rollout.speculation.drafts_file import DraftsFile
from slimerl.rollout.speculation.engine_drafts import EngineDrafts, WatchedDispatcher
from slimerl.rollout.taking_over import take_over
from slimerl.rollout.tokenizer import PromptTokenizer, TokenizerError
from slimerl.rollout.weights import WeightHold
from slimerl.samples.journal import JournalDamaged
from slimerl.samples.rows import DataError
from slimerl.samples.store import SampleStore
from slimerl.spec import RunSpec, SpecError, load_spec
from slimerl.spec.evaluation import EvaluationSetSpec
from slimerl.spec.evaluation_engines import evaluation_engines
from slimerl.spec.functions import CustomFunctionError
from slimerl.telemetry import trace
from slimerl.telemetry.resources import ResourceMeter

logger = logging.getLogger("slimerl.rollout")

REMEMBERED_BATCHES = 4
"""Of all that may be under way; the router's memory of older samples is of ones that have ended."""
_PROCESS = "--process"


@dataclass(frozen=True)
class Inputs:
    """What is read before the role serves anybody."""

    tokenizer: PromptTokenizer
    train: list[Prompt]
    held_out: list[Prompt]
    sets: list[list[Prompt]]
    """As `evaluation.sets`."""


def main(spec: RunSpec, process: int = 0, takes_over: bool = False) -> int:
    """Run the role to its end; returns its exit code.

    Args:
        process: its number, where the run has several.
        takes_over: a process before it has ended.
    """
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(serve(spec, process, takes_over))
    except (DataError, TokenizerError, CustomFunctionError) as error:
        print(error, file=sys.stderr)
        return 2
    except (NoAddress, RewardUnavailable, JournalDamaged) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop takes half the time for connections; without it Python's own loop serves."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def serve(spec: RunSpec, process: int = 0, takes_over: bool = False) -> None:
    """Serve until SIGTERM, SIGINT or `/shutdown`."""
    name = f"rollout-{process}" if process else "rollout"
    trace.start(spec.run_dir, name)
    alive = heartbeat.start_of_loop(spec.run_dir, name, spec.deadlines.stall_s)
    reward, agent = reward_of_run(spec), build_agent(spec.agent)
    try:
        # All take seconds; none needs the other.
        begun = time.monotonic()
        with without_collections():
            inputs, *_ = await asyncio.gather(asyncio.to_thread(read_inputs, spec), reward.start(), agent.start())
        trace.add("start", begun, time.monotonic(), "start")
        defer_full_collections()
        while await _serve_once(spec, inputs, reward, agent, process, takes_over):
            takes_over = False
            forget_journal(journal_of(spec, process))
    finally:
        await asyncio.gather(reward.close(), agent.close())
        alive.cancel()
        trace.stop()
    logger.info("ended")


async def _serve_once(
    spec: RunSpec, inputs: Inputs, reward: RunningReward, agent: RunningAgent, process: int, takes_over: bool
) -> bool:
    """Returns whether to do so once more, with nothing of what there was."""
    token, ended = secrets.token_hex(16), asyncio.Event()
    # Not before: until here a signal ends the process at once, and its workers with it.
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with AsyncExitStack() as stack:
        desk = await stack.enter_async_context(ledger_of(spec, process, takes_over))
        place = Place(process, takes_over, desk)
        service = await stack.enter_async_context(_service(spec, inputs, reward, agent, token, ended, place))
        beside = await stack.enter_async_context(beside_it(spec, service, desk))
        await stack.enter_async_context(service_listening(spec, service, token, process))
        name = f"rollout-{process}" if process else "rollout"
        await _until_ended(ended, service, ResourceMeter(spec.run_dir, name), beside)
    return service.begins_anew


async def _until_ended(
    ended: asyncio.Event,
    service: ControlService,
    resources: ResourceMeter,
    beside: Sequence[Coroutine[Any, Any, None]],
) -> None:
    """Wait for the end, or raise what ended the scheduler or a meter."""
    waiting = asyncio.ensure_future(ended.wait())
    watched = (service.scheduler.run(), service.lag.watch(), resources.watch(), *beside)
    running = [asyncio.ensure_future(each) for each in watched]
    try:
        done, _ = await asyncio.wait([waiting, *running], return_when=asyncio.FIRST_COMPLETED)
        service.stop()
        for task in done:
            task.result()
    finally:
        for task in (waiting, *running):
            task.cancel()
        await asyncio.gather(waiting, *running, return_exceptions=True)


def read_inputs(spec: RunSpec) -> Inputs:
    """Raises DataError, TokenizerError."""
    tokenizer = PromptTokenizer(spec.model.path, spec.data, announced(spec.agent))

    def prompts(path: Path, at_most: int | None = None) -> list[Prompt]:
        return tokenize_rows(read_rows(path)[:at_most], tokenizer.encode, spec.data.max_prompt_tokens, str(path))

    eval_path = spec.data.eval_path
    held_out = prompts(eval_path, spec.evaluation.max_prompts) if eval_path is not None else []
    sets = [prompts(one.path, one.max_prompts or spec.evaluation.max_prompts) for one in spec.evaluation.sets]
    return Inputs(tokenizer, prompts(spec.data.train_path), held_out, sets)


@asynccontextmanager
async def _service(
    spec: RunSpec,
    inputs: Inputs,
    reward: RunningReward,
    agent: RunningAgent,
    token: str,
    ended: asyncio.Event,
    place: Place,
) -> AsyncIterator[ControlService]:
    """The parts, put together."""
    rollout, training = spec.rollout, spec.training
    journal = JournalFile(journal_of(spec, place.process))
    router = build_router(spec)
    clients = EngineClients(spec.deadlines.request_s, _vocabulary(spec))
    dispatcher, speculation = build_dispatcher(spec, router, clients)
    dispatcher.process = f"{token[:8]}."
    reads = reads_prompt(spec.reward), reads_tokens(spec.reward)
    judge = Judge(inputs.tokenizer.decode, reward, reads[0], reward.take_events, reads[1])
    loop = agent.loop(inputs.tokenizer)
    params = SamplingParams(
        rollout.max_new_tokens,
        rollout.temperature,
        rollout.top_p,
        stop_token_ids=inputs.tokenizer.stop_token_ids,
    )
    gate = gate_of(spec)
    prompts = PromptStream(inputs.train, spec.seed)
    build: Callable[..., Scheduler] = Scheduler
    if rollout.processes > 1:
        gate, prompts, link = ordered(spec, place.process, inputs.train)
        build = partial(ShardScheduler, link=link)
    scheduler = build(
        SchedulerSettings(
            training.prompts_per_step,
            rollout.samples_per_prompt,
            spec.seed,
            params,
            spec.reward.on_failure,
            rollout.chunk_tokens,
            spec.algorithm.dynamic_sampling_rounds,
            routing=spec.algorithm.routing_replay == "r3",
        ),
        prompts,
        gate,
        SampleStore(smallest_group=rollout.smallest_group),
        dispatcher,
        judge,
        loop,
        journal=journal,
        max_buffered_bytes=rollout.max_buffered_gib * 2**30 / rollout.processes,
    )
    replicas = len(range(place.process, spec.engine.replicas, rollout.processes))
    evaluators = build_evaluators(spec, clients, dispatcher.process)
    weights = WeightHold(
        dispatcher, clients, replicas, spec.deadlines.start_s, on_update=rollout.on_update, evaluators=evaluators
    )
    held_out = _evaluation_params(spec, params)
    sets = _held_out_sets(spec, inputs, params)
    asked = dispatcher if evaluators is None else evaluators.dispatcher
    evaluation = Evaluation(inputs.held_out, held_out, spec.seed, asked, judge, loop, sets)
    lag = LoopLag()
    kind = service_kind(spec, place.desk)
    service = kind(token, router, clients, scheduler, weights, evaluation, lag, speculation, shutdown=ended)
    try:
        async with AsyncExitStack() as stack:
            if isinstance(loop, ExternalAgents):
                parts = Parts(params, spec.seed, rollout.chunk_tokens)
                agents = (spec, inputs.tokenizer, loop, dispatcher, parts, gateway_key(spec), place.process)
                gateway = await build_gateway(*agents)
                if isinstance(scheduler, ShardScheduler):
                    scheduler.figures = gateway.take_figures
                else:
                    service.figures = gateway.take_figures
                await stack.enter_async_context(gateway_listening(spec, gateway, place.process))
            directory = journal_of(spec, place.process)
            await take_over(service, journal, directory, spec.deadlines.start_s, place.takes_over)
            yield service
    finally:
        await weights.close()
        for each in weights.pools.dispatchers():
            await each.close()
        await clients.close()
        judge.close()
        journal.close()


def build_router(spec: RunSpec) -> Router:
    """As `rollout.router` says."""
    requests = spec.rollout.max_running_requests
    if spec.rollout.router == "least_loaded":
        return LeastLoaded(requests)
    # its rates are EngineModel's defaults, of a GPU: what counts is how they stand to each other
    model = EngineModel(slots=requests, kv_tokens=spec.engine.max_total_tokens * spec.engine.data_parallel_attention)
    siblings = spec.rollout.samples_per_prompt
    groups = REMEMBERED_BATCHES * spec.training.prompts_per_step * (1 + spec.rollout.max_staleness)
    memory = Memory(sessions=groups * siblings, groups=groups)
    return KvRouter(requests, siblings, model, clock=time.monotonic, memory=memory)


def build_dispatcher(
    spec: RunSpec, router: Router, engines: Engines
) -> tuple[Dispatcher, Speculation | EngineDrafts | None]:
    """As `rollout.speculation` and `engine.drafting` say, and what drafts of either kind are to tell."""
    wanted, request_s = spec.rollout.speculation, spec.deadlines.request_s
    if spec.engine.drafting is not None:
        drafts = EngineDrafts()
        return WatchedDispatcher(router, engines, request_s, drafts=drafts), drafts
    if not wanted.is_on:
        return Dispatcher(router, engines, request_s), None
    speculation = Speculation(
        *(wanted, spec.seed, _vocabulary(spec), wanted.lenience(spec.algorithm.name)),
        file=DraftsFile(spec.run_dir, keep=spec.checkpoint.keep_last + 1),
    )
    return SpeculativeDispatcher(router, engines, request_s, speculation=speculation), speculation


def build_evaluators(spec: RunSpec, engines: Engines, process: str) -> EvaluationEngines | None:
    """As `evaluation.engines` says; None: those of the rollouts evaluate. Args: `process`: as of `Dispatcher`."""
    engine_ids = frozenset(f"engine-{number}" for number in evaluation_engines(spec))
    if not engine_ids:
        return None
    dispatcher = Dispatcher(build_router(spec), engines, spec.deadlines.request_s, process=process)
    return EvaluationEngines(
        engine_ids, dispatcher, lambda version: spec.evaluation.is_due(version, spec.training.steps)
    )


def _vocabulary(spec: RunSpec) -> int:
    """Tokens of the model."""
    config = json.loads((spec.model.path / "config.json").read_text(encoding="utf-8"))
    return int(config["vocab_size"])


def _evaluation_params(spec: RunSpec, params: SamplingParams, one: EvaluationSetSpec | None = None) -> SamplingParams:
    """Of a set, or of data.eval_path."""
    evaluation = spec.evaluation
    return SamplingParams(
        evaluation.new_tokens_of(one, params.max_new_tokens),
        evaluation.temperature if one is None else evaluation.temperature_of(one),
        stop_token_ids=params.stop_token_ids,
    )


def _held_out_sets(spec: RunSpec, inputs: Inputs, params: SamplingParams) -> list[HeldOutSet]:
    return [
        HeldOutSet(
            *(one.name, prompts, _evaluation_params(spec, params, one)),
            *(one.samples_per_prompt, one.pass_at, one.majority_at),
        )
        for one, prompts in zip(spec.evaluation.sets, inputs.sets, strict=True)
    ]


def _from_arguments(arguments: list[str]) -> tuple[RunSpec, int, bool]:
    """The spec, the number of the process, and whether one before it has ended. Raises SpecError."""
    usage = f"usage: python -m slimerl.rollout SPEC [{_PROCESS} NUMBER] [{TAKE_OVER}] [KEY=VALUE]..."
    rest, process = [each for each in arguments if each != TAKE_OVER], 0
    takes_over = len(rest) < len(arguments)
    if _PROCESS in rest:
        at = rest.index(_PROCESS)
        number = "".join(rest[at + 1 : at + 2])
        if not number.isdecimal():
            raise SpecError(usage)
        process, rest = int(number), [*rest[:at], *rest[at + 2 :]]
    if not rest:
        raise SpecError(usage)
    spec = load_spec(Path(rest[0]), rest[1:])
    if process >= spec.rollout.processes:
        raise SpecError(f"there is no rollout process {process}: rollout.processes = {spec.rollout.processes}")
    return spec, process, takes_over


def _leave(code: int) -> NoReturn:
    """End without tearing the interpreter down: with torch loaded (transformers brings it) that takes a second of a
    free core, and everything that must be closed is closed."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    die_with_parent(os.getppid())
    try:
        role = _from_arguments(sys.argv[1:])
    except SpecError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    _leave(main(*role))
