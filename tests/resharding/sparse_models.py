"""Mixture-of-experts models of the large kind (GLM-4.5, DeepSeek-V3, Kimi-K2), and a second account of their layouts.

The references go from one checkpoint name to the next, as SGLang's and Megatron's loaders do, with torch's own cat and
chunk; they share no code with `slimerl.resharding.families` and know nothing of boxes.
"""

from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from resharding_models import State

from slimerl.resharding.layouts import EngineLayout, MegatronLayout

BLOCK = 4
"""Rows and columns of a block of scales in these tests; all that is cut is a multiple of it."""

DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 41,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}
LATENT_KEYS = [key for key in DEEPSEEK if "lora" in key or "_head_dim" in key]
GLM: dict[str, Any] = {key: value for key, value in DEEPSEEK.items() if key not in LATENT_KEYS} | {
    "model_type": "glm4_moe",
    "num_key_value_heads": 2,
    "head_dim": 8,
    "attention_bias": True,
    "use_qk_norm": True,
}
KIMI: dict[str, Any] = DEEPSEEK | {"model_type": "kimi_k2", "num_nextn_predict_layers": 0, "n_routed_experts": 12}

PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3_235b_a22b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
    },
    "glm45_355b": GLM
    | {
        "vocab_size": 151552,
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 92,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "n_routed_experts": 160,
        "first_k_dense_replace": 3,
    },
    "deepseek_v3_671b": DEEPSEEK
    | {
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "first_k_dense_replace": 3,
    },
}
PUBLISHED["kimi_k2_1t"] = PUBLISHED["deepseek_v3_671b"] | {
    "model_type": "kimi_k2",
    "vocab_size": 163840,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}


@st.composite
def sparse_configs(draw: st.DrawFn, ranks: int = 1, expert: int = 1, whole_blocks: bool = False) -> dict[str, Any]:
    """A config that `ranks` can share along every axis, its experts in `expert` groups; `whole_blocks`: in FP8."""
    unit = BLOCK * ranks if whole_blocks else ranks
    base = draw(st.sampled_from([DEEPSEEK, GLM, KIMI]))
    heads = ranks * draw(st.sampled_from([2, 4] if whole_blocks else [1, 2]))
    config = base | {
        "vocab_size": draw(st.integers(5, 140)),
        "hidden_size": 8 * draw(st.integers(1, 3)),
        "intermediate_size": unit * draw(st.integers(1, 3)),
        "moe_intermediate_size": unit * draw(st.integers(1, 3)),
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "n_routed_experts": expert * draw(st.integers(1, 3)),
        "n_shared_experts": draw(st.sampled_from([1, 2])),
        "first_k_dense_replace": draw(st.integers(0, 2)),
        "num_nextn_predict_layers": draw(st.integers(0, 1)),
        "dtype": draw(st.sampled_from(["float32", "bfloat16"])),
    }
    if base is GLM:
        pairs = [kv for kv in (1, 2, 4, 8) if heads % kv == 0 and (kv % ranks == 0 or ranks % kv == 0)]
        return config | {
            "num_key_value_heads": draw(st.sampled_from(pairs)),
            "attention_bias": draw(st.booleans()),
            "use_qk_norm": draw(st.booleans()),
        }
    ranks_of_latent = {"q_lora_rank": draw(st.sampled_from([None, unit, 2 * unit])), "kv_lora_rank": 2 * unit}
    return config | ranks_of_latent | {"qk_rope_head_dim": 2 if whole_blocks else ranks}


def _padded(table: torch.Tensor, multiple: int, part: int, parts: int) -> torch.Tensor:
    rows = -(-len(table) // multiple) * multiple
    if rows % parts:
        rows = -(-len(table) // (multiple * parts)) * multiple * parts
    return F.pad(table, (0, 0, 0, rows - len(table))).chunk(parts)[part]


class SglangReference:
    """SGLang's parameters of one rank, by the checkpoint's names; the draft model's start with `draft.`."""

    def __init__(self, config: dict[str, Any], state: State, layout: EngineLayout, rank: int) -> None:
        self.config, self.state, self.layout = config, state, layout
        tensor, inside = layout.tensor, layout.tensor // layout.expert
        attention = tensor // layout.data_attention
        self.attention, self.full = (rank % attention, attention), (rank, tensor)
        self.inside_expert, self.expert_rank = (rank % inside, inside), rank // inside
        self.found: State = {}
        for name in state:
            self._take(name)

    def _named(self, name: str) -> str:
        draft = f"model.layers.{self.config['num_hidden_layers']}."
        if not name.startswith(draft):
            return name
        rest = name.removeprefix(draft)
        own = rest.startswith(("enorm", "hnorm", "eh_proj", "shared_head"))
        return f"draft.model.{rest}" if own else f"draft.model.decoder.{rest}"

    def _cut(self, name: str, dim: int, share: tuple[int, int]) -> torch.Tensor:
        return self.state[name].chunk(share[1], dim)[share[0]]

    def _take(self, name: str) -> None:
        *parents, module, kind = name.split(".")
        path = ".".join(parents)
        there = self._named(name)
        if ".experts." in name or (".shared_experts." in name and self.layout.fused_shared_experts):
            if ".experts." in name and ".experts.0.gate_proj." in name:
                self._experts(name.split("experts.0.")[0], kind)
        elif module in ("embed_tokens", "lm_head"):
            over_attention = module == "embed_tokens" or self.layout.head_over_attention
            self.found[there] = _padded(self.state[name], 64, *(self.attention if over_attention else self.full))
        elif module == "q_proj" and f"{path}.k_proj.{kind}" in self.state:
            self.found[there.replace("q_proj", "qkv_proj")] = self._qkv(path, kind)
        elif module == "q_a_proj":
            fused = torch.cat([self.state[name], self.state[f"{path}.kv_a_proj_with_mqa.{kind}"]])
            self.found[there.replace("q_a_proj", "fused_qkv_a_proj_with_mqa")] = fused
        elif module in ("q_proj", "q_b_proj", "kv_b_proj"):
            self.found[there] = self._cut(name, 0, self.attention)
        elif module == "o_proj":
            self.found[there] = self._cut(name, 1, self.attention)
        elif module == "gate_proj":
            gate, up = (self._cut(each, 0, self._mlp(name)) for each in (name, name.replace("gate_proj", "up_proj")))
            self.found[there.replace("gate_proj", "gate_up_proj")] = torch.cat([gate, up])
        elif module == "down_proj":
            self.found[there] = self._cut(name, 1, self._mlp(name))
        elif module not in ("k_proj", "v_proj", "up_proj") and (
            module != "kv_a_proj_with_mqa" or f"{path}.q_a_proj.{kind}" not in self.state
        ):
            self.found[there] = self.state[name]

    def _mlp(self, name: str) -> tuple[int, int]:
        shared = ".shared_experts." in name
        whole = self.layout.replicated_shared if shared else self.layout.replicated_dense
        return (0, 1) if whole else self.full

    def _qkv(self, path: str, kind: str) -> torch.Tensor:
        part, parts = self.attention
        shards = [self._cut(f"{path}.q_proj.{kind}", 0, self.attention)]
        kv_heads = self.config["num_key_value_heads"]
        for letter in "kv":
            heads = self.state[f"{path}.{letter}_proj.{kind}"].unflatten(0, (kv_heads, -1))
            first = part * kv_heads // parts
            shards.append(heads[first : first + max(1, kv_heads // parts)].flatten(0, 1))
        return torch.cat(shards)

    def _experts(self, path: str, kind: str) -> None:
        count = self.config["n_routed_experts"]
        places = count + self.layout.redundant_experts
        each = places // self.layout.expert
        draft = self._named(path) != path
        layer = int(path.split(".")[2])
        located = None if draft or self.layout.expert_map is None else self.layout.expert_map[layer]
        held = [
            f"{path}experts.{place % count if located is None else located[place]}."
            for place in range(self.expert_rank * each, (self.expert_rank + 1) * each)
        ]
        if self.layout.fused_shared_experts:
            held.append(f"{path}shared_experts.")
        order = ("up", "gate") if self.layout.up_first else ("gate", "up")
        w13 = [
            torch.cat([self._cut(f"{where}{which}_proj.{kind}", 0, self.inside_expert) for which in order])
            for where in held
        ]
        w2 = [self._cut(f"{where}down_proj.{kind}", 1, self.inside_expert) for where in held]
        # X.weight is a parameter w13_weight of the stack, X.weight_scale_inv a parameter w13_weight_scale_inv.
        self.found[f"{self._named(path)}experts.w13_{kind}"] = torch.stack(w13)
        self.found[f"{self._named(path)}experts.w2_{kind}"] = torch.stack(w2)


MEGATRON_NAMES = {
    "self_attn.q_a_proj": "self_attention.linear_q_down_proj",
    "self_attn.q_b_proj": "self_attention.linear_q_up_proj",
    "self_attn.kv_a_proj_with_mqa": "self_attention.linear_kv_down_proj",
    "self_attn.kv_b_proj": "self_attention.linear_kv_up_proj",
    "self_attn.q_a_layernorm": "self_attention.q_layernorm",
    "self_attn.kv_a_layernorm": "self_attention.kv_layernorm",
    "self_attn.q_norm": "self_attention.q_layernorm",
    "self_attn.k_norm": "self_attention.k_layernorm",
    "self_attn.q_proj": "self_attention.linear_q_proj",
    "self_attn.o_proj": "self_attention.linear_proj",
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "mlp.gate": "mlp.router",
    "mlp.down_proj": "mlp.linear_fc2",
    "mlp.gate_proj": "mlp.linear_fc1",
    "mlp.shared_experts.down_proj": "mlp.shared_experts.linear_fc2",
    "mlp.shared_experts.gate_proj": "mlp.shared_experts.linear_fc1",
}


class MegatronReference:
    """Parameters of a GPTModel of one pipeline stage on one rank, local specification."""

    def __init__(self, config: dict[str, Any], state: State, layout: MegatronLayout, rank: int) -> None:
        self.config, self.state, self.layout = config, state, layout
        inside = layout.expert_tensor_size
        self.tensor, self.inside_expert = (rank % layout.tensor, layout.tensor), (rank % inside, inside)
        self.expert_rank = rank // inside % layout.expert
        table = _padded(state["model.embed_tokens.weight"], layout.vocabulary_multiple * layout.tensor, *self.tensor)
        head = _padded(state["lm_head.weight"], layout.vocabulary_multiple * layout.tensor, *self.tensor)
        self.found: State = {"embedding.word_embeddings.weight": table, "output_layer.weight": head}
        self.found["decoder.final_layernorm.weight"] = state["model.norm.weight"]
        layers = config["num_hidden_layers"]
        for layer in range(layers):
            self._layer(f"model.layers.{layer}.", f"decoder.layers.{layer}.")
        last = f"model.layers.{layers}."
        if f"{last}enorm.weight" in state:
            self._layer(last, "mtp.layers.0.transformer_layer.")
            for name, there in (("enorm", "enorm"), ("hnorm", "hnorm"), ("shared_head.norm", "final_layernorm")):
                self.found[f"mtp.layers.0.{there}.weight"] = state[f"{last}{name}.weight"]
            self.found["mtp.layers.0.eh_proj.weight"] = self._rows(f"{last}eh_proj.weight")

    def _rows(self, name: str) -> torch.Tensor:
        return self.state[name].chunk(self.tensor[1])[self.tensor[0]]

    def _layer(self, here: str, core: str) -> None:
        for name in [name for name in self.state if name.startswith(here)]:
            module, kind = name.removeprefix(here).rsplit(".", 1)
            if kind == "e_score_correction_bias":
                self.found[f"{core}mlp.router.expert_bias"] = self.state[name]
            elif ".experts." in name:
                continue
            elif module == "self_attn.q_proj" and f"{here}self_attn.k_proj.{kind}" in self.state:
                self.found[f"{core}self_attention.linear_qkv.{kind}"] = self._qkv(here, kind)
            elif module in MEGATRON_NAMES:
                self.found[f"{core}{MEGATRON_NAMES[module]}.{kind}"] = self._matrix(name)
        first = self.expert_rank * (self.config["n_routed_experts"] // self.layout.expert)
        if f"{here}mlp.experts.0.up_proj.weight" in self.state:
            for local in range(self.config["n_routed_experts"] // self.layout.expert):
                where, there = f"{here}mlp.experts.{first + local}.", f"{core}mlp.experts.local_experts.{local}."
                self.found[f"{there}linear_fc1.weight"] = self._gate_up(where, self.inside_expert)
                down = self.state[f"{where}down_proj.weight"]
                self.found[f"{there}linear_fc2.weight"] = down.chunk(self.inside_expert[1], 1)[self.inside_expert[0]]

    def _gate_up(self, where: str, share: tuple[int, int]) -> torch.Tensor:
        both = [self.state[f"{where}{kind}_proj.weight"].chunk(share[1])[share[0]] for kind in ("gate", "up")]
        return torch.cat(both)

    def _matrix(self, name: str) -> torch.Tensor:
        module = name.rsplit(".", 2)[1]
        if module == "gate_proj":
            return self._gate_up(name.removesuffix("gate_proj.weight"), self.tensor)
        if module in ("o_proj", "down_proj"):
            return self.state[name].chunk(self.tensor[1], 1)[self.tensor[0]]
        latent = module in ("q_a_proj", "kv_a_proj_with_mqa")
        if module.endswith("norm") or module == "gate" or (latent and not self.layout.split_latent):
            return self.state[name]
        return self._rows(name)

    def _qkv(self, here: str, kind: str) -> torch.Tensor:
        groups = self.config["num_key_value_heads"]
        each = [self.state[f"{here}self_attn.{letter}_proj.{kind}"].unflatten(0, (groups, -1)) for letter in "qkv"]
        return torch.cat(each, dim=1).flatten(0, 1).chunk(self.tensor[1])[self.tensor[0]]
