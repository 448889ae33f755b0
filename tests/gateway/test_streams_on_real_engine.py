"""A client that reads along with a real SGLang server, whose weights are updated in mid-stream in every pause mode."""

import asyncio
from typing import Any

from engine_fixtures import Engines
from gateway_scene import Front, join_real, play
from scene import serve_the_same_weights
from transformers import AutoModelForCausalLM
from weights import update as put_weights

from slimerl.samples.messages import HoldRequest, ReleaseRequest

TOKENS = 1500
"""So many that the stream goes on while three updates come, on a fast machine too."""
LONG_REPLY = 2
"""With this seed the reply is cut off there."""
MESSAGES: list[Any] = [{"role": "user", "content": "Tell me more."}]


def test_m6_a_stream_over_updates_in_every_mode_is_the_reply_in_one_piece(engines: Engines):
    """Reference: the same request without a stream. The updates change nothing but the weights' version."""
    engine = engines("qwen3")
    engine_id = engine.info.engine_id
    # whatever other tests left in it: how long the reply is depends on the weights
    put_weights(engine, AutoModelForCausalLM.from_pretrained(engine.model_path).eval(), version=0)

    async def update(front: Front, version: int, mode: Any) -> None:
        front.scene.weights.on_update = mode
        lease = await front.scene.weights.hold(HoldRequest(version, 60.0))
        await asyncio.to_thread(serve_the_same_weights, lease, version)
        front.scene.weights.release(ReleaseRequest(lease.lease_id, version, [engine_id]))

    async def act(front: Front) -> None:
        scene = front.scene
        await join_real(front, engine)
        request = {"model": "m", "messages": MESSAGES, "seed": LONG_REPLY, "max_tokens": TOKENS}
        whole = await front.client("whole").chat.completions.create(**request)
        stream = aiter(await front.client("parts").chat.completions.create(**request, stream=True))
        texts: list[str] = []

        async def read(more: int) -> None:
            async for chunk in stream:
                texts.append(chunk.choices[0].delta.content or "")
                more -= 1
                if not more:
                    return

        for version, mode in enumerate(("retract", "in_place", "abort"), 1):
            await read(10)
            updating = asyncio.ensure_future(update(front, version, mode))
            await read(1)
            await updating
        await read(1 << 20)
        (one,), (two,) = (front.sessions.get(name).turns for name in ("whole", "parts"))
        assert list(two.tokens) == list(one.tokens)
        assert "".join(texts) == whole.choices[0].message.content
        assert "\ufffd" not in texts[:-2], "only a whole text may hold bytes that are no characters"
        assert list(two.versions) == sorted(two.versions)
        assert len(two.tokens) == TOKENS
        assert set(two.versions) == {0, 1, 2, 3}
        assert len(texts) > TOKENS / 10, "token by token"
        await scene.until(front.idle)

    play(act, engines=0, max_new_tokens=2 * TOKENS, patience_s=120, engine_s=60.0, request_s=60.0, stop_token_ids=())
