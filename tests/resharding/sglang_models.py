"""SGLang's own models of any rank of any engine, built in one process without an engine, and loaded by its own loaders.

What runs here needs the engine's stand-ins for CUDA packages, so it lives in a process of its own (`sglang_process`).
Ranks are told through SGLang's parallel context, as its launcher does; groups are their sizes and ranks alone, since
nothing is sent while a model is built and loaded.
"""

import hashlib
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from resharding_models import filled, random_state, same_bits

from slimerl.resharding.families import BlockScales, Form, family_of
from slimerl.resharding.families.family import PLAIN
from slimerl.resharding.families.table import DRAFT
from slimerl.resharding.layouts import EngineLayout

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
"""The only rotary embedding that SGLang builds for latent attention without a GPU."""
CLASSES = {
    "llama": ("LlamaConfig", "llama.LlamaForCausalLM"),
    "qwen2": ("Qwen2Config", "qwen2.Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "qwen3.Qwen3ForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "qwen3_moe.Qwen3MoeForCausalLM"),
    "glm4_moe": ("Glm4MoeConfig", "glm4_moe.Glm4MoeForCausalLM"),
    "deepseek_v3": ("DeepseekV3Config", "deepseek_v2.DeepseekV3ForCausalLM"),
    "kimi_k2": ("DeepseekV3Config", "deepseek_v2.DeepseekV3ForCausalLM"),
}
DRAFTS = {
    "glm4_moe": "glm4_moe_nextn.Glm4MoeForCausalLMNextN",
    "deepseek_v3": "deepseek_nextn.DeepseekV3ForCausalLMNextN",
    "kimi_k2": "deepseek_nextn.DeepseekV3ForCausalLMNextN",
}
NOT_WEIGHTS = ("_scale", "cos_sin_cache")
"""Ends of names of parameters that no checkpoint fills: the scales of an FP8 KV cache."""


_directory: Path
"""Where this process keeps the config.json of each model."""


@pytest.fixture(scope="session")
def sglang_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Calls a function of this module in the process in which SGLang is imported."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")
    directory = tmp_path_factory.mktemp("sglang_models")
    with ProcessPoolExecutor(1, get_context("spawn"), _import_sglang, (directory,)) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result(timeout=240)


def _import_sglang(directory: Path) -> None:
    global _directory
    _directory = directory
    os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
    from slimerl.engine.inside.cpu_shim import install

    install()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.bfloat16)


def differences(config: dict[str, Any], layout: EngineLayout, form: Form = PLAIN) -> dict[str, list[str]]:
    """Of every rank, what SGLang's loaders make of a checkpoint against what the table says: parameters that only one
    side has, and those whose shape, dtype or bits differ. Empty where all agree."""
    family, state = family_of(config), random_state(config, form)
    found: dict[str, list[str]] = {}
    for rank in range(layout.world_size):
        ours = filled(family.engine_placements(config, layout, rank, form), state)
        theirs = loaded(config, layout, rank, form, state)
        wrong = [f"{name}: only the table has it" for name in ours.keys() - theirs.keys()]
        wrong += [f"{name}: only SGLang has it" for name in theirs.keys() - ours.keys()]
        for name in ours.keys() & theirs.keys():
            if not same_bits(ours[name], theirs[name]):
                kinds = [f"{tuple(each[name].shape)} {each[name].dtype}" for each in (ours, theirs)]
                wrong.append(f"{name}: {kinds[0]}, SGLang has {kinds[1]}" if kinds[0] != kinds[1] else f"{name}: bits")
        if wrong:
            found[f"rank {rank}"] = sorted(wrong)
    return found


def loaded(
    config: dict[str, Any], layout: EngineLayout, rank: int, form: Form, state: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Parameters of a rank's model, and of its draft model where the form has one."""
    with as_rank(config, layout, rank):
        model = build(config, form.scales)
        draft = f"model.layers.{config['num_hidden_layers']}."
        load(model, {name: tensor for name, tensor in state.items() if not name.startswith(draft)})
        found = weights_of(model)
        if form.prediction:
            model = build(config, form.scales, DRAFTS[config["model_type"]])
            load(model, {name: tensor for name, tensor in state.items() if name.startswith(draft)})
            shared = ("model.embed_tokens.weight", "lm_head.weight")
            found |= {f"{DRAFT}{name}": value for name, value in weights_of(model).items() if name not in shared}
    return found


def other_tensors(config: dict[str, Any], layout: EngineLayout, form: Form = PLAIN) -> set[str]:
    """Ends of the names of parameters and buffers of a rank that are no weights."""
    with as_rank(config, layout, 0):
        model = build(config, form.scales)
        names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
        return {".".join(name.split(".")[-2:]) for name in names - weights_of(model).keys()}


def refusal(config: dict[str, Any], layout: EngineLayout, form: Form) -> str:
    """What SGLang says when it is to build a model that cannot be cut like that."""
    with as_rank(config, layout, 0), pytest.raises(ValueError) as raised:
        build(config, form.scales)
    return str(raised.value)


def derived_after_write(config: dict[str, Any], form: Form) -> dict[str, tuple[bool, bool]]:
    """For each tensor that latent attention derives from kv_b_proj: whether it changes when kv_b_proj is written in
    place, and whether it does when `post_load_weights` then runs."""
    with as_rank(config, EngineLayout(), 0):
        model: Any = build(config, form.scales)
        state = random_state(config, form)
        load(model, {name: torch.ones_like(tensor.float()).to(tensor.dtype) for name, tensor in state.items()})
        attention = model.model.layers[0].self_attn
        before = _derived(attention)
        attention.kv_b_proj.weight.data.copy_(torch.full_like(attention.kv_b_proj.weight.float(), 2.0))
        written = _derived(attention)
        model.post_load_weights()
        after = _derived(attention)
        return {
            name: (not torch.equal(before[name], written[name]), not torch.equal(before[name], after[name]))
            for name in before
        }


def _derived(attention: Any) -> dict[str, torch.Tensor]:
    held = {*dict(attention.named_parameters()), *dict(attention.named_buffers())}
    names = [name for name in ("w_kc", "w_vc") if getattr(attention, name, None) is not None and name not in held]
    return {name: getattr(attention, name).float().clone() for name in names}


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters() if not name.endswith(NOT_WEIGHTS)}


def build(config: dict[str, Any], scales: BlockScales | None = None, named: str | None = None) -> torch.nn.Module:
    """A model of the rank that `as_rank` says, its memory filled with a bit pattern that no test's weights have."""
    from sglang.srt.layers.moe.utils import SharedExpertsConfig, resolve_shared_experts_config
    from sglang.srt.runtime_context import get_exec, get_model

    hf_config = _hf_config(config)
    module, name = (named or CLASSES[config["model_type"]][1]).rsplit(".", 1)
    model_class = getattr(importlib.import_module(f"sglang.srt.models.{module}"), name)
    quantisation = _quantisation(scales)
    shared = resolve_shared_experts_config(model_class, hf_config, quantisation)
    if not get_exec().moe.disable_shared_experts_fusion:
        # Without CUDA the models decline; what they would hold with it they build here all the same.
        shared = SharedExpertsConfig(False, config["n_shared_experts"], False)
    with get_model().override(shared_experts=shared):
        model = model_class(config=hf_config, quant_config=quantisation)
    model.shared_experts_config = shared
    for parameter in model.parameters():
        parameter.data.view(-1).view(torch.uint8).fill_(0xFF)
    return model


def load(model: Any, state: dict[str, torch.Tensor]) -> None:
    model.load_weights(list(state.items()))


def _hf_config(config: dict[str, Any]) -> Any:
    import transformers

    config_class, class_name = CLASSES[config["model_type"]]
    known = {key: value for key, value in config.items() if key != "model_type"}
    if "kv_lora_rank" in config:
        known |= {"rope_parameters": YARN, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
    return getattr(transformers, config_class)(**known, architectures=[class_name.split(".")[1]])


def _directory_of(config: dict[str, Any]) -> str:
    """Where SGLang finds the config.json, which some layers read from there."""
    text = _hf_config(config).to_json_string()
    directory = _directory / hashlib.sha256(text.encode()).hexdigest()[:16]
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(text)
    return str(directory)


def _quantisation(scales: BlockScales | None) -> Any:
    if scales is None:
        return None
    from sglang.srt.layers.quantization.fp8 import Fp8Config

    return Fp8Config(
        is_checkpoint_fp8_serialized=True,
        activation_scheme="dynamic",
        weight_block_size=[scales.block, scales.block],
        ignored_layers=list(scales.ignored),
    )


@contextmanager
def as_rank(config: dict[str, Any], layout: EngineLayout, rank: int) -> Iterator[None]:
    """Be rank `rank` of an engine of this layout, for SGLang."""
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.runtime_context import get_context as context
    from sglang.srt.runtime_context import get_flags, get_parallel

    arguments = {
        "model_path": _directory_of(config),
        "tp_size": layout.tensor,
        "ep_size": layout.expert,
        "pp_size": layout.pipeline,
        "attn_dp_size": layout.data_attention,
        "attn_cp_size": layout.context_attention,
        "moe_dp_size": layout.data_expert,
        "device": "cpu",
        "enable_dp_lm_head": layout.head_over_attention,
        "moe_dense_tp_size": 1 if layout.replicated_dense else None,
        "disable_shared_experts_fusion": not layout.fused_shared_experts,
        "ep_num_redundant_experts": layout.redundant_experts,
        "moe_runner_backend": "flashinfer_cutlass" if layout.up_first else "auto",
    }
    os.environ["SGLANG_SHARED_EXPERT_TP1"] = str(int(layout.replicated_shared))
    with ExitStack() as entered:
        entered.enter_context(context().override_server_args(**arguments))
        entered.enter_context(get_parallel().override(**_ranks(layout, rank)))
        entered.enter_context(get_flags().dp.override(enabled=layout.data_attention > 1))
        initialize_moe_config()
        entered.enter_context(_expert_locations(config, layout, rank))
        yield


@contextmanager
def _expert_locations(config: dict[str, Any], layout: EngineLayout, rank: int) -> Iterator[None]:
    """Tell SGLang which expert each place holds, as its launcher does where experts are moved or copied."""
    if layout.expert_map is None and not layout.redundant_experts:
        yield
        return
    from sglang.srt.eplb import expert_location
    from sglang.srt.runtime_context import get_resources

    experts = config.get("num_experts") or config["n_routed_experts"]
    held = torch.tensor(layout.expert_map or [[place % experts for place in range(experts + layout.redundant_experts)]])
    # One for each layer, as SGLang's init_trivial has it.
    held = held.expand(config["num_hidden_layers"], -1)
    ranks = {"ep_size": layout.expert, "moe_ep_rank": rank // (layout.tensor // layout.expert)}
    places = expert_location._compute_logical_to_all_physical_map(held, num_logical_experts=experts, **ranks)
    metadata = expert_location.ExpertLocationMetadata._init_raw(
        physical_to_logical_map=held, logical_to_all_physical_map=places, **ranks
    )
    with get_resources().override(expert_location_metadata=metadata):
        yield


def _ranks(layout: EngineLayout, rank: int) -> dict[str, Any]:
    stage, rank = divmod(rank, layout.tensor)
    attention = layout.tensor // (layout.data_attention * layout.context_attention)
    inside = layout.tensor // (layout.expert * layout.data_expert)
    places = {
        "pp": (stage, layout.pipeline),
        "tp": (rank, layout.tensor),
        "attn_tp": (rank % attention, attention),
        "attn_cp": (rank // attention % layout.context_attention, layout.context_attention),
        "attn_dp": (rank // (attention * layout.context_attention), layout.data_attention),
        "moe_tp": (rank % inside, inside),
        "moe_ep": (rank // inside % layout.expert, layout.expert),
        "moe_dp": (rank // (inside * layout.expert), layout.data_expert),
    }
    told: dict[str, Any] = {"attn_dp_enabled": layout.data_attention > 1}
    for name, (number, of) in places.items():
        told |= {f"{name}_rank": number, f"{name}_size": of, f"{name}_group": _group(number, of)}
    del told["attn_dp_group"]
    return told | {"shared_experts_tp_group": told["tp_group"]}


def _group(rank: int, size: int) -> SimpleNamespace:
    return SimpleNamespace(
        rank=rank,
        rank_in_group=rank,
        local_rank=rank,
        world_size=size,
        ranks=list(range(size)),
        is_first_rank=rank == 0,
        is_last_rank=rank == size - 1,
        cpu_group=None,
        device_group=None,
    )
