"""Rejection sampling: from what a model answers, keep what its reward finds right, as rows for supervised fine-tuning.

Flows in: the spec of a reinforcement learning run: its model, prompts, sampling parameters, engines and reward. Flows
out: rows `{"id", "prompt", "response"}`, and a table of what became of every response.
Invariant: each response is kept or rejected under exactly one reason; a response whose judging failed is none of the
wrong ones, and counts neither for its prompt nor against it.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from itertools import count, cycle
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, NoReturn

import typer
from quickstart_data import write_jsonl
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from slimerl.conductor.preflight.whole import preflight
from slimerl.conductor.run_directory import RunDirectoryTaken, claimed
from slimerl.engine.client import EngineClient, EngineError
from slimerl.engine.launcher import Server, ServerFailed, detect_device, start_server
from slimerl.engine.local_resources import NoAddress
from slimerl.engine.protocol import Generation, SamplingParams
from slimerl.resilience.deadline import Deadline, DeadlineExceeded
from slimerl.rewards.build import build_reward, reads_prompt, reads_tokens
from slimerl.rewards.outcome import Failed, Outcome, RewardUnavailable, Scored, outcome_name
from slimerl.rollout.dispatch import MAX_TRIES
from slimerl.rollout.judge import Judge
from slimerl.rollout.parts import Parts
from slimerl.rollout.prompts import Prompt, PromptStream, read_rows, tokenize_rows
from slimerl.rollout.tokenizer import PromptTokenizer
from slimerl.samples.rows import Row
from slimerl.samples.sample import Sample
from slimerl.samples.written_ids import Tokens
from slimerl.spec import RunSpec, SpecError, load_spec
from slimerl.spec.agent import SingleTurnAgent

KEPT, TOO_EASY, REPEATED, CUT_OFF, EMPTY = "kept", "too_easy", "repeated", "cut_off", "empty"
PLAIN_LINE_EVERY = 100
"""Prompts; where standard output is no terminal."""


@dataclass(frozen=True)
class Response:
    """To one prompt. `complete`: it ended by itself, and not at rollout.max_new_tokens."""

    text: str
    outcome: Outcome
    complete: bool = True

    @property
    def right(self) -> bool:
        return isinstance(self.outcome, Scored) and self.outcome.correct


@dataclass(frozen=True)
class Sifted:
    """Of one prompt. `reasons`: how many of its responses had which end; together they are all."""

    kept: list[str]
    reasons: Counter[str]


def sift(responses: Sequence[Response]) -> Sifted:
    """Of the responses to one prompt those that are worth learning from.

    Right ones are, each text once, unless all that could be judged are right: then there is nothing to learn. One that
    was cut off never ends, and would teach to end in the middle; one without text is no row of a data set.
    """
    judged = [each for each in responses if not isinstance(each.outcome, Failed)]
    too_easy = bool(judged) and all(each.right and each.complete for each in judged)
    kept: list[str] = []
    reasons: Counter[str] = Counter()
    for each in responses:
        if not each.right:
            reason = outcome_name(each.outcome)
        elif not each.complete:
            reason = CUT_OFF
        elif not each.text.strip():
            reason = EMPTY
        elif too_easy:
            reason = TOO_EASY
        elif each.text in kept:
            reason = REPEATED
        else:
            reason = KEPT
            kept.append(each.text)
        reasons[reason] += 1
    return Sifted(kept, reasons)


def main(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="Spec of the run that comes after: GRPO, PPO, …")],
    out: Annotated[Path, typer.Option(help="JSONL file for the rows; an earlier one is replaced.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys of SPEC.")] = None,
    prompts: Annotated[
        int | None, typer.Option(min=1, help="How many of data.train_path are sampled.", show_default="all")
    ] = None,
) -> None:
    """Sample responses, reject those that are wrong or cannot be judged, and write the others for a run of SFT.

    The engines of SPEC sample rollout.samples_per_prompt responses to each prompt, with the weights of model.path;
    its reward judges them. Where all are right the prompt is too easy, and none is kept.

    \b
    Examples:
      python tools/rejective_filter.py my.yaml --out rows.jsonl
      python tools/rejective_filter.py my.yaml --out rows.jsonl --prompts 500 rollout.samples_per_prompt=16

    Exit code 0: rows were written; 1: it failed, or no response was kept; 2: the spec, or --out, cannot be used.
    """
    console = Console(width=None if sys.stdout.isatty() else 110, markup=False, highlight=False)
    if refused := unwritable(out):
        _fail(refused, 2)
    try:
        checked = checked_spec(spec, ["output_dir=runs/rejective_filter", *(overrides or ())])
    except SpecError as error:
        _fail(str(error), 2)
    tokenizer = PromptTokenizer(checked.model.path, checked.data)
    rows = read_rows(checked.data.train_path)
    chosen = choose(checked, tokenizer, rows, prompts)
    try:
        with claimed(checked, fresh=True):
            sifted = asyncio.run(sample_and_sift(checked, tokenizer, chosen, console))
    except RunDirectoryTaken as error:
        _fail(str(error), 2)
    except (NoAddress, ServerFailed, EngineError, DeadlineExceeded, RewardUnavailable) as error:
        _fail(str(error), 1)
    console.print(reasons_table(sifted))
    found = kept_rows(rows, chosen, sifted)
    if not found:
        _fail(
            "no response was kept: see the table for the reasons. If most are wrong, train the model longer before; "
            "if all are right, take harder prompts; if they are cut off, raise rollout.max_new_tokens",
            1,
        )
    write_jsonl(out, found)
    console.print(f"wrote {len(found)} rows to {out}")


def unwritable(out: Path) -> str:
    """Why no file can be written there, which is told before hours of sampling; empty: one can."""
    if out.is_dir():
        return f"--out {out} is a directory; name a file"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=out.parent):
            return ""
    except OSError as error:
        return f"--out {out} cannot be written: {error}"


def checked_spec(path: Path, overrides: Sequence[str]) -> RunSpec:
    """Raises SpecError: one line per fault."""
    spec = load_spec(path, overrides)
    if not spec.uses_engines:
        raise SpecError(f"algorithm.name = {spec.algorithm.name} samples nothing; give the spec of a run that does")
    if not isinstance(spec.agent, SingleTurnAgent):
        raise SpecError(f"agent.kind = {spec.agent.kind}: a row has one response; drop the agent section")
    if spec.nodes_per_engine > 1:
        raise SpecError(f"an engine of {spec.nodes_per_engine} machines; choose engine.tensor_parallel for one")
    if faults := preflight(spec):
        raise SpecError("\n".join(faults))
    return spec


def choose(spec: RunSpec, tokenizer: PromptTokenizer, rows: Sequence[Row], at_most: int | None) -> list[Prompt]:
    """Those that the run would draw first, each once."""
    path = str(spec.data.train_path)
    stream = PromptStream(tokenize_rows(rows, tokenizer.encode, spec.data.max_prompt_tokens, path), spec.seed)
    return [stream.draw().prompt for _ in range(min(at_most or len(rows), len(rows)))]


async def sample_and_sift(
    spec: RunSpec, tokenizer: PromptTokenizer, prompts: Sequence[Prompt], console: Console
) -> list[Sifted]:
    """In the order of `prompts`. Raises ServerFailed, EngineError, DeadlineExceeded, RewardUnavailable."""
    async with AsyncExitStack() as stack:
        reward = build_reward(spec.reward)
        stack.push_async_callback(reward.close)
        await reward.start()
        judge = Judge(
            tokenizer.decode, reward, reads_prompt(spec.reward), reward.take_events, reads_tokens(spec.reward)
        )
        stack.callback(judge.close)
        clients = await stack.enter_async_context(serving(spec, console))
        sampler = Sampler(spec, tokenizer, judge, cycle(clients), len(clients))
        advance = stack.enter_context(progress(len(prompts), console))

        async def of_prompt(prompt: Prompt) -> Sifted:
            numbers = range(spec.rollout.samples_per_prompt)
            sifted = sift(await asyncio.gather(*(sampler.respond(prompt, number) for number in numbers)))
            advance()
            return sifted

        tasks = [asyncio.create_task(of_prompt(prompt)) for prompt in prompts]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class Sampler:
    """Asks the engines in turn, each for as many responses at a time as the spec allows; where one fails, the next."""

    def __init__(
        self, spec: RunSpec, tokenizer: PromptTokenizer, judge: Judge, turns: Iterator[EngineClient], engines: int
    ) -> None:
        rollout = spec.rollout
        params = SamplingParams(
            rollout.max_new_tokens, rollout.temperature, rollout.top_p, stop_token_ids=tokenizer.stop_token_ids
        )
        self._parts = Parts(params, spec.seed)
        self._tokenizer, self._judge, self._turns = tokenizer, judge, turns
        self._slots = asyncio.Semaphore(rollout.max_running_requests * engines)
        self._timeout_s = spec.deadlines.request_s

    async def respond(self, prompt: Prompt, number: int) -> Response:
        """Raises EngineError."""
        sample = Sample(f"filter/{prompt.prompt_id}/{number}", "", prompt.prompt_id, prompt.tokens)
        request = self._parts.next_request(sample)
        async with self._slots:
            generation = await self._generation(request.tokens, request.params)
        self._parts.append(sample, generation)
        outcome = await self._judge.judge(sample, prompt.answer)
        return Response(self._tokenizer.decode(sample.response_tokens), outcome, sample.finish_reason == "stop")

    async def _generation(self, tokens: Tokens, params: SamplingParams) -> Generation:
        """Of the first engine that gives one: what all have sampled is not to be lost by one answer.

        Raises EngineError: so many in a row gave none.
        """
        for _ in range(MAX_TRIES - 1):
            with suppress(EngineError):
                return await next(self._turns).generate(tokens, params, timeout_s=self._timeout_s)
        return await next(self._turns).generate(tokens, params, timeout_s=self._timeout_s)


@asynccontextmanager
async def serving(spec: RunSpec, console: Console) -> AsyncIterator[list[EngineClient]]:
    """A client of each of the spec's engines, which have the weights of model.path."""
    servers: list[Server] = []
    async with AsyncExitStack() as stack:
        deadline = Deadline("the engines to become healthy", spec.deadlines.start_s)
        for index in range(spec.engine.replicas):
            servers.append(start_server(spec, index, detect_device()))
            stack.callback(servers[-1].stop)
        console.print(f"starting the engines with {spec.model.path}; log: {servers[0].log_path}")
        await asyncio.gather(*(server.wait_until_healthy(deadline) for server in servers))
        clients = [server.client(spec.deadlines.request_s) for server in servers]
        yield [await stack.enter_async_context(client) for client in clients]


@contextmanager
def progress(prompts: int, console: Console) -> Iterator[Callable[[], None]]:
    """To be called after each prompt."""
    bar = Progress(
        TextColumn("sampling"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    task, done = bar.add_task("sampling", total=prompts), count(1)

    def advance() -> None:
        bar.advance(task)
        number = next(done)
        if not console.is_terminal and (number % PLAIN_LINE_EVERY == 0 or number == prompts):
            console.print(f"sampled {number}/{prompts} prompts")

    with bar:
        yield advance


def kept_rows(rows: Sequence[Row], prompts: Sequence[Prompt], sifted: Sequence[Sifted]) -> list[dict[str, str]]:
    """With the prompts as they stand in the data. `sifted`: as `prompts`."""
    texts = {row.row_id: row.prompt for row in rows}
    return [
        {"id": f"{prompt.prompt_id}/{number}", "prompt": texts[prompt.prompt_id], "response": response}
        for prompt, each in zip(prompts, sifted, strict=True)
        for number, response in enumerate(each.kept)
    ]


def reasons_table(sifted: Sequence[Sifted]) -> Table:
    reasons = sum((each.reasons for each in sifted), Counter[str]())
    table = Table(title=f"responses to {len(sifted)} prompts", title_justify="left")
    table.add_column("what became of them")
    table.add_column("responses", justify="right")
    table.add_column("share", justify="right")
    for reason, number in reasons.most_common():
        table.add_row(reason, str(number), f"{number / reasons.total():.1%}")
    return table


def _fail(message: str, code: int) -> NoReturn:
    Console(stderr=True).print(message, style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(code)


if __name__ == "__main__":
    typer.run(main)
