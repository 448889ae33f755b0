"""Random models and layouts, and a second, independent account of both physical layouts to compare with.

The references say with torch's own cat, chunk and view what Megatron and SGLang hold; they share no code with
`slimerl.resharding.families` and know nothing of boxes.
"""

from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import assume
from hypothesis import strategies as st

from slimerl.resharding.assemble import scatter
from slimerl.resharding.families import Form, family_of
from slimerl.resharding.families.family import PLAIN
from slimerl.resharding.layouts import MegatronLayout
from slimerl.resharding.tensors import Placement

State = dict[str, torch.Tensor]
LAYER_NAMES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


@st.composite
def dense_configs(draw: st.DrawFn, tensor: int = 1, engine: int = 1) -> dict[str, Any]:
    """A config.json of a dense family that can be cut over `tensor` trainer and `engine` engine ranks."""
    ranks = max(tensor, engine)
    kv_heads = draw(
        st.sampled_from([kv for kv in (1, 2, 3, 4, 6, 8) if all(kv % n == 0 or n % kv == 0 for n in (tensor, engine))])
    )
    head_dim = draw(st.sampled_from([4, 8]))
    # Where a group spans several trainer ranks, Megatron cuts its q|k|v rows evenly as well.
    widths = [
        q for q in (1, 2, 3, 4, 6, 8) if kv_heads * q % ranks == 0 and kv_heads * (q + 2) * head_dim % tensor == 0
    ]
    assume(widths)
    per_group = draw(st.sampled_from(widths))
    return {
        "model_type": draw(st.sampled_from(["llama", "qwen2", "qwen3"])),
        "vocab_size": draw(st.integers(5, 140)),
        "hidden_size": draw(st.sampled_from([4, 6, 8])) * kv_heads * per_group,
        "intermediate_size": draw(st.integers(1, 5)) * ranks,
        "num_hidden_layers": draw(st.sampled_from([1, 2, 4])),
        "num_attention_heads": kv_heads * per_group,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "tie_word_embeddings": draw(st.booleans()),
        "dtype": draw(st.sampled_from(["float32", "bfloat16"])),
    }


@st.composite
def moe_configs(draw: st.DrawFn, tensor: int = 1, expert_tensor: int = 1, expert: int = 1) -> dict[str, Any]:
    """A Qwen3-MoE that can be cut over `tensor` ranks, its experts over `expert` groups of `expert_tensor`."""
    config = draw(dense_configs(tensor=tensor, engine=tensor))
    return config | {
        "model_type": "qwen3_moe",
        "tie_word_embeddings": False,
        "num_experts": draw(st.integers(1, 3)) * expert,
        "moe_intermediate_size": draw(st.integers(1, 4)) * expert_tensor,
    }


def random_state(config: dict[str, Any], form: Form = PLAIN) -> State:
    """A checkpoint whose elements all differ (in bf16, any 65,536 in a row), so that no two places can be confused."""
    state, count = {}, 1
    for tensor in family_of(config).logical_tensors(config, form=form):
        wide = torch.arange(count, count + tensor.numel, dtype=torch.int32)
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize]
        state[tensor.name] = wide.to(integer).view(tensor.dtype).view(tensor.shape)
        count += tensor.numel
    return state


def empty_parameters(placements: list[Placement], dtypes: dict[str, torch.dtype]) -> State:
    """The parameters that the placements name, all bits set; `dtypes` of the logical tensors."""
    shapes: dict[str, tuple[int, ...]] = {}
    dtype_of: dict[str, torch.dtype] = {}
    for placement in placements:
        seen = shapes.get(placement.parameter, placement.at.stops)
        shapes[placement.parameter] = tuple(map(max, seen, placement.at.stops))
        if not placement.is_padding:
            dtype_of[placement.parameter] = dtypes[placement.tensor]
    some = next(iter(dtypes.values()))
    parameters = {name: torch.empty(shape, dtype=dtype_of.get(name, some)) for name, shape in shapes.items()}
    for tensor in parameters.values():
        tensor.view(torch.uint8).fill_(0xFF)
    return parameters


def filled(placements: list[Placement], state: State) -> State:
    """A rank's parameters, as `scatter` fills them from a checkpoint."""
    parameters = empty_parameters(placements, {name: tensor.dtype for name, tensor in state.items()})
    scatter(placements, state, parameters)
    return parameters


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes, so that NaNs compare equal to themselves and -0 differs from 0."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def assert_same(found: State, expected: State) -> None:
    """The same names, shapes, dtypes and bits."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    differing = [name for name in expected if not same_bits(found[name], expected[name])]
    assert not differing


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(bits(one), bits(other))


def _padded(table: torch.Tensor, rows: int, part: int, parts: int) -> torch.Tensor:
    return F.pad(table, (0, 0, 0, rows - len(table))).chunk(parts)[part]


def _megatron_mlp(state: State, hf: str, core: str, size: int, part: int) -> State:
    gate, up = (state[f"{hf}{name}_proj.weight"].chunk(size)[part] for name in ("gate", "up"))
    return {
        f"{core}linear_fc1.weight": torch.cat([gate, up]),
        f"{core}linear_fc2.weight": state[f"{hf}down_proj.weight"].chunk(size, dim=1)[part],
    }


def megatron_reference(config: dict[str, Any], state: State, layout: MegatronLayout, rank: int) -> State:
    """Parameters of a GPTModel of one pipeline stage with the local specification."""
    size, part = layout.tensor, rank % layout.tensor
    groups, vocabulary = config["num_key_value_heads"], config["vocab_size"]
    rows = -(-vocabulary // (layout.vocabulary_multiple * size)) * layout.vocabulary_multiple * size
    found = {"embedding.word_embeddings.weight": _padded(state["model.embed_tokens.weight"], rows, part, size)}
    for layer in range(config["num_hidden_layers"]):
        hf, core = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        for kind in ("weight", "bias"):
            if f"{hf}self_attn.q_proj.{kind}" in state:
                each = [state[f"{hf}{name}.{kind}"] for name in LAYER_NAMES]
                grouped = torch.cat([tensor.view(groups, -1, *tensor.shape[1:]) for tensor in each], dim=1)
                found[f"{core}self_attention.linear_qkv.{kind}"] = grouped.flatten(0, 1).chunk(size)[part]
        if "num_experts" in config:
            found[f"{core}mlp.router.weight"] = state[f"{hf}mlp.gate.weight"]
            expert_size = layout.expert_tensor or size
            each = config["num_experts"] // layout.expert
            for local in range(each):
                expert = rank // expert_size % layout.expert * each + local
                where = f"{core}mlp.experts.local_experts.{local}."
                found |= _megatron_mlp(state, f"{hf}mlp.experts.{expert}.", where, expert_size, rank % expert_size)
        else:
            found |= _megatron_mlp(state, f"{hf}mlp.", f"{core}mlp.", size, part)
        output = state[f"{hf}self_attn.o_proj.weight"]
        found[f"{core}self_attention.linear_proj.weight"] = output.chunk(size, dim=1)[part]
        found[f"{core}input_layernorm.weight"] = state[f"{hf}input_layernorm.weight"]
        found[f"{core}pre_mlp_layernorm.weight"] = state[f"{hf}post_attention_layernorm.weight"]
        for letter in "qk":
            if f"{hf}self_attn.{letter}_norm.weight" in state:
                found[f"{core}self_attention.{letter}_layernorm.weight"] = state[f"{hf}self_attn.{letter}_norm.weight"]
    found["decoder.final_layernorm.weight"] = state["model.norm.weight"]
    if "lm_head.weight" in state:
        found["output_layer.weight"] = _padded(state["lm_head.weight"], rows, part, size)
    return found


def engine_reference(config: dict[str, Any], state: State, size: int, part: int, expert: int = 1) -> State:
    """Parameters of SGLang's model on one tensor-parallel rank; its experts are cut into `expert` groups."""
    rows = -(-config["vocab_size"] // 64) * 64
    if rows % size:
        rows = -(-config["vocab_size"] // (64 * size)) * 64 * size
    kv_heads, found = config["num_key_value_heads"], {}
    for name, tensor in state.items():
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            found[name] = _padded(tensor, rows, part, size)
        elif ".q_proj." in name:
            shards = [tensor.chunk(size)[part]]
            for letter in "kv":
                heads = state[name.replace(".q_proj.", f".{letter}_proj.")].view(
                    kv_heads, config["head_dim"], *tensor.shape[1:]
                )
                # Each rank takes the heads that its own query heads read.
                per_rank = max(1, kv_heads // size)
                first = part * kv_heads // size
                shards.append(heads[first : first + per_rank].flatten(0, 1))
            found[name.replace(".q_proj.", ".qkv_proj.")] = torch.cat(shards)
        elif ".experts." in name:
            continue
        elif ".gate_proj." in name:
            up = state[name.replace(".gate_proj.", ".up_proj.")]
            fused = torch.stack([tensor, up]).unflatten(1, (size, -1))[:, part]
            found[name.replace(".gate_proj.", ".gate_up_proj.")] = fused.flatten(0, 1)
        elif ".o_proj." in name or ".down_proj." in name:
            found[name] = tensor.chunk(size, dim=1)[part]
        elif not any(kind in name for kind in (".k_proj.", ".v_proj.", ".up_proj.")):
            found[name] = tensor
    for layer in range(config["num_hidden_layers"] if "num_experts" in config else 0):
        found |= _engine_experts(config, state, f"model.layers.{layer}.mlp.experts.", size // expert, part, expert)
    return found


def _engine_experts(config: dict[str, Any], state: State, prefix: str, inside: int, part: int, expert: int) -> State:
    """`inside` ranks share an expert; [gate; up] of each expert in w13."""
    whole = {
        kind: torch.stack([state[f"{prefix}{number}.{kind}_proj.weight"] for number in range(config["num_experts"])])
        for kind in ("gate", "up", "down")
    }
    mine = {kind: stack.chunk(expert)[part // inside] for kind, stack in whole.items()}
    gate, up = (mine[kind].chunk(inside, dim=1)[part % inside] for kind in ("gate", "up"))
    return {
        f"{prefix}w13_weight": torch.cat([gate, up], dim=1),
        f"{prefix}w2_weight": mine["down"].chunk(inside, dim=2)[part % inside],
    }
