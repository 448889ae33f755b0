"""The model against the spec: can the trainer build it on this grid, can the engines serve it, is it all there?

Flows in: the spec, what the machine offers. Flows out: the parsed `config.json` where its family is known, and faults.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from slimerl.conductor.preflight.speculation import speculation_faults
from slimerl.engine.server_options import known_options, unknown_options
from slimerl.resharding.coverage import CoverageError
from slimerl.resharding.families import ConfigError, family_of
from slimerl.resharding.families.family import PLAIN, Form, stored_form
from slimerl.resharding.hf_checkpoint import CheckpointError, HfCheckpoint, check_keys
from slimerl.resharding.layouts import LayoutError
from slimerl.spec import RunSpec
from slimerl.spec.schema import ParallelSpec
from slimerl.training.capabilities import Capabilities
from slimerl.training.checkpoint import directory
from slimerl.training.engine_layout import differences, engine_config, engine_form, engine_layout
from slimerl.training.model_config import UnsupportedModel, check_divisible, model_arguments, read_config
from slimerl.training.needs import unroutable
from slimerl.training.trainer_layout import trainer_layout

Config = Mapping[str, Any]

CPU_INTERMEDIATE_MULTIPLE = 32
"""SGLang without CUDA pads these sizes to a multiple of 32 for each rank; a padded parameter is not the trainer's."""
CPU_PADDED_SIZES = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


def model_faults(spec: RunSpec, capabilities: Capabilities) -> tuple[Config | None, list[str]]:
    """(the parsed `config.json`, or None where it is no model that can be built; the faults)."""
    try:
        config = read_config(spec.model.path)
        arguments = model_arguments(config)
        # what the file says of the model itself, once, before every layout of it would say it again
        family_of(config).logical_tensors(config)
    except (ConfigError, UnsupportedModel) as error:
        return None, [f"model.path: {spec.model.path}: {error}"]
    # the tables have the last word, where nothing is wrong already
    faults = [
        *unroutable(spec.algorithm, arguments),
        *(size_faults(spec, config) or _caught(lambda: _check_placements(spec, config, capabilities))),
        *_checkpoint_faults("model.path", spec.model.path, config, scored=spec.algorithm.name == "reward_model"),
        *_distributed_faults(spec.model.megatron_path, config),
    ]
    if spec.uses_engines:
        sizes = list(engine_size_faults(spec, config, capabilities.cuda))[:1]
        faults += sizes or _served_faults(spec, config)
        faults += serving_faults(spec, arguments.max_sequence_tokens)
        faults += speculation_faults(spec, config, capabilities.cuda)
    return config, faults


def size_faults(spec: RunSpec, config: Config) -> list[str]:
    """Of the schedule and the trainer's grid; needs no files."""
    return [*_schedule_faults(spec), *_grid_faults(spec, config)]


def serving_faults(spec: RunSpec, model_tokens: int) -> list[str]:
    """Of what the engines are asked to serve; needs no files."""
    return [*_length_faults(spec, model_tokens), *_contradicting_arguments(spec)]


def _served_faults(spec: RunSpec, config: Config) -> list[str]:
    """Of the engines' checkpoint, where it is another one, and their layout."""
    key, path = "engine.model_path", spec.engine.model_path
    try:
        served = engine_config(spec, config)
        if path is not None:
            return [
                *same_model_faults(spec, config, served),
                *_checkpoint_faults(key, path, served, engine_form(served)),
                *placement_faults(spec, served, spec.engine.tensor_parallel),
            ]
        return list(placement_faults(spec, served, spec.engine.tensor_parallel))
    except (ConfigError, UnsupportedModel) as error:
        return [f"{key}: {path}: {error}"]


def placement_faults(spec: RunSpec, served: Config, ranks: int) -> Iterator[str]:
    """What the tables say of the first `ranks` ranks of an engine. The first alone tells whether sizes divide."""
    yield from _caught(lambda: _check_engine(spec, served, ranks))


def same_model_faults(spec: RunSpec, config: Config, served: Config) -> Iterator[str]:
    """The engines' `config.json` may differ from the trainer's in how numbers are stored, and in nothing else."""
    if differing := differences(config, served):
        yield (
            f"engine.model_path: {spec.engine.model_path} is another model than model.path: they differ in "
            f"{', '.join(differing)}; name the same model, quantised"
        )


def _caught(check: Callable[[], None]) -> Iterator[str]:
    try:
        check()
    except (ConfigError, CoverageError, LayoutError, UnsupportedModel) as error:
        yield str(error)


def _schedule_faults(spec: RunSpec) -> Iterator[str]:
    """What the optimizer's schedule would refuse."""
    training, optimizer = spec.training, spec.training.optimizer
    if optimizer.warmup_steps > training.steps:
        yield (
            f"training.optimizer.warmup_steps = {optimizer.warmup_steps} exceeds training.steps = {training.steps}; "
            "lower it"
        )
    if optimizer.min_lr > optimizer.lr:
        yield (
            f"training.optimizer.min_lr = {optimizer.min_lr:g} exceeds training.optimizer.lr = {optimizer.lr:g}; "
            "lower it"
        )


def _grid_faults(spec: RunSpec, config: Config) -> list[str]:
    """Of the grid's dimensions one by one, then of all together."""
    parallel, arguments = spec.training.parallel, model_arguments(config)
    # not validated: a dimension of a sound grid need not be one by itself (expert_tensor wants expert)
    piece = ParallelSpec.model_construct
    alone = [
        piece(
            tensor=parallel.tensor,
            sequence_parallel=parallel.sequence_parallel,
            expert_tensor=parallel.expert_tensor,
            data=parallel.expert_tensor_size,
        ),
        piece(expert=parallel.expert, data=parallel.expert),
        piece(pipeline=parallel.pipeline, virtual=parallel.virtual, pipeline_layout=parallel.pipeline_layout),
        parallel,
    ]
    faults = [fault for grid in alone for fault in _caught(partial(check_divisible, arguments, grid))]
    return list(dict.fromkeys(faults))


def _check_placements(spec: RunSpec, config: Config, capabilities: Capabilities) -> None:
    parallel, family = spec.training.parallel, family_of(config)
    layout = trainer_layout(config, parallel, capabilities)
    try:
        for rank in layout.holders:
            family.megatron_placements(config, layout, rank)
    except LayoutError as error:
        sizes = ", ".join(f"{key} = {value}" for key, value in parallel.model_dump(exclude_defaults=True).items())
        raise LayoutError(f"training.parallel ({sizes}): {error}") from None


def _check_engine(spec: RunSpec, config: Config, ranks: int) -> None:
    tensor, layout, form = spec.engine.tensor_parallel, engine_layout(spec.engine), engine_form(config)
    try:
        for rank in range(ranks):
            family_of(config).engine_placements(config, layout, rank, form)
    except LayoutError as error:
        raise LayoutError(f"engine.tensor_parallel = {tensor}: {error}") from None


def engine_size_faults(spec: RunSpec, config: Config, cuda: bool) -> Iterator[str]:
    """What SGLang would refuse, or, without CUDA, pad."""
    engine, tensor = spec.engine, spec.engine.tensor_parallel
    attention, name = tensor // engine.data_parallel_attention, "engine.tensor_parallel"
    if engine.data_parallel_attention > 1:
        name += " / data_parallel_attention"
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % attention:
        yield f"{name} = {attention} does not divide the model's num_attention_heads = {heads}; choose a divisor"
    elif kv_heads % attention and (attention % kv_heads or not cuda):
        allowed = "a divisor" if not cuda else "a divisor or a multiple"
        yield f"{name} = {attention} does not fit the model's num_key_value_heads = {kv_heads}; choose {allowed} of it"
    yield from _mlp_faults(spec, config, cuda)
    if cuda:
        yield from node_faults(spec)


def node_faults(spec: RunSpec) -> Iterator[str]:
    """An engine has all GPUs of its nodes, or GPUs of one node."""
    tensor, per_node = spec.engine.tensor_parallel, spec.cluster.gpus_per_node
    if tensor > per_node:
        if tensor % per_node:
            yield (
                f"engine.tensor_parallel = {tensor} does not fill nodes of cluster.gpus_per_node = {per_node}; "
                "choose a multiple of it"
            )
        return
    # engines one behind the other, up to the end of the first engine's node, then from the beginning of a node on
    whole, left = divmod(per_node - spec.first_gpu(0), tensor)
    if left == 0:
        more, left = divmod(per_node, tensor)
        whole += more
    if left and whole < spec.engine.most_replicas:
        first = spec.first_gpu(whole)
        yield (
            f"engine {whole} would have GPUs {first} to {first + tensor - 1} of a node of cluster.gpus_per_node = "
            f"{per_node}; choose sizes of trainer and engine that fill nodes"
        )


MLP_SWITCH_FAMILIES = ("deepseek_v3", "kimi_k2")
"""Whose models in SGLang heed both --moe-dense-tp-size and SGLANG_SHARED_EXPERT_TP1."""


def _mlp_faults(spec: RunSpec, config: Config, cuda: bool) -> Iterator[str]:
    engine, tensor = spec.engine, spec.engine.tensor_parallel
    if engine.replicated_mlp and config["model_type"] not in MLP_SWITCH_FAMILIES:
        yield (
            f"engine.replicated_mlp: SGLang has it for {' and '.join(MLP_SWITCH_FAMILIES)} alone, the model is "
            f"{config['model_type']}; remove it"
        )
    experts = next((config[key] for key in ("n_routed_experts", "num_experts") if config.get(key)), None)
    if engine.expert_parallel > 1 and (experts is None or experts % engine.expert_parallel):
        yield f"engine.expert_parallel = {engine.expert_parallel} " + (
            "needs a model with experts; remove it"
            if experts is None
            else f"does not divide the model's {experts} experts; choose a divisor"
        )
    spread = {
        "engine.expert_parallel": engine.expert_parallel,
        "engine.data_parallel_attention": engine.data_parallel_attention,
    }
    for key, size in spread.items():
        if size > 1 and not cuda:
            yield f"{key} = {size}: SGLang has it on GPUs alone; set it to 1"
    if not cuda:
        multiple = CPU_INTERMEDIATE_MULTIPLE * tensor
        for key in CPU_PADDED_SIZES:
            if config.get(key) and config[key] % multiple:
                yield (
                    f"engine.tensor_parallel = {tensor}: SGLang without CUDA would pad the model's {key} = "
                    f"{config[key]} to a multiple of {multiple}; choose another tensor_parallel, or a model whose "
                    f"{key} is one"
                )


def _length_faults(spec: RunSpec, model_tokens: int) -> Iterator[str]:
    engine, rollout = spec.engine, spec.rollout
    if engine.context_tokens > model_tokens:
        yield (
            f"engine.context_tokens = {engine.context_tokens} exceeds the model's max_position_embeddings = "
            f"{model_tokens}; lower it"
        )
    longest = spec.data.max_prompt_tokens + spec.evaluation.longest_new_tokens(rollout.max_new_tokens)
    if longest > engine.max_total_tokens:
        yield (
            f"engine.max_total_tokens = {engine.max_total_tokens} cannot hold one request of data.max_prompt_tokens + "
            f"max_new_tokens = {longest}; raise it to at least that"
        )
    if rollout.max_running_requests > engine.max_total_tokens:
        yield (
            f"rollout.max_running_requests = {rollout.max_running_requests} exceeds engine.max_total_tokens = "
            f"{engine.max_total_tokens}: a running request holds a token at least; lower the one or raise the other"
        )


ENGINE_ARGUMENTS = {
    "--model-path": "model.path",
    "--json-model-override-args": "model.path (its config.json)",
    "--dtype": "model.dtype",
    "--tp-size": "engine.tensor_parallel",
    "--tensor-parallel-size": "engine.tensor_parallel",
    "--ep-size": "engine.expert_parallel",
    "--expert-parallel-size": "engine.expert_parallel",
    "--attn-dp-size": "engine.data_parallel_attention",
    "--attention-data-parallel-size": "engine.data_parallel_attention",
    "--dp-size": "engine.data_parallel_attention",
    "--enable-dp-attention": "engine.data_parallel_attention",
    "--moe-dense-tp-size": "engine.replicated_mlp",
    "--base-gpu-id": "cluster.placement",
    "--context-length": "engine.context_tokens",
    "--max-total-tokens": "engine.max_total_tokens",
    "--max-running-requests": "rollout.max_running_requests",
    "--random-seed": "seed",
    "--enable-return-routed-experts": "algorithm.routing_replay",
    "--speculative-algorithm": "engine.drafting",
    "--speculative-draft-model-path": "engine.drafting",
}
"""Arguments of the engine that the spec decides → the key."""


OWN_ARGUMENTS = {
    "--host": "where the engine listens (cluster.network)",
    "--port": "where the engine listens",
    "--api-key": "the engine's keys",
    "--admin-api-key": "the engine's keys",
    "--custom-weight-loader": "how the engine takes weights",
    "--weight-version": "how the engine takes weights",
    "--skip-server-warmup": "how the engine starts",
    "--tokenizer-path": "the engine's tokenizer (model.path)",
    "--skip-tokenizer-init": "the engine's tokenizer (model.path)",
    "--device": "the engine's device",
    "--nnodes": "the engine's machines (cluster.gpus_per_node)",
    "--node-rank": "the engine's machines (cluster.gpus_per_node)",
    "--dist-init-addr": "the engine's machines (cluster.gpus_per_node)",
    "--nccl-init-addr": "the engine's machines (cluster.gpus_per_node)",
    "--config": "all arguments of the engine",
    "--help": "all arguments of the engine",
    "--version": "all arguments of the engine",
}
"""Arguments of the engine that the launcher sets by itself, or that keep it from setting any → what it sets with them.
What it only prefers, such as an attention backend, may be set otherwise."""


def _contradicting_arguments(spec: RunSpec) -> Iterator[str]:
    """Arguments of the engine that may say otherwise than the spec, the launcher or `config.json`, or that are none."""
    if spec.engine.extra_args and not spec.engine.extra_args[0].startswith("--"):
        yield f"engine.extra_args: {spec.engine.extra_args[0]!r} is no option; begin with one, as in [--name, value]"
    for argument in spec.engine.extra_args:
        name = argument.partition("=")[0]
        if not argument.strip():
            yield f"engine.extra_args: {argument!r} is no argument; remove it"
        owned = [what for flag, what in OWN_ARGUMENTS.items() if len(name) > len("--") and flag.startswith(name)]
        if owned:
            yield f"engine.extra_args: {name} would change {owned[0]}, which slimerl sets by itself; remove it"
            continue
        # argparse takes the beginning of a name for the name
        meant = [key for flag, key in ENGINE_ARGUMENTS.items() if len(name) > len("--") and flag.startswith(name)]
        if meant:
            yield f"engine.extra_args: {name} would contradict {meant[0]}; remove it and set {meant[0]} instead"
    for name, nearest in unknown_options(spec.engine.extra_args, known_options()):
        yield f"engine.extra_args: {name} is no option of the installed SGLang; did you mean {nearest}?"


def _distributed_faults(path: Path | None, config: Config) -> Iterator[str]:
    """It is complete, and of the same model; its content is verified by the trainer."""
    if path is None:
        return
    told = path / directory.COMPANIONS
    if not (path / directory.MANIFEST).is_file():
        yield (
            f"model.megatron_path: {path} is no complete distributed checkpoint (it has no {directory.MANIFEST}); "
            "convert model.path with tools/convert_checkpoint.py, or name a checkpoints/step-N of a run"
        )
    elif told.is_dir() and (differing := differences(config, read_config(told))):
        yield f"model.megatron_path: {path} is another model than model.path: they differ in {', '.join(differing)}"


def _checkpoint_faults(key: str, path: Path, config: Config, form: Form = PLAIN, scored: bool = False) -> Iterator[str]:
    """Reads headers alone: every tensor that `config.json` asks for is there, in its shape. `scored`: it may have a
    scalar head in place of the output layer."""
    family = family_of(config)
    try:
        with HfCheckpoint(path) as checkpoint:
            form = stored_form(checkpoint) if scored else form
            check_keys(
                checkpoint,
                family.logical_tensors(config, form=form),
                family.aliases(config, form),
                family.unused_tensors(config, form),
            )
    except (CheckpointError, ConfigError) as error:
        yield f"{key}: {error}"
