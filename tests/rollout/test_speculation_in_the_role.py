"""Speculation as the rollout role has it: chosen by the spec, told in the batch's figures, kept over a restart."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from engine_fixtures import engine_spec
from scene import SEED, Scene, rollout

from slimerl.engine.protocol import Generation
from slimerl.rollout.__main__ import build_dispatcher, build_router
from slimerl.rollout.dispatch import Completion, Dispatcher
from slimerl.rollout.speculation.dispatcher import Speculation, SpeculativeDispatcher
from slimerl.rollout.speculation.drafts_file import DraftsFile
from slimerl.rollout.speculation.engine_drafts import EngineDrafts, WatchedDispatcher
from slimerl.samples.messages import TOKEN_HEADER
from slimerl.samples.messages import Path as Endpoint
from slimerl.spec.speculation import DraftingSpec, SpeculationSpec

HEADERS = {TOKEN_HEADER: "token"}


@pytest.mark.parametrize(
    ("speculation", "drafting", "kind"),
    [
        (SpeculationSpec(), None, Dispatcher),
        (SpeculationSpec(tier="exact"), None, SpeculativeDispatcher),
        (SpeculationSpec(), DraftingSpec(method="mtp", frozen=True), WatchedDispatcher),
    ],
)
def test_the_dispatcher_is_the_one_that_the_spec_names(
    tmp_path: Path, speculation: SpeculationSpec, drafting: DraftingSpec | None, kind: type
):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 64}))
    spec = engine_spec(tmp_path, tmp_path)
    rollout_spec = spec.rollout.model_copy(update={"speculation": speculation})
    engine = spec.engine.model_copy(update={"drafting": drafting})
    spec = spec.model_copy(update={"rollout": rollout_spec, "engine": engine})
    dispatcher, told = build_dispatcher(spec, build_router(spec), {})
    assert type(dispatcher) is kind
    assert (told is None) == (kind is Dispatcher)


def test_c1_a_checkpoint_keeps_the_answers_and_another_process_has_them(tmp_path: Path):
    """Through the control service, as a trainer asks it."""

    def made_of(tier: str) -> Speculation:
        return Speculation(SpeculationSpec(tier=tier), SEED, 100, file=DraftsFile(tmp_path, keep=2))

    async def step(made: Scene) -> dict[str, float]:
        manifest = await made.batch(1)
        made.scheduler.trained(manifest.batch_id)
        return manifest.metrics

    async def run() -> None:
        first, second = made_of("exact"), made_of("exact")
        async with rollout(groups=2, size=3, speculation=first) as made:
            await made.serve(0)
            metrics = await step(made)
            assert metrics["speculation/requests"] == 6
            assert metrics["speculation/decoded_tokens"] == metrics["rollout/generated_tokens"]
            async with TestClient(TestServer(made.service.application())) as client:
                state = await (await client.get(Endpoint.STATE, headers=HEADERS)).read()
        assert (tmp_path / "drafts" / "step-1").exists()
        async with (
            rollout(groups=2, size=3, speculation=second) as made,
            TestClient(TestServer(made.service.application())) as client,
        ):
            answer = await client.post(Endpoint.RESTORE, data=state, headers=HEADERS)
            assert answer.status == 200
            kept = {answer.session: answer.tokens.tolist() for answer in second.drafts.answers()}
        assert kept == {answer.session: answer.tokens.tolist() for answer in first.drafts.answers()}
        assert len(kept) == 6

    asyncio.run(asyncio.wait_for(run(), 30))


def test_an_engine_that_answers_no_scores_serves_all_the_same(caplog: pytest.LogCaptureFixture):
    """Fault: a server of another kind, which takes a request for scores for an empty one."""

    async def run() -> None:
        speculation = Speculation(SpeculationSpec(tier="coupled"), SEED, 100)
        async with rollout(groups=2, size=3, speculation=speculation) as made:
            for number in range(16):
                old = f"9/p{number}"
                for sample in range(3):
                    speculation.drafts.add(old, f"{old}/{sample}", (10, number), [3, 4], [-1, -1], -1, stopped=False)
            await made.serve(0)
            manifest = await made.batch(1)
            assert len(manifest.samples) == 6
            assert manifest.metrics["speculation/discarded_drafts"] == 6
            assert made.store.counts().dropped == {}

    asyncio.run(asyncio.wait_for(run(), 30))
    assert caplog.text.count("goes on without its draft") >= 6


def test_what_an_engine_says_of_its_own_drafts_is_added_up_and_begins_anew():
    def completion(tokens: int, **meta: Any) -> Completion:
        row = [0] * tokens
        return Completion(Generation(row, [0.0] * tokens, row, "stop", meta, {}), "engine-0", 1)

    drafts = EngineDrafts()
    drafts.note(completion(10, spec_verify_ct=4, spec_num_correct_drafts=6, spec_num_proposed_drafts=12))
    drafts.note(completion(6, spec_verify_ct=4, spec_num_correct_drafts=2, spec_num_proposed_drafts=12))
    drafts.note(completion(100))
    assert drafts.take_figures() == {
        "speculation/engine_accepted_fraction": 8 / 24,
        "speculation/engine_tokens_per_pass": 2.0,
    }
    assert set(drafts.take_figures().values()) == {0.0}
