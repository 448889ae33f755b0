"""The exact rule takes the answer and nothing that amounts to it."""

import pytest

from slimerl.rewards.exact import score
from slimerl.rewards.outcome import RewardRequest, Scored, Unparsable


@pytest.mark.parametrize(
    ("response", "outcome"),
    [
        ("408", Scored(1.0, True, said="408")),
        (" 408\n", Scored(1.0, True, said="408")),
        ("12*34", Scored(0.0, False, said="12*34")),
        ("408.0", Scored(0.0, False, said="408.0")),
        ("408408", Scored(0.0, False, said="408408")),
        (" \n", Unparsable()),
        ("", Unparsable()),
    ],
)
def test_a_response_is_compared_as_it_stands(response, outcome):
    assert score(RewardRequest("s", response, "408")) == outcome
