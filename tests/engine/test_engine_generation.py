"""The real engine against Hugging Face transformers, and its sampling against itself."""

import asyncio

import psutil
import pytest
import transformers
from engine_fixtures import Engines, RunningEngine
from reference import greedy_choices, largest_difference, logprobs_of
from weights import update

from slimerl.engine.client import EngineClient, EngineRefused, EngineTimeout
from slimerl.engine.protocol import Generation, SamplingParams
from slimerl.resilience.deadline import Deadline

VERSION = 3
PROMPTS = [[10, 20, 30, 40, 50], [7] * 17, list(range(4, 100)), [300]]


@pytest.fixture(scope="module")
def engine(engines: Engines) -> RunningEngine:
    """With the weights of its checkpoint, whatever earlier tests have brought it."""
    running = engines("qwen3")
    assert update(running, running.model_path, version=VERSION) == {}
    return running


@pytest.fixture(scope="module")
def model(engine: RunningEngine) -> object:
    return transformers.AutoModelForCausalLM.from_pretrained(engine.model_path).eval()


def generate_all(engine: RunningEngine, prompts: list[list[int]], params: list[SamplingParams]) -> list[Generation]:
    """All at once, so that they share batches."""

    async def call(client):
        pairs = zip(prompts, params, strict=True)
        return await asyncio.gather(*(client.generate(prompt, param) for prompt, param in pairs))

    return engine.ask(call)


def test_greedy_tokens_and_logprobs_equal_those_of_transformers(engine: RunningEngine, model: object) -> None:
    greedy = SamplingParams(max_new_tokens=24, temperature=0.0)
    for prompt, result in zip(PROMPTS, generate_all(engine, PROMPTS, [greedy] * len(PROMPTS)), strict=True):
        assert result.tokens == greedy_choices(model, prompt, result.tokens)
        assert largest_difference(logprobs_of(model, prompt, result.tokens), result.logprobs) < 1e-4
        assert result.finish_reason == ("stop" if result.tokens[-1] == 1 else "length")


def test_sampled_logprobs_are_of_the_tempered_distribution(engine: RunningEngine, model: object) -> None:
    """What the trainer must compute: log_softmax(logits / temperature)."""
    prompt = PROMPTS[0]
    [result] = generate_all(engine, [prompt], [SamplingParams(max_new_tokens=24, temperature=0.7, seed=3)])
    model.lm_head.weight.data.div_(0.7)
    try:
        assert largest_difference(logprobs_of(model, prompt, result.tokens), result.logprobs) < 1e-4
    finally:
        model.lm_head.weight.data.mul_(0.7)


def test_keyed_sampling_is_the_same_alone_and_in_a_batch(engine: RunningEngine) -> None:
    prompts = [[10 + index, *PROMPTS[index % len(PROMPTS)]] for index in range(24)]
    keyed = [SamplingParams(max_new_tokens=16, seed=1_000_003 * index) for index in range(24)]
    together = generate_all(engine, prompts, keyed)
    for prompt, params, batched in zip(prompts, keyed, together, strict=True):
        [alone] = generate_all(engine, [prompt], [params])
        assert (alone.tokens, alone.logprobs) == (batched.tokens, batched.logprobs)


def test_keyed_sampling_is_the_same_beside_a_request_that_is_filtered(engine: RunningEngine) -> None:
    """One greedy or filtered row (evaluation beside rollouts) sends the whole batch through a sampler of ranks."""
    keyed = [SamplingParams(max_new_tokens=16, seed=1_000_003 * index) for index in range(8)]
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(8)]
    alone = generate_all(engine, prompts, keyed)
    others = [SamplingParams(max_new_tokens=64, temperature=0), SamplingParams(max_new_tokens=64, top_p=0.9, seed=5)]
    beside = generate_all(engine, [PROMPTS[0], PROMPTS[1], *prompts], [*others, *keyed])[2:]
    assert [each.tokens for each in beside] == [each.tokens for each in alone]


def test_another_seed_gives_other_tokens_and_no_seed_gives_fresh_ones(engine: RunningEngine) -> None:
    seeds = [1, 2, None, None]
    results = generate_all(engine, [PROMPTS[0]] * 4, [SamplingParams(max_new_tokens=16, seed=seed) for seed in seeds])
    assert len({tuple(result.tokens) for result in results}) == 4


def test_a_continued_sample_goes_on_as_if_it_had_not_been_cut(engine: RunningEngine) -> None:
    """The draw depends on seed and position: partial rollouts stay token-exact."""
    [whole] = generate_all(engine, [PROMPTS[0]], [SamplingParams(max_new_tokens=20, seed=11)])
    cut = whole.tokens[:8]
    [rest] = generate_all(engine, [PROMPTS[0] + cut], [SamplingParams(max_new_tokens=12, seed=11)])
    assert cut + rest.tokens == whole.tokens


def test_filters_that_stock_sglang_refuses_with_seeds_leave_the_server_alive(engine: RunningEngine) -> None:
    """min_p together with a seed is an assertion in the stock sampler, which would end the scheduler."""
    params = SamplingParams(max_new_tokens=8, top_p=0.9, seed=5, extra={"min_p": 0.2, "top_k": 40})
    first, second = generate_all(engine, [PROMPTS[0]] * 2, [params] * 2)
    assert first.tokens == second.tokens
    [almost_greedy] = generate_all(engine, [PROMPTS[0]], [SamplingParams(8, seed=5, extra={"min_p": 0.999})])
    [greedy] = generate_all(engine, [PROMPTS[0]], [SamplingParams(8, temperature=0.0)])
    assert almost_greedy.tokens == greedy.tokens


def test_stop_token_ids_end_a_sample(engine: RunningEngine) -> None:
    [free] = generate_all(engine, [PROMPTS[0]], [SamplingParams(max_new_tokens=12, temperature=0.0)])
    stopping = SamplingParams(max_new_tokens=12, temperature=0.0, stop_token_ids=(free.tokens[3],))
    [stopped] = generate_all(engine, [PROMPTS[0]], [stopping])
    assert stopped.finish_reason == "stop"
    assert stopped.tokens == free.tokens[: free.tokens.index(free.tokens[3]) + 1]


def test_a_late_answer_is_a_named_timeout_and_aborted_on_the_server(engine: RunningEngine) -> None:
    endless = SamplingParams(max_new_tokens=1900, extra={"ignore_eos": True})
    with pytest.raises(EngineTimeout, match=r"engine-\d+ /generate: no answer within 0.5 s"):
        engine.ask(lambda client: client.generate([5], endless, timeout_s=0.5))
    # 1900 tokens take at least three seconds; the flush is refused for as long as the request runs.
    deadline = Deadline("the abandoned request to be aborted", 2.0)
    deadline.wait_until(lambda: flushed(engine))


def flushed(engine: RunningEngine) -> bool:
    try:
        engine.ask(lambda client: client.flush_cache())
    except EngineRefused:
        return False
    return True


def test_an_aborted_request_ends_with_the_tokens_so_far(engine: RunningEngine) -> None:
    async def abort_running(client):
        long = SamplingParams(max_new_tokens=1900, extra={"ignore_eos": True})
        running = asyncio.create_task(client.generate([5], long, request_id="to-abort"))
        while not running.done():
            await client.abort("to-abort")
            await asyncio.wait({running}, timeout=0.05)
        return running.result()

    result = engine.ask(abort_running)
    assert result.finish_reason == "abort"
    assert len(result.tokens) == len(result.logprobs) == len(result.versions) < 1900


def test_what_the_engine_refuses_names_engine_endpoint_and_reason(engine: RunningEngine) -> None:
    too_long = SamplingParams(max_new_tokens=4)
    with pytest.raises(EngineRefused, match=r"engine-\d+ /generate: answered 400: .*context length"):
        engine.ask(lambda client: client.generate([5] * 3000, too_long))


def test_every_endpoint_but_health_wants_the_key(engine: RunningEngine) -> None:
    """/server_info would show the keys; /generate costs the machine's time."""

    async def as_a_stranger(call):
        async with EngineClient("stranger", engine.server.url, "guess", 10.0) as client:
            return await call(client)

    assert asyncio.run(as_a_stranger(lambda client: client.healthy()))
    for call in (
        lambda client: client.server_info(),
        lambda client: client.generate([5], SamplingParams(1)),
        lambda client: client.pause(),
        lambda client: client.run_loader([b""]),
    ):
        with pytest.raises(EngineRefused, match="401"):
            asyncio.run(as_a_stranger(call))


def test_the_key_is_in_no_log_and_on_no_command_line(engine: RunningEngine) -> None:
    assert engine.info.admin_key not in engine.server.log_path.read_text()
    root = psutil.Process(engine.server.process.pid)
    for process in [root, *root.children(recursive=True)]:
        assert engine.info.admin_key not in " ".join(process.cmdline())


def test_server_info_and_health_also_answer_while_paused(engine: RunningEngine) -> None:
    async def look(client):
        await client.pause()
        try:
            return await client.healthy(), await client.server_info()
        finally:
            await client.continue_generation()

    healthy, info = engine.ask(look)
    assert healthy
    assert info["version"].startswith("0.5.")
