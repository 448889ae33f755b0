"""Which engines a process that takes over may let serve: those that nobody can have written to since their proof."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from slimerl.samples.journal import Books, Distrusted, Held, Record, Released, Replay, Weights, frame, read_frames
from slimerl.samples.messages import EngineInfo
from slimerl.samples.served import ServedWeights

START = Books(0, 0, 0, {}, {})
NAMES = ("engine-0", "engine-1", "engine-2")
CHANGES = st.lists(
    st.one_of(
        st.builds(Held, st.lists(st.sampled_from(NAMES), min_size=1, unique=True)),
        st.builds(
            Released,
            st.sampled_from(("", "lease-a", "lease-b")),
            st.integers(0, 3),
            st.dictionaries(st.sampled_from(NAMES), st.sampled_from(("key-a", "key-b"))),
        ),
        st.builds(Distrusted, st.sampled_from(NAMES)),
    ),
    max_size=12,
)


def made_of(changes: list[Record]) -> tuple[ServedWeights, list[Record]]:
    noted: list[Record] = []
    served = ServedWeights(noted.append)
    for change in changes:
        match change:
            case Held(engine_ids=engine_ids):
                served.held(engine_ids)
            case Released(lease_id=lease_id, version=version, keys=keys):
                served.released(lease_id, version, keys)
            case Distrusted(engine_id=engine_id):
                served.distrusted(engine_id)
    return served, noted


def registers(name: str, key: str, version: int) -> EngineInfo:
    return EngineInfo(name, "http://127.0.0.1:1", key, 1, version=version)


@given(CHANGES, st.sampled_from(NAMES), st.sampled_from(("key-a", "key-b")), st.integers(-1, 3))
def test_w2_an_engine_is_proven_by_the_newest_release_alone_and_by_nothing_after_a_hold(changes, name, key, version):
    served, _ = made_of(changes)
    newest = next((at for at in range(len(changes), 0, -1) if isinstance(changes[at - 1], Released)), 0)
    release, since = (changes[newest - 1] if newest else None), changes[newest:]
    expected = (
        isinstance(release, Released)
        and release.keys.get(name) == key
        and release.version == version
        and not any(isinstance(one, Held) or one == Distrusted(name) for one in since)
    )
    assert served.proves(registers(name, key, version)) is expected


@given(CHANGES, st.integers(1, 4))
def test_the_journal_tells_a_process_that_takes_over_the_same(changes, segment_changes):
    served, noted = made_of(changes)
    replay, before = Replay(), Weights()
    replay.apply([START])
    for start in range(0, len(noted), segment_changes):
        part = noted[start : start + segment_changes]
        segment = [Books(0, 0, 0, {}, {}, weights=before), *part]
        replay.apply(read_frames(b"".join(map(frame, segment)), "a segment"))
        for change in part:
            before = before.after(change)
    found = replay.result()
    assert found is not None
    assert found.weights == served.weights
    assert noted == changes


def test_engines_that_were_held_or_released_are_expected_again():
    served, _ = made_of([Released("a", 0, {"engine-1": "key"}), Held(["engine-1", "engine-0"])])
    assert served.expected == ["engine-0", "engine-1"]


@pytest.mark.parametrize(
    ("lease_id", "version", "ended"), [("a", 1, True), ("a", 2, False), ("b", 1, False), ("", 1, False)]
)
def test_a_release_that_was_carried_out_is_known_by_its_lease(lease_id, version, ended):
    served, _ = made_of([Held(["engine-0"]), Released("a", 1, {"engine-0": "key"})])
    assert served.is_ended(lease_id, version) is ended


def test_a_lease_that_ran_out_was_ended_by_nobodys_release():
    served, _ = made_of([Held(["engine-0"]), Released("", 1, {"engine-0": "key"})])
    assert not served.is_ended("", 1)
