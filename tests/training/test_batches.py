"""A pack holds its samples' tokens in order and asks for exactly the sampled ones."""

import numpy as np
import pytest
import torch

from slimerl.samples.sample import Sample
from slimerl.training.training_sample import BadSample, TrainingSample


def made() -> list[TrainingSample]:
    first = Sample("a", "g", "p", prompt_tokens=(5, 6))
    first.append([7, 8], logprobs=[-0.1, -0.2], version=0)
    first.append([9])
    first.append([10], logprobs=[-0.3], version=0)
    second = Sample("b", "g", "p", prompt_tokens=(5,))
    second.append([11], logprobs=[-0.4], version=0)
    return [
        TrainingSample.from_payload(sample.payload(), advantage)
        for sample, advantage in zip([first, second], (1.0, -2.0), strict=True)
    ]


def test_positions_precede_the_sampled_tokens_and_tool_tokens_are_left_out():
    from slimerl.training.batches import pack

    batch = pack(made(), temperature=0.5, multiple=1)
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9, 10, 5, 11]]
    assert batch.wanted.tokens.tolist() == [7, 8, 10, 11]
    assert batch.wanted.positions.tolist() == [1, 2, 4, 6]
    assert torch.allclose(batch.behavior_logprobs, torch.tensor([-0.1, -0.2, -0.3, -0.4]))
    assert batch.advantages.tolist() == [1.0, 1.0, 1.0, -2.0]
    assert batch.packed.cu_seqlens_q.tolist() == [0, 6, 8]
    assert batch.packed.max_seqlen_q == 6
    assert batch.wanted.temperature == 0.5


def test_padding_is_a_sequence_of_its_own_that_nothing_asks_for():
    from slimerl.training.batches import pack

    batch = pack(made(), temperature=1.0, multiple=5)
    assert batch.tokens.shape == (1, 10)
    assert batch.packed.cu_seqlens_q.tolist() == [0, 6, 8, 10]
    assert batch.padding_tokens == 2
    assert batch.wanted.positions.tolist() == [1, 2, 4, 6]


def test_no_samples_make_a_pack_of_padding():
    from slimerl.training.batches import pack

    batch = pack([], temperature=1.0, multiple=2)
    assert batch.tokens.shape == (1, 2)
    assert batch.sampled_tokens == 0


def sample_with(**changes) -> TrainingSample:
    arrays = {
        "sample_id": "s7",
        "tokens": np.array([1, 2, 3]),
        "prompt_length": 1,
        "sampled": np.array([True, True]),
        "behavior_logprobs": np.array([-1.0, -1.0], dtype=np.float32),
        "advantage": 0.0,
    }
    return TrainingSample(**arrays | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"sampled": np.array([True])},
        {"behavior_logprobs": np.array([-1.0] * 3, dtype=np.float32)},
        {"prompt_length": 0},
        {"behavior_logprobs": np.array([-1.0, float("nan")], dtype=np.float32)},
    ],
)
def test_arrays_that_contradict_each_other_are_refused_with_the_samples_name(changes):
    with pytest.raises(BadSample, match="s7"):
        sample_with(**changes)
