"""What attention costs beside the rest of a model, for balancing ranks.

Flows in: the model's arguments. Flows out: one number. Counted are multiplications of a forward pass; the backward
pass doubles both sides alike.
"""

from collections.abc import Mapping
from typing import Any


def pair_cost(transformer: Mapping[str, Any]) -> float:
    """Multiplications of one pair of query and key, over all heads, divided by those of one token elsewhere in a layer.

    Args:
        transformer: `ModelArguments.transformer`, of dense, mixture-of-experts and latent-attention models.
    """
    heads, hidden = transformer["num_attention_heads"], transformer["hidden_size"]
    if transformer.get("multi_latent_attention"):
        nope, rope, value = (transformer[key] for key in ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"))
        latent, query_latent = transformer["kv_lora_rank"], transformer.get("q_lora_rank")
        key = nope + rope
        queries = query_latent * (hidden + heads * key) if query_latent else hidden * heads * key
        attention = queries + hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden
    else:
        key = value = transformer["kv_channels"]
        attention = hidden * key * (2 * heads + 2 * transformer["num_query_groups"])
    width = transformer["ffn_hidden_size"]
    if transformer.get("num_moe_experts"):
        # most layers are sparse where any is
        width = transformer["moe_router_topk"] * transformer["moe_ffn_hidden_size"]
        width += transformer.get("moe_shared_expert_intermediate_size") or 0
    return heads * (key + value) / (attention + 3 * hidden * width)
