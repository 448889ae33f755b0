"""Layouts of real models on real clusters, for the benchmarks of the planner: (trainer, engines) pairs by name.

Flows in: `configs/models/*.json`. Flows out: `SyncShape`s. Nothing here runs anything.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from slimerl.resharding.families.family import Form
from slimerl.resharding.families.scales import BlockScales
from slimerl.resharding.layouts import EngineLayout, MegatronLayout
from slimerl.resharding.planner import SyncShape, Topology

MODELS = Path(__file__).parent.parent / "configs" / "models"


class Case(NamedTuple):
    """One sync: a model, its trainer, `replicas` engines."""

    name: str
    model: str
    train: MegatronLayout
    engine: EngineLayout
    replicas: int
    prediction: bool = False

    @property
    def title(self) -> str:
        return f"{self.name} {self.train.world_size}→{self.engine.world_size}×{self.replicas}"


@cache
def model_config(model: str) -> dict[str, Any]:
    """The config.json of a model in `configs/models`."""
    config: dict[str, Any] = json.loads((MODELS / f"{model}.json").read_text())
    return config


def shape_of(case: Case) -> SyncShape:
    config = model_config(case.model)
    return SyncShape(
        config,
        case.train,
        case.engine,
        Topology(case.train.world_size, case.engine.world_size, case.replicas),
        form=Form(case.prediction, BlockScales.of(config)),
    )


def trainer(
    tensor: int,
    pipeline: int,
    data: int,
    expert: int = 1,
    expert_tensor: int | None = None,
    stages: tuple[int, ...] | None = None,
    virtual: int = 1,
) -> MegatronLayout:
    """Expert tensor parallelism is 1 where there are experts, unless given."""
    if expert > 1 and expert_tensor is None:
        expert_tensor = 1
    layers = None if stages is None else (stages,)
    return MegatronLayout(
        tensor, data, pipeline=pipeline, expert=expert, expert_tensor=expert_tensor, stage_layers=layers,
        virtual=virtual,
    )  # fmt: skip


def experts_everywhere(ranks: int, expert: int | None = None) -> EngineLayout:
    """DP-attention on every GPU, experts over all of them; everything else is replicated."""
    return EngineLayout(
        ranks, ranks if expert is None else expert, ranks, replicated_dense=True, replicated_shared=True
    )


EIGHT_STAGES = (8, 8, 8, 8, 8, 8, 7, 6)
DEEPSEEK = Case(
    "deepseek-v3", "deepseek_v3_671b", trainer(4, 8, 8, 32, stages=EIGHT_STAGES), experts_everywhere(32), 16
)
KIMI = Case("kimi-k2", "kimi_k2_1t", trainer(4, 8, 8, 32, stages=EIGHT_STAGES), experts_everywhere(32), 16)
DEEPSEEK_TP16 = DEEPSEEK._replace(name="deepseek-v3 tp16", engine=EngineLayout(16), replicas=32)
KIMI_TP16 = KIMI._replace(name="kimi-k2 tp16", engine=EngineLayout(16), replicas=32)

MATRIX = (
    DEEPSEEK,
    KIMI,
    DEEPSEEK._replace(name="deepseek-v3 with mtp", prediction=True),
    DEEPSEEK._replace(name="deepseek-v3 tp8ep8", engine=EngineLayout(8, 8), replicas=64),
    DEEPSEEK._replace(name="deepseek-v3 ep64", engine=experts_everywhere(64), replicas=8),
    DEEPSEEK._replace(name="deepseek-v3 tp16ep16 at 4", engine=EngineLayout(16, 16, 4), replicas=32),
    Case("deepseek-v3 pp16", "deepseek_v3_671b", trainer(2, 16, 16, 32, stages=(3, *(4,) * 14, 2)),
         experts_everywhere(32), 4),
    Case("deepseek-v3 etp2", "deepseek_v3_671b", trainer(4, 4, 8, 8, 2, stages=(16, 15, 15, 15)),
         experts_everywhere(32), 16),
    Case("deepseek-v3 ep128", "deepseek_v3_671b", trainer(8, 2, 16, 64, stages=(31, 30)), experts_everywhere(128), 4),
    DEEPSEEK._replace(
        name="deepseek-v3 engine pp2",
        engine=EngineLayout(16, 16, 16, pipeline=2, replicated_dense=True, replicated_shared=True),
    ),
    DEEPSEEK._replace(
        name="deepseek-v3 engine cp2 moe-dp2",
        engine=EngineLayout(32, 16, 8, 2, 2, replicated_dense=True, replicated_shared=True),
    ),
    Case("kimi-k2 64 trainers", "kimi_k2_1t", trainer(4, 2, 8, 32, stages=(31, 30)), experts_everywhere(64), 8),
    Case("kimi-k2 tp16ep16", "kimi_k2_1t", trainer(8, 8, 8, 64, stages=EIGHT_STAGES), EngineLayout(16, 16, 16), 8),
    Case("glm-4.5", "glm45_355b", trainer(4, 4, 8, 16, stages=(23, 23, 23, 23)), experts_everywhere(16), 32),
    Case("glm-4.5 tp8", "glm45_355b", trainer(4, 4, 8, 32, stages=(24, 24, 24, 20)), EngineLayout(8), 64),
    Case("glm-4.5 512→128", "glm45_355b", trainer(8, 4, 16, 32), experts_everywhere(32), 4),
    Case("glm-4.5 etp4", "glm45_355b", trainer(4, 4, 8, 8, 4), EngineLayout(8, 8), 16),
    Case("qwen3-235b", "qwen3_235b_a22b", trainer(4, 2, 32, 32), experts_everywhere(32), 16),
    Case("qwen3-235b kv 4 < tp 8", "qwen3_235b_a22b", trainer(4, 2, 16, 16), EngineLayout(8, 8), 16),
    Case("qwen3-235b tp16", "qwen3_235b_a22b", trainer(8, 2, 8, 32), EngineLayout(16, 16), 16),
    Case("qwen3-235b 512→128", "qwen3_235b_a22b", trainer(4, 2, 64, 64), EngineLayout(8, 8, 2), 16),
    Case("qwen3-30b", "qwen3_30b_a3b", trainer(2, 2, 8, 8), EngineLayout(4, 4), 8),
    Case("qwen3-30b vpp", "qwen3_30b_a3b", trainer(2, 4, 4, 8, virtual=3), EngineLayout(8, 8), 8),
    Case("qwen3-30b tp2", "qwen3_30b_a3b", trainer(2, 1, 16, 8), EngineLayout(2), 32),
    Case("qwen3-8b", "qwen3_8b", trainer(4, 2, 4), EngineLayout(8), 8),
    Case("qwen3-8b one gpu each", "qwen3_8b", trainer(2, 2, 8), EngineLayout(1), 64),
    Case("qwen3-8b uneven", "qwen3_8b", trainer(2, 2, 8, stages=(20, 16)), EngineLayout(4), 16),
    Case("qwen2.5-7b", "qwen25_7b", trainer(4, 2, 4), EngineLayout(4), 16),
    Case("qwen2.5-7b engine pp2", "qwen25_7b", trainer(2, 4, 4, stages=(8, 7, 7, 6)), EngineLayout(2, pipeline=2), 16),
    Case("smollm2", "smollm2_135m", trainer(1, 1, 8), EngineLayout(1), 16),
    # Few trainers for large engines, or unequal stages: the trainer's NICs are the limit.
    Case("t: qwen3-8b", "qwen3_8b", trainer(2, 1, 1), EngineLayout(8), 4),
    Case("t: qwen3-8b pp", "qwen3_8b", trainer(2, 2, 1, stages=(24, 12)), EngineLayout(8), 8),
    Case("t: qwen3-30b", "qwen3_30b_a3b", trainer(1, 1, 8, 8), EngineLayout(16, 16), 2),
    Case("t: qwen3-30b uneven", "qwen3_30b_a3b", trainer(2, 2, 2, 4, stages=(8, 40)), EngineLayout(8, 8), 4),
    Case("t: qwen3-235b", "qwen3_235b_a22b", trainer(4, 1, 4, 16), experts_everywhere(32), 4),
    Case("t: qwen3-235b ep64", "qwen3_235b_a22b", trainer(8, 2, 2, 16), experts_everywhere(64), 4),
    Case("t: glm-4.5", "glm45_355b", trainer(4, 2, 4, 16), experts_everywhere(80), 4),
    Case("t: glm-4.5 uneven", "glm45_355b", trainer(4, 4, 2, 8, stages=(40, 20, 20, 12)), experts_everywhere(32), 8),
    Case("t: deepseek-v3", "deepseek_v3_671b", trainer(4, 4, 4, 16, stages=(16, 15, 15, 15)),
         experts_everywhere(128), 2),
    Case("t: deepseek-v3 ep256", "deepseek_v3_671b", trainer(8, 4, 4, 32, stages=(16, 15, 15, 15)),
         experts_everywhere(256), 2),
    Case("t: kimi-k2", "kimi_k2_1t", trainer(4, 2, 4, 16, stages=(31, 30)), experts_everywhere(64), 2),
    Case("t: smollm2", "smollm2_135m", trainer(1, 1, 2), EngineLayout(1), 16),
)  # fmt: skip
