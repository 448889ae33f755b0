"""The agreed configuration, built with the real Transformer Engine instead of an empty library."""

import sys
from pathlib import Path

import pytest
from gpu_process import needs_gpus, needs_transformer_engine

sys.path.insert(0, str(Path(__file__).parent.parent / "training"))

pytestmark = [pytest.mark.gpu, needs_gpus(1), needs_transformer_engine]


def test_megatron_builds_the_agreed_layers_with_the_real_library() -> None:
    from configuration_subject import CASES
    from test_gpu_configuration import GOLDENS, texts

    for case, text in texts(CASES).items():
        assert text == (GOLDENS / f"{case}.txt").read_text(), case
