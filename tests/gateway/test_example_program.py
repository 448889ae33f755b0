"""The example of an agent program, as users copy it, against a gateway in this process."""

import asyncio

import httpx
import openai
from external_agent_example import Tally, work
from gateway_scene import KEY, Front, play, saying
from test_gateway_http import spelt

from slimerl.samples.sample import response_arrays

TASKS = 6


def pupil(prompt: str, seed: int) -> str:
    """Asks the calculator, and says what it said; now and then at once, and wrong."""
    if "<result>" in prompt:
        return prompt.rpartition("<result>")[2].partition("</result>")[0]
    if seed % 3 == 0:
        return "I do not know"
    product = prompt.rpartition("is ")[2].partition("?")[0]
    return f'Well.\n<tool_call>\n{{"name": "calc", "arguments": {{"x": "{product}"}}}}\n</tool_call>'


def test_the_example_streams_runs_its_tools_and_what_it_did_is_trained():
    async def act(front: Front) -> None:
        for held_out, name in list(front.gateway.texts):
            front.gateway.texts[held_out, name] = f"What is {name[1:]}*1?"
        tallies = {False: Tally("training"), True: Tally("held out")}
        headers = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=front.url, headers=headers, timeout=30) as gateway:
            program = openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key=KEY, http_client=front.openai_http)
            working = [asyncio.ensure_future(work(gateway, program, tallies)) for _ in range(3)]
            manifest = await front.scene.batch(1)
            for each in working:
                each.cancel()
            await asyncio.gather(*working, return_exceptions=True)
        trained = front.scene.store.payloads([sample.sample_id for sample in manifest.samples])
        rewards = {sample.sample_id: sample.reward for sample in manifest.samples}
        assert len(tallies[False].right) >= len(trained) == TASKS
        assert set(rewards.values()) == {0.0, 1.0}
        for payload in trained:
            said = spelt(response_arrays(payload)["tokens"][payload.prompt_length :])
            assert rewards[payload.sample_id] == float("<result>" in said)

    play(act, engines=1, answer=saying(pupil))
