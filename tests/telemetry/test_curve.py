"""The text curve puts each value at its height and its step."""

import pytest

from slimerl.telemetry.curve import text_curve


def test_a_rising_line_goes_from_bottom_left_to_top_right():
    lines = text_curve(list(range(11)), [step / 10 for step in range(11)]).splitlines()
    assert lines[0] == "100% │          •"
    assert lines[10] == "  0% │•"
    assert lines[-1].split() == ["step", "0", "10"]


def test_many_steps_are_averaged_into_the_width():
    drawn = text_curve(list(range(100)), [0.5] * 100, width=20)
    assert drawn.count("•") == 20


def test_values_beyond_shares_are_drawn_between_their_least_and_their_most():
    lines = text_curve([0, 1, 2], [250.0, 20.0, 480.0]).splitlines()
    assert lines[0] == "480 │  •"
    assert lines[10] == " 20 │ •"


def test_nothing_to_draw_is_an_error():
    with pytest.raises(ValueError, match="nothing to draw"):
        text_curve([], [])
