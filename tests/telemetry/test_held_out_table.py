"""Held-out sets in the final table: the estimate with its interval, at the first and at the last evaluation."""

import io

from rich.console import Console

from slimerl.telemetry import RunLog
from slimerl.telemetry.report import final_table


def test_the_final_table_tells_each_estimate_with_its_interval(tmp_path):
    with RunLog(tmp_path) as log:
        for step, value in ((0, 0.25), (1, 0.5), (2, 0.75)):
            ends = {"_low": value - 0.1, "": value, "_high": value + 0.1}
            log.metrics(step, {f"eval/aime/pass_at_8{end}": each for end, each in ends.items()})
    out = io.StringIO()
    Console(file=out, width=120).print(final_table(tmp_path, "tiny"))
    [row] = [line for line in out.getvalue().splitlines() if "aime" in line]
    assert "held-out aime/pass@8, 95 %" in row
    assert "25.0% (15.0% - 35.0%)" in row
    assert "75.0% (65.0% - 85.0%)" in row
