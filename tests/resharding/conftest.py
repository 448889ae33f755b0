"""What the tests of this room share: the process in which SGLang is imported."""

from sglang_models import sglang_process

__all__ = ["sglang_process"]
