"""The record of a run: whole lines, readable while it is written, and the figures that are shown of it."""

import io
import json

from rich.console import Console

from slimerl.telemetry import RunLog, read_records
from slimerl.telemetry.progress import ProgressView, Tail
from slimerl.telemetry.report import final_table, phase_seconds


def test_what_is_recorded_is_read_back(tmp_path):
    with RunLog(tmp_path) as log:
        log.metrics(1, {"train/loss": 0.5})
        with log.phase(1, "train"):
            pass
    (record,) = read_records(tmp_path / "metrics.jsonl")
    assert (record["step"], record["train/loss"]) == (1, 0.5)
    start, end = read_records(tmp_path / "events.jsonl")
    assert (start["edge"], end["edge"], end["phase"]) == ("start", "end", "train")
    assert end["seconds"] >= 0


def test_a_record_cut_short_by_a_crash_is_left_out_and_the_next_one_is_whole(tmp_path):
    with RunLog(tmp_path) as log:
        log.metrics(1, {"a": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "a"')
    assert [record["step"] for record in read_records(tmp_path / "metrics.jsonl")] == [1]
    with RunLog(tmp_path) as log:
        log.metrics(2, {"a": 2.0})
    assert [record["step"] for record in read_records(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_tail_gives_each_whole_record_once(tmp_path):
    path = tmp_path / "events.jsonl"
    tail = Tail(path)
    assert list(tail.new()) == []
    path.write_text('{"n": 1}\n{"n": 2')
    assert [record["n"] for record in tail.new()] == [1]
    with path.open("a") as file:
        file.write("}\n")
    assert [record["n"] for record in tail.new()] == [2]


def test_without_a_terminal_each_step_is_one_line(tmp_path):
    out = io.StringIO()
    with ProgressView(tmp_path, 2, Console(file=out, force_terminal=False)), RunLog(tmp_path) as log:
        log.metrics(1, {"train/loss": 0.25, "rollout/accuracy": 0.5})
    assert out.getvalue() == "step    1/2  accuracy 50.0%  loss 0.2500\n"


def test_without_a_terminal_each_line_says_how_long_the_rest_will_take(tmp_path):
    out = io.StringIO()
    with ProgressView(tmp_path, 100, Console(file=out, force_terminal=False)):
        records = ({"step": step, "time": 1000.0 + 90 * step, "train/loss": 0.25} for step in (7, 8, 10))
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert [line.partition("left ")[2] for line in out.getvalue().splitlines()] == ["", "2:18:00", "2:15:00"]


def test_an_evaluation_that_ended_beside_later_steps_says_nothing_of_how_long_the_rest_will_take(tmp_path):
    out = io.StringIO()
    with ProgressView(tmp_path, 100, Console(file=out, force_terminal=False)):
        records = [{"step": step, "time": 1000.0 + 90 * step, "train/loss": 0.25} for step in (7, 8, 10)]
        records.append({"step": 8, "time": 2000.0, "eval/accuracy": 0.5})
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert out.getvalue().splitlines()[-1] == "step    8/100  held-out 50.0%"


def test_the_final_table_holds_first_and_last_values(tmp_path):
    with RunLog(tmp_path) as log:
        log.metrics(0, {"eval/accuracy": 0.25})
        log.metrics(1, {"eval/accuracy": 0.75, "time/step": 2.0, "time/train": 1.5})
    out = io.StringIO()
    Console(file=out, width=100).print(final_table(tmp_path, "tiny"))
    assert "25.0%" in out.getvalue()
    assert "75.0%" in out.getvalue()
    assert "1.50" in out.getvalue()


def test_phase_seconds_leave_the_warm_up_step_out():
    records = [json.loads(f'{{"step": {n}, "time/step": {s}}}') for n, s in ((1, 9.0), (2, 1.0), (3, 3.0))]
    assert phase_seconds(records) == {"time/step": 2.0}
