"""The `engine` section: SGLang servers, how each is cut and how many there are."""

from typing import Annotated

from pydantic import BeforeValidator, model_validator

from slimerl.spec.elastic import ElasticSpec
from slimerl.spec.fields import FilePath, Positive, Strict, Workers, tuple_from_list
from slimerl.spec.speculation import DraftingSpec


class EngineSpec(Strict):
    """One SGLang server; `replicas` of them are started."""

    model_path: FilePath | None = None
    """The checkpoint that the engines start from, where it is not the trainer's: the same model in FP8 blocks. The sync
    then sends what its `config.json` says."""
    replicas: Positive = 1
    tensor_parallel: Positive = 1
    """GPUs of one engine."""
    expert_parallel: Positive = 1
    """Groups of an engine's GPUs over which its experts are spread; an expert is cut over the GPUs of a group."""
    data_parallel_attention: Positive = 1
    """Groups of an engine's GPUs that each serve requests of their own; attention is cut over the GPUs of a group."""
    replicated_mlp: bool = False
    """Every GPU holds dense MLPs and shared experts whole: on a large engine a part would be less than an FP8 block."""
    max_total_tokens: Positive = 20_000
    """KV cache size in tokens, of each attention group."""
    context_tokens: Positive = 2048
    threads: Workers = 1
    """CPU threads of one engine process; without meaning on a GPU."""
    elastic: ElasticSpec | None = None
    """More and fewer engines by load; default: `replicas` of them, but for `slimerl engines add` and `remove`."""
    drafting: DraftingSpec | None = None
    """The engine's own speculative decoding; default: none."""
    extra_args: Annotated[tuple[str, ...], BeforeValidator(tuple_from_list)] = ()
    """Further arguments of `sglang.launch_server`, as they stand; none that another key or slimerl itself sets."""

    @model_validator(mode="after")
    def _groups_divide_the_gpus(self) -> "EngineSpec":
        for key in ("expert_parallel", "data_parallel_attention"):
            if self.tensor_parallel % getattr(self, key):
                raise ValueError(
                    f"engine.{key} = {getattr(self, key)} does not divide the GPUs of an engine, "
                    f"engine.tensor_parallel = {self.tensor_parallel}"
                )
        return self

    @property
    def most_replicas(self) -> int:
        """That may run at once."""
        return self.replicas if self.elastic is None else self.elastic.max
