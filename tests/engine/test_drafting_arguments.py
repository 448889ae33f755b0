"""An engine's own drafts on its command line."""

from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
from engine_fixtures import engine_spec

from slimerl.engine.launcher import Device, server_arguments


def arguments(**drafting: object) -> dict[str, str]:
    spec = engine_spec(Path("/models/m"), Path("/runs/r"), drafting={"frozen": True, **drafting})
    words = server_arguments(spec, 0, Device.CUDA, 20_123)
    return {word: value for word, value in pairwise(words) if word.startswith("--speculative")}


def test_without_drafting_nothing_is_said_of_it():
    words = server_arguments(engine_spec(Path("/models/m"), Path("/runs/r")), 0, Device.CUDA, 20_123)
    assert not [word for word in words if "speculative" in word]


@pytest.mark.parametrize(
    ("method", "named", "model_path"),
    [("mtp", "NEXTN", None), ("eagle", "EAGLE", "/models/draft"), ("eagle3", "EAGLE3", "/models/draft")],
)
def test_each_method_has_sglangs_name_and_its_sizes(method: str, named: str, model_path: str | None):
    given = {"method": method, "steps": 2, "branches": 2, "draft_tokens": 6}
    said = arguments(**given, **({"model_path": model_path} if model_path else {}))
    expected = {
        "--speculative-algorithm": named,
        "--speculative-num-steps": "2",
        "--speculative-eagle-topk": "2",
        "--speculative-num-draft-tokens": "6",
    }
    assert said == expected | ({"--speculative-draft-model-path": model_path} if model_path else {})


def test_sglang_knows_every_argument():
    """Fault: an argument that this version has under another name."""
    package = find_spec("sglang")  # not imported: that takes seconds
    assert package is not None
    assert package.origin is not None
    source = (Path(package.origin).parent / "srt/arg_groups/fields/spec.py").read_text()
    said = arguments(method="eagle", model_path="/models/draft")
    for word in said:
        assert word.removeprefix("--").replace("-", "_") in source
