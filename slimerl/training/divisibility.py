"""Does a grid divide a model? Needs neither Megatron nor processes; every refusal names the key and the fix.

Flows in: `ModelArguments`, `ParallelSpec`. Flows out: nothing, or UnsupportedModel.
"""

from slimerl.resharding.layouts import LayoutError
from slimerl.spec.schema import ParallelSpec
from slimerl.training.architecture import ModelArguments
from slimerl.training.capabilities import Capabilities
from slimerl.training.config_reader import UnsupportedModel
from slimerl.training.trainer_layout import trainer_layout


def check_divisible(arguments: ModelArguments, parallel: ParallelSpec) -> None:
    """Raises UnsupportedModel where the grid does not divide the model."""
    model = arguments.transformer
    widths = ["num_attention_heads", "num_query_groups", "moe_shared_expert_intermediate_size"]
    if 0 in model.get("moe_layer_freq", [0]):
        widths.append("ffn_hidden_size")
    for key in widths:
        _divide(
            "tensor",
            parallel.tensor,
            key,
            model.get(key),
            "choose a common divisor of the heads, KV heads and MLP width",
        )
    _check_experts(arguments, parallel)
    _check_stages(model["num_layers"], parallel)


def _check_experts(arguments: ModelArguments, parallel: ParallelSpec) -> None:
    model = arguments.transformer
    if not arguments.experts:
        for key, size in (("expert", parallel.expert), ("expert_tensor", parallel.expert_tensor)):
            if size is not None and size != {"expert": 1, "expert_tensor": parallel.tensor}[key]:
                raise UnsupportedModel(f"training.parallel.{key} = {size}, but the model has no experts; remove it")
        return
    if parallel.tensor > 1 and not parallel.sequence_parallel:
        raise UnsupportedModel(
            f"training.parallel.tensor = {parallel.tensor}: Megatron trains experts under tensor parallelism only with "
            "sequence parallelism; set training.parallel.sequence_parallel: true"
        )
    _divide("expert", parallel.expert, "num_moe_experts", arguments.experts, "choose a divisor of the experts")
    _divide(
        "expert_tensor" if parallel.expert_tensor is not None else "tensor (and so expert_tensor)",
        parallel.expert_tensor_size,
        "moe_ffn_hidden_size",
        model["moe_ffn_hidden_size"],
        "set training.parallel.expert_tensor to a divisor of an expert's width",
    )


def _divide(key: str, size: int, what: str, value: int | None, fix: str) -> None:
    if value is not None and value % size:
        raise UnsupportedModel(f"training.parallel.{key} = {size} does not divide the model's {what} = {value}; {fix}")


def _check_stages(layers: int, parallel: ParallelSpec) -> None:
    try:
        layout = trainer_layout({"num_hidden_layers": layers}, parallel, Capabilities(cuda=False))
    except LayoutError as error:
        raise UnsupportedModel(str(error)) from None
    if layout.prediction_stage is not None:
        raise UnsupportedModel(
            f"training.parallel.pipeline_layout = {parallel.pipeline_layout!r} places a multi-token-prediction layer, "
            "which the trainer neither builds nor trains; remove the m"
        )
