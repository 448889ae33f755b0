"""All algorithms in one table: how each is made, its formula, its source.

Invariant: the table has exactly the names of `algorithm.name`; documentation is generated from here.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

from slimerl.algorithms.cispo import Cispo
from slimerl.algorithms.custom import Custom
from slimerl.algorithms.dapo import Dapo
from slimerl.algorithms.decoupled_ppo import DecoupledPpo
from slimerl.algorithms.distillation import Distillation
from slimerl.algorithms.dpo import Dpo
from slimerl.algorithms.dr_grpo import DrGrpo
from slimerl.algorithms.grpo import Grpo
from slimerl.algorithms.gspo import Gspo
from slimerl.algorithms.ppo import Ppo
from slimerl.algorithms.reinforce_pp import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from slimerl.algorithms.reward_model import RewardModel
from slimerl.algorithms.rloo import Rloo
from slimerl.algorithms.sft import Sft
from slimerl.algorithms.terms import Algorithm, Needs
from slimerl.spec.algorithm import AlgorithmName, AlgorithmSpec


@dataclass(frozen=True)
class Entry:
    """`advantage` and `loss`: formulas, per sample i or token t; ρ = π_θ/π_prox, sg: without gradient."""

    make: Callable[[AlgorithmSpec], Algorithm]
    title: str
    advantage: str
    loss: str
    source: str


_GROUP = "(r − mean_group) / (std_group + 1e-6)"
_CLIPPED = "max(−ρA, −clip(ρ, 1−ε_lo, 1+ε_hi)A), for A < 0 at most 3·|A|"

ALGORITHMS: dict[AlgorithmName, Entry] = {
    "grpo": Entry(Grpo, "GRPO", _GROUP, _CLIPPED, "arXiv 2402.03300"),
    "dr_grpo": Entry(DrGrpo, "Dr.GRPO", "r − mean_group", f"{_CLIPPED}; token sum / L per sample", "arXiv 2503.20783"),
    "dapo": Entry(
        Dapo,
        "DAPO",
        f"{_GROUP}, r with overlong penalty max(−1, min(0, −(len − (L_max − L_buf)) / L_buf))",
        f"{_CLIPPED}; groups all right or all wrong are replaced",
        "arXiv 2503.14476",
    ),
    "gspo": Entry(
        Gspo,
        "GSPO",
        _GROUP,
        "max(−sA, −clip(s, 1−ε_lo, 1+ε_hi)A), s = sg[exp(mean_t log ρ)]·π_θ/sg[π_θ]; mean over samples",
        "arXiv 2507.18071",
    ),
    "cispo": Entry(Cispo, "CISPO", _GROUP, "−sg[clip(ρ, 1−ε_lo, 1+ε_hi)]·A·log π_θ", "arXiv 2506.13585"),
    "rloo": Entry(Rloo, "RLOO", "r_i − mean_{j≠i} r_j", _CLIPPED, "arXiv 2402.14740"),
    "reinforce_pp": Entry(
        ReinforcePlusPlus,
        "REINFORCE++",
        "Σ_{k≥t} γ^{k−t}(r_k − β·KL_k), whitened over the step's tokens",
        _CLIPPED,
        "arXiv 2501.03262",
    ),
    "reinforce_pp_baseline": Entry(
        ReinforcePlusPlusBaseline,
        "REINFORCE++-baseline",
        "as REINFORCE++, r − mean_group for r",
        _CLIPPED,
        "arXiv 2501.03262",
    ),
    "ppo": Entry(
        Ppo,
        "PPO",
        "GAE: δ_t = r_t + γV_{t+1} − V_t, A_t = δ_t + γλA_{t+1}, R = A + V; A whitened over the step's tokens",
        f"{_CLIPPED}; critic ½·max((V−R)², (clip(V, V_old ± c)−R)²)",
        "arXiv 1707.06347, 1506.02438",
    ),
    "decoupled_ppo": Entry(
        DecoupledPpo, "decoupled PPO", _GROUP, f"(π_prox/μ)·{_CLIPPED}", "arXiv 2110.00641, 2505.24298"
    ),
    "distillation": Entry(
        Distillation, "on-policy distillation", "log π_teacher − log π_prox", _CLIPPED, "arXiv 2306.13649"
    ),
    "custom": Entry(Custom, "custom", "advantage_function, or GRPO's", "loss_function, or GRPO's", "the user"),
    "sft": Entry(Sft, "SFT", "–", "−log π_θ", "–"),
    "dpo": Entry(
        Dpo, "DPO", "–", "−log σ(β[Σ_t Δ(chosen) − Σ_t Δ(rejected)]), Δ = log π_θ − log π_ref", "arXiv 2305.18290"
    ),
    "reward_model": Entry(
        RewardModel,
        "Bradley–Terry reward model",
        "–",
        "−log σ(s_chosen − s_rejected − margin), s at the last token",
        "arXiv 2203.02155",
    ),
}
"""`algorithm.name` of the spec → the algorithm. To add one: a file of its own, a name and options in
`slimerl/spec/algorithm.py`, an entry here, a reference in `tests/algorithms/`."""


def algorithm_of(spec: AlgorithmSpec) -> Algorithm:
    """The algorithm that the spec names. Raises CustomFunctionError for `custom`."""
    return ALGORITHMS[spec.name].make(spec)


def needs_in_words(needs: Needs) -> str:
    """The names of what is needed, or a dash."""
    return ", ".join(each.name.replace("_", " ") for each in fields(needs) if getattr(needs, each.name)) or "–"
