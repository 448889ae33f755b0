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


def test_positions_precede_the_sampled_tokens_and_nothing_behind_the_last_is_computed():
    from slimerl.training.batches import PackForm, pack

    batch = pack(made(), 0.5, PackForm())
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9, 5]]
    assert batch.wanted.tokens.tolist() == [7, 8, 10, 11]
    assert batch.wanted.positions.tolist() == [1, 2, 4, 5]
    assert torch.allclose(batch.behavior_logprobs, torch.tensor([-0.1, -0.2, -0.3, -0.4]))
    assert batch.advantages.tolist() == [1.0, 1.0, 1.0, -2.0]
    assert batch.sequence.tolist() == [0, 0, 0, 1]
    assert batch.packed.positions.tolist() == [0, 1, 2, 3, 4, 0]
    assert batch.wanted.temperature == 0.5
    assert batch.places is None


def test_padding_is_a_sequence_of_its_own_that_nothing_asks_for():
    from slimerl.training.batches import PackForm, pack

    batch = pack(made(), 1.0, PackForm(tensor=4))
    assert batch.tokens.shape == (1, 8)
    assert batch.packed.positions.tolist() == [0, 1, 2, 3, 4, 0, 0, 1]
    assert (batch.padding_tokens, batch.computed_tokens) == (2, 8)
    assert batch.wanted.positions.tolist() == [1, 2, 4, 5]


def test_no_samples_make_a_pack_of_padding():
    from slimerl.training.batches import PackForm, pack

    batch = pack([], 1.0, PackForm(tensor=2))
    assert batch.tokens.shape == (1, 2)
    assert batch.sampled_tokens == batch.sequences == 0


def group_of_three() -> list[TrainingSample]:
    """Two answers to one prompt, one of a single token, and another prompt's."""
    samples = []
    for prompt, response in (([5, 6], [7, 8, 9]), ([4], [3, 2]), ([5, 6], [1])):
        sample = Sample(str(len(samples)), "g", "p", prompt_tokens=tuple(prompt))
        sample.append(response, logprobs=[-float(token) for token in response], version=0)
        samples.append(TrainingSample.from_payload(sample.payload(), float(len(samples))))
    return samples


def test_a_shared_prompt_is_computed_once_and_predicts_the_first_token_of_each_answer():
    from slimerl.training.batches import PackForm, pack

    batch = pack(group_of_three(), 1.0, PackForm(shared_prefix=True))
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 4, 3]]
    assert batch.packed.positions.tolist() == [0, 1, 2, 3, 0, 1]
    assert batch.wanted.tokens.tolist() == [7, 8, 9, 1, 3, 2]
    assert batch.wanted.positions.tolist() == [1, 2, 3, 1, 4, 5]
    assert batch.sequence.tolist() == [0, 0, 0, 1, 2, 2]
    assert batch.advantages.tolist() == [0, 0, 0, 2, 1, 1]
    assert batch.behavior_logprobs.tolist() == [-7, -8, -9, -1, -3, -2]


@pytest.mark.parametrize("segmented", [True, False], ids=["segments", "THD"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_context_parallel_ranks_together_ask_for_every_token_once(segmented, size):
    from slimerl.training.batches import PackForm, pack
    from slimerl.training.segments import Stripes

    whole = pack(group_of_three(), 1.0, PackForm(segmented=segmented))
    ranks = [
        pack(group_of_three(), 1.0, PackForm(tensor=2, stripes=Stripes(rank, size), segmented=segmented))
        for rank in range(size)
    ]
    assert len({batch.tokens.shape for batch in ranks}) == 1
    found = torch.full_like(whole.wanted.tokens, -1)
    before = torch.full_like(whole.wanted.tokens, -1)
    for batch in ranks:
        assert batch.tokens.shape[1] % 2 == 0
        places = slice(None) if batch.places is None else batch.places
        assert (found[places] == -1).all()
        found[places] = batch.wanted.tokens
        before[places] = batch.tokens[0][batch.wanted.positions]
        assert torch.equal(batch.advantages, whole.advantages)
    assert torch.equal(found, whole.wanted.tokens)
    assert torch.equal(before, whole.tokens[0][whole.wanted.positions])


def test_thd_packs_tell_where_sequences_start_and_cut_each_into_chunks_for_context_parallelism():
    from slimerl.training.segments import Stripes
    from slimerl.training.thd import lay_sequences

    plain = lay_sequences([5, 2], 4, Stripes(), "cpu")
    assert plain.packed.cu_seqlens_q.tolist() == [0, 5, 7, 8]
    assert plain.packed.max_seqlen_q == 5
    first, second = (lay_sequences([5, 2], 1, Stripes(rank, 2), "cpu") for rank in range(2))
    assert first.packed.cu_seqlens_q.tolist() == [0, 5, 7]
    assert first.packed.cu_seqlens_q_padded.tolist() == [0, 8, 12]
    assert first.own.tolist() == [0, 1, 6, 7, 8, 11]
    assert second.own.tolist() == [2, 3, 4, 5, 9, 10]
    assert first.where.tolist() == [0, 1, 2, 3, 4, 8, 9]


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
