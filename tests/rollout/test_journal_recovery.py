"""A rollout that is killed at any moment is taken over from its journal: the same samples, each trained once."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from journaled import Act, play
from scene import Scene, rollout

from slimerl.rollout.journal_file import JournalFile, read_journal
from slimerl.samples.journal import Admitted, Begun, BookedGroup, Books, Finished
from slimerl.samples.messages import SavedSample
from slimerl.samples.sample import Sample
from slimerl.samples.store import StoreError

START = Books(0, 0, 0, {}, {})


def process(act: Act, directory: Path, killed: bool = False, **options: Any) -> Any:
    """What `act` returns, in a rollout with a journal; `killed`: its journal stays as it is when `act` has ended."""

    async def begin(made: Scene, journal: JournalFile) -> None:
        recovered = read_journal(directory)
        if recovered is None:
            journal.begin(made.scheduler.books())
        else:
            made.scheduler.recover(recovered)
        journal.publish()
        await journal.written()

    return play(act, directory, begin, killed, **options)


async def take(made: Scene, step: int) -> dict[str, bytes]:
    await made.serve(step - 1)
    manifest = await made.batch(step)
    return {one.sample_id: one.tokens for one in made.store.payloads([one.sample_id for one in manifest.samples])}


async def train(made: Scene, first: int, last: int) -> dict[str, bytes]:
    tokens = {}
    for step in range(first, last + 1):
        tokens |= await take(made, step)
        made.scheduler.trained(f"step-{step}")
    return tokens


@pytest.mark.parametrize("staleness", [0, 2])
def test_a2_a_process_killed_between_lease_and_training_is_taken_over_without_loss(tmp_path, staleness):
    """Injected: killed after step 3 was handed out and before it was trained."""
    options = {"staleness": staleness, "segment_bytes": 2000}

    async def undisturbed(made: Scene) -> Any:
        return await train(made, 1, 5)

    async def before(made: Scene) -> Any:
        return await train(made, 1, 2), await take(made, 3)

    async def after(made: Scene) -> Any:
        with pytest.raises(StoreError, match="step-2 was trained already"):
            made.scheduler.take_batch(2)
        manifest = made.scheduler.take_batch(3)
        assert manifest.metrics["rollout/samples"] == len(manifest.samples)
        again = {
            each.sample_id: each.tokens for each in made.store.payloads([one.sample_id for one in manifest.samples])
        }
        made.scheduler.trained("step-3")
        rest = await train(made, 4, 5)
        made.store.check()
        return again, rest, made.store.counts()

    expected = process(undisturbed, tmp_path / "other", **options)
    first, third = process(before, tmp_path / "journal", killed=True, **options)
    again, rest, counts = process(after, tmp_path / "journal", **options)
    assert again == third, "what was handed out is handed out again, token by token"
    assert not first.keys() & again.keys()
    assert not (first | again).keys() & rest.keys()
    assert counts.trained == len(first) + len(again) + len(rest) == len(expected)
    if staleness == 0:
        assert first | again | rest == expected


def test_segments_of_what_has_been_trained_go(tmp_path):
    async def act(made: Scene) -> list[str]:
        await train(made, 1, 12)
        assert made.scheduler.journal is not None
        await made.scheduler.journal.written()
        return sorted(path.name for path in (tmp_path / "journal").iterdir())

    names = process(act, tmp_path / "journal", killed=True, segment_bytes=1000)
    assert len(names) < 4
    assert "00000001.segment" not in names


def test_a_journal_that_cannot_be_written_is_removed_as_a_whole_and_told(tmp_path, caplog):
    """Injected: the disk is full (the descriptor refuses)."""

    async def act(made: Scene) -> str:
        journal = made.scheduler.journal
        os.close(journal._descriptor)
        journal._descriptor = os.open("/dev/full", os.O_WRONLY)
        await made.serve(0)
        manifest = await made.batch(1)
        await journal.written()
        assert manifest.samples, "the run goes on"
        return journal.failure

    assert "No space left" in process(act, tmp_path / "journal")
    assert list((tmp_path / "journal").iterdir()) == []
    assert "should this process end, the run starts over" in caplog.text


def test_a_recovery_that_is_killed_leaves_the_journal_before_it(tmp_path):
    """Injected: killed before the new journal was published."""

    async def before(made: Scene) -> Any:
        return await take(made, 1)

    handed = process(before, tmp_path / "journal", killed=True)
    first = read_journal(tmp_path / "journal")
    half = JournalFile(tmp_path / "journal")
    half.begin(START)
    half.close()
    assert read_journal(tmp_path / "journal") == first
    assert {one.batch_id for one in first.leases} == {"step-1"}
    assert {one.payload.sample_id for group in first.state.groups for one in group.samples} >= handed.keys()


def test_a_segment_stays_while_a_live_sample_has_its_newest_payload_there(tmp_path):
    def saved(tokens: int, reward: float | None) -> SavedSample:
        sample = Sample("g/0", "g", "p", (1,), reward=reward)
        sample.append([2] * tokens, [-0.5] * tokens, 0)
        return sample.saved()

    books = Books(0, 1, 0, {}, {}, [BookedGroup("g", 0, ["g/0"], ["g/0"])])
    journal = JournalFile(tmp_path)
    journal.begin(START)
    journal.publish()
    journal.note(Admitted("g", 0, ["g/0"]))
    journal.note(Begun("g", saved(2, None)))
    journal.begin(books)
    journal.note(Finished("g", saved(4, 1.0)))
    journal.begin(books)
    journal.close()
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["00000002.segment", "00000003.segment"]
    [group] = read_journal(tmp_path).state.groups
    assert group.samples == [saved(4, 1.0)]


def test_back_pressure_holds_admission_but_never_the_batch_that_the_trainer_waits_for():
    async def run() -> None:
        async with asyncio.timeout(60), rollout(staleness=3) as made:
            made.scheduler.max_buffered_bytes = 1
            await made.serve(0)
            await made.until(lambda: len(made.store.ready) == 2)
            await made.settled()
            assert made.store.counts().admitted == 2 * 3, "of the next batch alone, where 8 groups would be allowed"
            for step in range(1, 5):
                await made.batch(step)
                made.scheduler.trained(f"step-{step}")
                await made.serve(step)

    asyncio.run(run())
