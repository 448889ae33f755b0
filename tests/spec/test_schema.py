"""The schema itself: every key is used by something, and a number that has a unit says so in its name."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

import slimerl
from slimerl.spec.load import UNITS
from slimerl.spec.schema import ParallelSpec, RunSpec

PACKAGE = Path(slimerl.__file__).parent

COUNTS_AND_RATIOS = {
    "run_restarts",
    "engine_restarts",
    "rollout_restarts",
    "in_process_restarts",
    *("data", "tensor", "pipeline", "virtual", "context", "expert", "expert_tensor", "tensor_parallel"),
    *("steps", "prompts_per_step", "minibatches_per_step", "samples_per_prompt", "every_steps", "keep_last"),
    "local_every_steps",
    "local_copies",
    *(
        "threads",
        "threads_per_rank",
        "workers",
        "replicas",
        "engines",
        "processes",
        "max_prompts",
        "max_running_requests",
        "max_staleness",
    ),
    *("seed", "port", "temperature", "oversample", "top_p", "pass_at", "majority_at"),
    *("expert_parallel", "data_parallel_attention", "gpus_per_node"),
    *("min", "max", "trainer_idle", "engines_idle"),
    *("drafts_per_request", "log_lenience", "branches"),
    *("lr", "min_lr", "weight_decay", "beta1", "beta2", "eps", "clip_grad_norm"),
}
"""Numbers without a unit. Those of `algorithm` are coefficients but for tokens, steps and rounds."""

UNIT_WORDS = (
    *("timeout", "deadline", "wait", "interval", "delay", "duration", "period"),
    *("size", "memory", "bytes", "length", "limit", "buffer"),
)
"""What a key is called that is about time, memory or text."""


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, annotation) of every key that is no section."""
    for name, field in model.model_fields.items():
        within = [field.annotation, *parts(field.annotation)]
        sections = [each for each in within if isinstance(each, type) and issubclass(each, BaseModel)]
        if sections:
            yield from fields(sections[0], f"{prefix}{name}.")
        else:
            yield prefix + name, field.annotation


def parts(annotation: Any) -> Iterator[Any]:
    for part in get_args(annotation):
        yield part
        yield from parts(part)


def leaf(key: str) -> str:
    return key.rpartition(".")[2]


def bare_numbers(model: type[BaseModel]) -> list[str]:
    """Keys of numbers whose name ends with no unit."""
    numbers = [key for key, kind in fields(model) if {int, float} & {kind, *parts(kind)}]
    assert numbers
    return [key for key in numbers if key.rpartition("_")[2] not in UNITS]


def test_s2_every_number_with_a_unit_names_it():
    bare = bare_numbers(RunSpec)
    assert [key for key in bare if any(word in leaf(key) for word in UNIT_WORDS)] == []
    assert [key for key in bare if not key.startswith("algorithm.") and leaf(key) not in COUNTS_AND_RATIOS] == []


def test_s2_a_number_that_hides_its_unit_would_be_found():
    """Injected: a key `shutdown` that means seconds."""

    class Section(BaseModel):
        shutdown: float = 1.0
        shutdown_s: float | None = None

    assert bare_numbers(Section) == ["shutdown"]
    assert "shutdown" not in COUNTS_AND_RATIOS


def attributes(tree: ast.AST) -> set[str]:
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


@cache
def used_names() -> frozenset[str]:
    """Attributes read outside of the schema, and by those of its properties that are read there."""
    schema = [ast.parse(file.read_text()) for file in (PACKAGE / "spec").glob("*.py")]
    others = [ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py") if file.parent.name != "spec"]
    used = set().union(*map(attributes, others))
    properties = [
        node
        for tree in schema
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and "property" in [getattr(each, "id", "") for each in node.decorator_list]
    ]
    for _ in properties:  # a property may read another
        used |= set().union(*(attributes(node) for node in properties if node.name in used))
    return frozenset(used)


def unused_keys(model: type[BaseModel]) -> list[str]:
    return sorted(key for key, _ in fields(model) if leaf(key) not in used_names())


def test_s1_every_key_is_used_outside_of_the_schema():
    assert unused_keys(RunSpec) == []


def test_s1_a_key_that_nothing_reads_would_be_found():
    """Injected: a key that nothing reads."""

    class Section(RunSpec):
        read_by_nobody: int = 1

    assert "read_by_nobody" in unused_keys(Section)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"sequence_parallel": True}, r"sequence_parallel needs training\.parallel\.tensor > 1"),
        ({"virtual": 2}, r"virtual needs training\.parallel\.pipeline > 1"),
        ({"pipeline_layout": "Ett|tL"}, r"pipeline_layout needs training\.parallel\.pipeline > 1"),
        (
            {"data": 2, "expert_tensor": 2},
            r"expert_tensor > 1 needs training\.parallel\.expert > 1 or sequence_parallel",
        ),
        ({"data": 3, "expert": 2}, r"expert \* expert_tensor = 2 \* 1 must divide .* = 3"),
    ],
)
def test_s3_a_grid_that_contradicts_itself_names_the_key_and_the_fix(sizes, message):
    with pytest.raises(ValidationError, match=message):
        ParallelSpec(**sizes)
