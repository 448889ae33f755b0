"""The trace of a run: what each role wrote of its phases, merged on one clock into a file that viewers open."""

import json
import logging
import os
import threading
import time
from itertools import pairwise

import pytest
from typer.testing import CliRunner

from slimerl.cli import app
from slimerl.samples.messages import ADDRESS_FILE
from slimerl.telemetry import trace
from slimerl.telemetry.perfetto import TRACE_FILE, TraceError, read_trace, write_trace
from slimerl.telemetry.phases import PhaseClock
from slimerl.telemetry.step_times import phases
from slimerl.telemetry.trace import TRACE_DIR, Trace


@pytest.fixture
def traced(tmp_path):
    """This process's trace, as a role has it."""
    trace.start(tmp_path, "trainer-0")
    yield tmp_path
    trace.stop()


def events(run_dir, kind):
    return [event for event in json.loads(write_trace(run_dir).read_text())["traceEvents"] if event["ph"] == kind]


def test_the_file_is_of_the_trace_event_format(traced):
    with trace.span("train", step=1), trace.span("optimizer"):
        pass
    now = time.monotonic()
    trace.add("generate", now - 2.0, now - 1.0, "group", step=1)
    trace.counter("memory GiB", {"rss_gib": 1.5})
    whole = json.loads(write_trace(traced).read_text())
    assert set(whole) == {"traceEvents", "displayTimeUnit", "otherData"}
    required = {
        "X": {"name", "cat", "ts", "dur", "pid", "tid"},
        "M": {"name", "pid", "args"},
        "C": {"name", "ts", "pid"},
    }
    for event in whole["traceEvents"]:
        assert required[event["ph"]] <= event.keys(), event
        assert event.get("dur", 0) >= 0
    times = [event["ts"] for event in whole["traceEvents"] if event["ph"] != "M"]
    assert times[0] == 0
    assert times == sorted(times)
    assert len(times) == 4
    (generated,) = (event for event in whole["traceEvents"] if event["name"] == "generate")
    assert generated["dur"] == pytest.approx(1e6, abs=1), "microseconds"


def test_every_process_and_thread_has_a_name(traced):
    with trace.span("train"):
        pass
    other = Trace(traced, "rollout")
    other.add("generate", 0.0, 1.0, "group")
    other.close()
    names = {(event["name"], event["pid"], event["tid"]): event["args"] for event in events(traced, "M")}
    drawn = {(event["pid"], event["tid"]) for event in events(traced, "X")}
    assert len(drawn) == 2
    for pid, tid in drawn:
        assert "name" in names["thread_name", pid, tid]
        assert "name" in names["process_name", pid, 0]
    processes = [names["process_name", pid, 0]["name"] for pid, _ in sorted(drawn)]
    assert processes == [f"rollout ({os.getpid()})", f"trainer-0 ({os.getpid()})"], "in the order of the pipeline"


def test_spans_that_overlap_are_drawn_on_threads_of_their_own(traced):
    for start, end in ((0.0, 2.0), (1.0, 3.0), (1.5, 1.7), (2.5, 4.0)):
        trace.add("generate", start, end, "group")
    by_thread = {}
    for event in events(traced, "X"):
        by_thread.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(by_thread) == 3
    for spans in by_thread.values():
        assert all(before[1] <= after[0] for before, after in pairwise(sorted(spans)))


def test_processes_with_other_monotonic_clocks_are_put_on_one_clock(tmp_path):
    directory = tmp_path / TRACE_DIR
    directory.mkdir()
    epoch = 1_700_000_000_000_000_000
    for role, booted in (("rollout", 5_000_000), ("trainer-0", 900_000_000_000)):
        header = {"role": role, "pid": 7, "wall_ns": epoch, "monotonic_ns": booted, "left_out": 0}
        span = {"name": "x", "start_ns": booted + 3_000_000, "ns": 1_000, "thread": "main"}
        (directory / f"{role}-7.jsonl").write_text(json.dumps(header) + "\n" + json.dumps(span) + "\n")
    assert [event["ts"] for event in events(tmp_path, "X")] == [0.0, 0.0]


def test_a_span_belongs_to_the_step_of_the_span_around_it_and_names_what_ended_it(traced):
    with pytest.raises(KeyError), trace.span("train", step=4), trace.span("optimizer"):
        raise KeyError
    with trace.span("after"):
        pass
    found = {event["name"]: event["args"] for event in events(traced, "X")}
    assert found["optimizer"] == {"step": 4, "error": "KeyError"}
    assert found["train"] == {"step": 4, "error": "KeyError"}
    assert found["after"] == {}


def test_the_files_of_a_process_are_bounded_and_keep_the_latest_records(tmp_path):
    written = Trace(tmp_path, "trainer-0", half_bytes=4000)
    for step in range(500):
        with written.span("train", step):
            pass
    written.close()
    sizes = [file.stat().st_size for file in (tmp_path / TRACE_DIR).iterdir()]
    assert len(sizes) == 2
    assert sum(sizes) < 2 * 4000 + 500
    recorded = read_trace(tmp_path)
    steps = [span.step for span in recorded.spans]
    assert steps == list(range(500 - len(steps), 500))
    assert recorded.left_out == 500 - len(steps), "what is missing is counted"


def test_the_trace_of_a_run_that_goes_on_can_be_looked_at(traced):
    with trace.span("train", step=1):
        pass
    file = next((traced / TRACE_DIR).iterdir())
    with file.open("a") as torn:
        torn.write('{"name": "half a rec')
    assert [event["name"] for event in events(traced, "X")] == ["train"]


def test_threads_write_whole_records(traced):
    def work():
        for step in range(200):
            trace.add("x", 0.0, 1.0, "lane", step)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(read_trace(traced).spans) == 800


def test_a_full_disk_ends_the_trace_and_not_the_run(tmp_path, caplog):
    written = Trace(tmp_path, "trainer-0")
    written._file.close()
    written._file = open("/dev/full", "w", buffering=1)  # noqa: SIM115 - every write to it fails like one to a full disk
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            with written.span("train", step):
                pass
    assert len(caplog.records) == 1, "said once"
    assert "the trace ends here" in caplog.text


def test_a_forked_process_does_not_write_into_its_parents_trace(traced):
    child = os.fork()
    if child == 0:
        with trace.span("stray"):
            pass
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with trace.span("own"):
        pass
    assert [span.name for span in read_trace(traced).spans] == ["own"]


def test_without_a_trace_spans_cost_nothing_and_fail_nothing(tmp_path):
    trace.stop()
    with trace.span("train", 1):
        trace.add("x", 0.0, 1.0, "lane")
    with pytest.raises(TraceError, match="holds no trace"):
        write_trace(tmp_path)


def test_a_span_costs_less_than_a_hundredth_of_the_shortest_step(traced):
    start = time.thread_time()
    for step in range(2000):
        with trace.span("train", step):
            pass
    # a step has some 30 spans, the quickstart's takes 2 s
    assert 30 * (time.thread_time() - start) / 2000 < 0.01 * 2.0


def test_the_phase_clock_adds_up_and_is_traced(traced):
    clock = PhaseClock()
    for _ in range(3):
        with clock("send", step=2):
            pass
    (phase,) = phases(traced)
    assert (phase.role, phase.path) == ("trainer", "send")
    assert phase.seconds[2] == pytest.approx(clock.take()["send"], abs=0.01)
    assert clock.take() == {}


def test_of_several_ranks_the_slowest_counts_and_overlapping_groups_count_once(tmp_path):
    for role, seconds in (("trainer-0", 1.0), ("trainer-1", 3.0)):
        written = Trace(tmp_path, role)
        written.add("train", 0.0, seconds, "main", step=1)
        written.close()
    rollout = Trace(tmp_path, "rollout")
    for start, end in ((1.0, 4.0), (2.0, 6.0)):
        rollout.add("generate", start, end, "group", step=1)
    rollout.close()
    found = {(phase.role, phase.path): phase.seconds for phase in phases(tmp_path)}
    assert found["trainer", "train"][1] == pytest.approx(3.0)
    assert found["rollout", "generate"][1] == pytest.approx(5.0)


def test_a_phase_inside_another_has_its_path_and_follows_it_whatever_comes_first_on_another_rank(traced):
    other = Trace(traced, "trainer-1")
    for name in ("train", "sync"):
        with other.span(name, step=1):
            pass
    other.close()
    for name, inside in (("train", "optimizer"), ("sync", "hold")):
        with trace.span(name, step=1), trace.span(inside):
            pass
    assert [phase.path for phase in phases(traced)] == ["train", "train › optimizer", "sync", "sync › hold"]


@pytest.mark.parametrize("record", ['{"step": 1}', '{"counter": "memory"}', '{"name": "a", "start_ns": 1, "ns": "x"}'])
def test_a_record_that_is_no_part_of_a_trace_is_named(traced, record):
    file = next((traced / TRACE_DIR).iterdir())
    with file.open("a") as lines:
        lines.write(f"{record}\n")
    with pytest.raises(TraceError, match=r"trainer-0.*line 2 is neither span nor counter; remove the line"):
        read_trace(traced)


def test_a_merged_trace_that_cannot_be_written_is_one_line(traced):
    """Injected: a directory stands where the file belongs."""
    (traced / TRACE_FILE).mkdir()
    result = CliRunner().invoke(app, ["trace", str(traced)])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"{traced}/trace.json cannot be written: ")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("content", [b"{}", b"\xff", b"not JSON"])
def test_the_engines_of_a_run_whose_address_is_damaged_are_not_listed_but_told(tmp_path, content):
    (tmp_path / ADDRESS_FILE).write_bytes(content)
    result = CliRunner().invoke(app, ["engines", "list", str(tmp_path)])
    assert result.exit_code == 2
    assert "holds no address of a rollout role" in result.stderr
    assert len(result.stderr.splitlines()) == 1
