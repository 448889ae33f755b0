"""Named engines and traces of the comparisons. Pure values.

The design trace: 48 groups x 8 siblings x 4 turns, oracle hit rate about 0.836.
"""

from slimerl.simulation.rollout_engine import EngineRates
from slimerl.simulation.rollout_trace import Lengths, Shape

DENSE = EngineRates()
SATURATED = EngineRates(slots=8)
"""So few slots that the design trace fills each six times over."""
LARGE_EXPERTS = EngineRates(
    slots=48,
    kv_tokens=1_500_000,
    prefill_tokens_per_s=12_000.0,
    step_s=0.020,
    step_per_request_s=1e-4,
    step_per_kv_token_s=1e-8,
)
"""A mixture of experts with latent attention over one node of 8 GPUs: a slow step, cheap KV."""

DESIGN = Shape("design")
TAIL = Shape("tail", answer=Lengths(256, 1.0, 4096))
"""The design trace with heavy-tailed answers."""
LONG_ANSWERS = Shape("32k", turns=1, prompt=Lengths(1024, 0.3), answer=Lengths(4000, 1.0, 32_000))
ROUTING_SHAPES = (
    DESIGN,
    Shape("interleaved", interleaved=True),
    TAIL,
    Shape("skewed", skewed_groups=6),
    Shape("multi-turn", turns=10),
    Shape("shared system prompt", system=2048),
    Shape("long context", groups=16, turns=2, prompt=Lengths(16_000, 0.3, 32_000), answer=Lengths(1000, 0.8, 4000)),
)
"""What routing is judged by: hit rate and spread of requests at each of `CONCURRENCIES`."""
CONCURRENCIES = (8, 32, 96, 256)
