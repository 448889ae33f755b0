"""A model with a scalar head: the critic, which says what is to be expected, and the reward model, which scores.

Flows in: `WantedTokens`, of which the positions alone count. Flows out: one number for each. Invariant: the trunk is
the policy's, so that every parallelism is; the head is whole on every tensor-parallel rank, and each computes the same.
"""

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel

from slimerl.training.model import WantedTokens


class ScalarHead(torch.nn.Module):
    """One row of weights without bias; zeros until a checkpoint fills it."""

    def __init__(self, like: torch.Tensor) -> None:
        """`like`: the weight of the output layer in whose place it stands, [rows, width]."""
        super().__init__()
        self.weight = torch.nn.Parameter(like.new_zeros(1, like.shape[1]))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[positions, width] → [positions], in float32: neighbouring values differ by little."""
        return (hidden.float() @ self.weight.float().t())[:, 0]


class ValueModel(GPTModel):
    """GPTModel whose last stage answers `labels`, which are `WantedTokens`, with the value at each position, [wanted
    tokens] float32. Its embedding is never the output layer too."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments | {"share_embeddings_and_output_weights": False})
        if self.post_process:
            # Megatron's own, which it always allocates, goes at once
            self.score = ScalarHead(self.output_layer.weight.data)
            del self.output_layer

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        if not self.post_process:
            return hidden_states
        assert isinstance(labels, WantedTokens)
        return self.score(self._hidden_of(hidden_states, labels.positions))

    def _hidden_of(self, hidden_states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states [positions, width], whole on every tensor-parallel rank. Their gradient is so, too: it is not
        added up over the ranks."""
        if self.config.sequence_parallel:
            hidden_states = tensor_parallel.gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        return hidden_states[:, 0].index_select(0, positions)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The modules' own: what GPTModel and LanguageModule add is about an output layer."""
        return super(LanguageModule, self).sharded_state_dict(*args, **kwargs)
