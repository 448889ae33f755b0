"""What this package asks of Megatron and SGLang, as readable text, for one model and one kind of machine.

`python configuration_subject.py CASE…` prints JSON {case: text}. It runs in a process of its own, because on a machine
without Transformer Engine it puts an empty library of that name in its place: Megatron then builds its real layer
specification and checks its real configuration, none of which computes anything. Where the library is installed, it is
the library itself (`tests/gpu`), and the text must be the same.
"""

import dataclasses
import enum
import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
import types
import warnings
from pathlib import Path
from typing import Any

MODELS: dict[str, dict[str, Any]] = {
    "qwen3_dense": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 1000000,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "rope_theta": 1000000,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": False,
    },
    "deepseek_mla": {
        "model_type": "deepseek_v3",
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
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": False,
    },
}
PARALLEL = {
    "qwen3_dense": {"tensor": 2, "data": 2, "sequence_parallel": True},
    "qwen3_moe": {"tensor": 2, "data": 4, "expert": 8, "expert_tensor": 1, "sequence_parallel": True},
    "deepseek_mla": {"tensor": 8, "data": 4, "expert": 32, "expert_tensor": 1, "sequence_parallel": True},
}
MACHINES: dict[str, dict[str, bool]] = {
    "cpu": {"cuda": False},
    "gpu": {"cuda": True, "transformer_engine": True},
    "gpu_apex": {"cuda": True, "transformer_engine": True, "apex": True},
    "gpu_bare": {"cuda": True},
}
DTYPES = {"cpu": "fp32"}
CASES = [
    *(f"{model}.{machine}" for model in MODELS for machine in ("cpu", "gpu")),
    "qwen3_dense.gpu_apex",
    "qwen3_dense.gpu_bare",
]


class EmptyTransformerEngine(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Every module of `transformer_engine`, and in it every public name as an empty class."""

    NAME, VERSION = "transformer_engine", "2.10.0"
    _PARENTS = (NAME, f"{NAME}.pytorch", f"{NAME}.common")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != self.NAME:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: self._member(module, name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__version__ = self.VERSION  # type: ignore[attr-defined]

    def _member(self, module: types.ModuleType, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].islower() and module.__name__ in self._PARENTS:
            return importlib.import_module(f"{module.__name__}.{name}")
        value = type(name, (), {"__module__": module.__name__, "apply": None})
        setattr(module, name, value)
        return value


def text_of(case: str) -> str:
    """The configuration objects and the command line of one case; what is left out has Megatron's default."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig

    from slimerl.spec.schema import OptimizerSpec, ParallelSpec
    from slimerl.training.capabilities import Capabilities
    from slimerl.training.layer_specs import build_spec
    from slimerl.training.machine_arguments import data_parallel_arguments
    from slimerl.training.model_config import model_arguments, transformer_config
    from slimerl.training.optimizer import optimizer_config

    parallel_state.set_pipeline_model_parallel_rank(0)  # the layer specification asks which stage it is for
    model, machine = case.split(".")
    dtype = DTYPES.get(machine, "bf16")
    parallel = ParallelSpec(**PARALLEL[model])
    capabilities = Capabilities(**MACHINES[machine]).for_dtype(dtype)
    config = transformer_config(model_arguments(MODELS[model]), parallel, dtype, capabilities)
    overlap = capabilities.overlaps_reduction(parallel.data * parallel.context)
    parts = {
        "TransformerConfig": fields_of(config),
        "DistributedDataParallelConfig": fields_of(DistributedDataParallelConfig(**data_parallel_arguments(overlap))),
        "OptimizerConfig": fields_of(optimizer_config(OptimizerSpec(), config.params_dtype)),
        "layers": layers_of(build_spec(config, capabilities)),
        "sglang.launch_server": command_of(model, machine, dtype),
    }
    return "".join(f"[{title}]\n" + "\n".join(lines) + "\n\n" for title, lines in parts.items()).rstrip() + "\n"


def fields_of(config: Any) -> list[str]:
    lines = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        default = field.default_factory() if callable(field.default_factory) else field.default
        if value != default or type(value) is not type(default):
            lines.append(f"{field.name} = {shown(value)}")
    return [type(config).__name__, *lines]


def shown(value: Any) -> str:
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, list) and len(value) > 8:
        return f"{value[:4]}… {len(value)} in all, sum {sum(value)}"
    return repr(value)


def layers_of(spec: Any) -> list[str]:
    """The tree of modules; equal neighbouring layers once."""
    layers = [tree_of(layer, 1) for layer in spec.layer_specs]
    lines: list[str] = []
    start = 0
    for index in range(1, len(layers) + 1):
        if index == len(layers) or layers[index] != layers[start]:
            lines += [f"layers {start} to {index - 1}", *layers[start]]
            start = index
    return [*lines, f"final: {shown(spec.layer_norm)}"]


def tree_of(spec: Any, depth: int) -> list[str]:
    """`name: module` per line, indented."""
    lines = [f"{'  ' * depth}{shown(spec.module)} {spec.params or ''}".rstrip()]
    for field in dataclasses.fields(spec.submodules) if dataclasses.is_dataclass(spec.submodules) else ():
        part = getattr(spec.submodules, field.name)
        if dataclasses.is_dataclass(part) and hasattr(part, "submodules"):
            lines += [f"{'  ' * (depth + 1)}{field.name}:", *tree_of(part, depth + 2)]
        elif dataclasses.is_dataclass(part) and not isinstance(part, type):
            inner = [(each.name, getattr(part, each.name)) for each in dataclasses.fields(part)]
            lines += [f"{'  ' * (depth + 1)}{field.name}:"]
            lines += [f"{'  ' * (depth + 2)}{name}: {shown(value)}" for name, value in inner if value is not None]
        elif isinstance(part, type | types.FunctionType):
            lines.append(f"{'  ' * (depth + 1)}{field.name}: {shown(part)}")
    return lines


def command_of(model: str, machine: str, dtype: str) -> list[str]:
    from slimerl.engine.launcher import Device, server_arguments, server_environment
    from slimerl.spec.load import spec_from_tree

    tree = {
        "name": model,
        "output_dir": "/runs/r",
        "seed": 1,
        "model": {"path": f"/models/{model}", "dtype": dtype},
        "data": {"train_path": "train.jsonl"},
        "training": {"steps": 1, "prompts_per_step": 8},
        "engine": {"tensor_parallel": 2},
    }
    spec = spec_from_tree(tree, "golden")
    device = Device.CUDA if MACHINES[machine]["cuda"] else Device.CPU
    environment = server_environment(spec, device, "KEY", Path("/private"))
    # which cores there are is this machine's affair
    environment = {name: value for name, value in environment.items() if name != "SGLANG_CPU_OMP_THREADS_BIND"}
    lines = [f"{name}={value}" for name, value in sorted(environment.items())]
    for part in server_arguments(spec, 1, device, 20_000):
        if part.startswith("--"):
            lines.append(part)
        else:
            lines[-1] += f" {part}"
    return lines


def main(cases: list[str]) -> None:
    warnings.simplefilter("ignore")
    if importlib.util.find_spec(EmptyTransformerEngine.NAME) is None:
        sys.meta_path.insert(0, EmptyTransformerEngine())
    print(json.dumps({case: text_of(case) for case in cases}))


if __name__ == "__main__":
    main(sys.argv[1:])
