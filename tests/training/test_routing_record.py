"""A record lies in a pack as the tokens do, whatever the packing; one that is not of this model is refused."""

import msgspec
import numpy as np
import pytest

from slimerl.samples.messages import pack_array
from slimerl.samples.sample import Sample
from slimerl.training.architecture import ModelArguments
from slimerl.training.batches import PackForm, pack
from slimerl.training.batching import routed_shape
from slimerl.training.routing_record import RoutedShape, RoutingRecord
from slimerl.training.segments import Stripes
from slimerl.training.training_sample import BadSample, TrainingSample

SHAPE = RoutedShape(layers=3, experts_per_token=2, experts=1000, sparse_layers=(1, 2))


def rows_of(tokens: np.ndarray) -> np.ndarray:
    """A record by which each token can be told."""
    experts = np.stack([tokens, tokens + 500], axis=-1)
    return np.stack([np.zeros_like(experts), experts, experts[:, ::-1]], axis=1).reshape(len(tokens), -1)


def sample(prompt: list[int], response: list[int], known: slice = slice(None)) -> TrainingSample:
    tokens = np.array([*prompt, *response], np.int32)
    routing = np.full((len(tokens), 6), -1, np.int16)
    routing[known] = rows_of(tokens)[known]
    marks = np.ones(len(response), bool)
    return TrainingSample("s", tokens, len(prompt), marks, np.zeros(len(response), np.float32), 1.0, routing)


GROUP = [
    sample([11, 12, 13], [21, 22, 23, 24]),
    sample([11, 12, 13], [31]),
    sample([41, 42], [51, 52, 53]),
    sample([11, 12, 13], [61, 62, 63]),
]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("segmented", [True, False])
@pytest.mark.parametrize("context", [1, 2])
def test_each_token_of_a_pack_has_its_own_row_and_padding_has_none(shared, segmented, context):
    if shared and not segmented:
        pytest.skip("Transformer Engine's attention computes no prompt once for several samples")
    found: dict[int, int] = {}
    for rank in range(context):
        form = PackForm(4, Stripes(rank, context), shared, segmented, routed=SHAPE)
        packed = pack(GROUP, 1.0, form)
        record, tokens = packed.routing.of_engine, packed.tokens[0].numpy()
        assert record is not None
        assert record.shape == (len(tokens), 3, 2)
        real = tokens != 0
        assert (record.numpy()[real].reshape(-1, 6) == rows_of(tokens[real])).all()
        assert (record.numpy()[~real] == -1).all()
        # of each sampled token, in the order of the pack
        assert packed.routing.unrecorded.tolist() == [0] * packed.sampled_tokens
        for token in tokens[real]:
            found[token] = found.get(token, 0) + 1
    # what predicts nothing is not computed
    assert found == {
        **dict.fromkeys((11, 12, 13), 1 if shared else 3),
        **dict.fromkeys((21, 22, 23, 41, 42, 51, 52, 61, 62), 1),
    }


def test_sequence_parallel_ranks_take_equal_parts_in_order():
    record = pack(GROUP, 1.0, PackForm(4, routed=SHAPE)).routing
    parts = [record.engine_choice(2, part, 4) for part in range(4)]
    assert all(len(part) == len(parts[0]) for part in parts)
    assert np.concatenate(parts).tolist() == record.of_engine[:, 2].tolist()
    assert RoutingRecord().engine_choice(2, 0, 4) is None


def test_a_shared_prompt_has_the_rows_of_a_sample_that_knows_them():
    """Fault: the engine of the first one was cut off before it told any."""
    first = sample([11, 12, 13], [21, 22], known=slice(3, None))
    record = pack([first, GROUP[1]], 1.0, PackForm(shared_prefix=True, routed=SHAPE)).routing.of_engine
    assert record is not None
    assert (record[:3].numpy().reshape(3, -1) == rows_of(np.array([11, 12, 13]))).all()
    alone = pack([first], 1.0, PackForm(routed=SHAPE)).routing
    assert alone.unrecorded.tolist() == [1, 0], "the first token of the response was sampled behind the prompt"


def with_row(*experts: int) -> TrainingSample:
    made = sample([11], [12, 13])
    assert made.routing is not None
    made.routing[1] = experts
    return made


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (with_row(0, 0, 5, 5, 1, 2), "2 different experts"),
        (with_row(0, 0, 5, 6, 1, 1000), "2 different experts of 1000"),
        (with_row(0, 0, 5, -1, 1, 2), "2 different experts"),
        (TrainingSample("s", np.array([1, 2]), 1, *[np.zeros(1)] * 2, 0.0, np.zeros((2, 4))), "same model"),
    ],
)
def test_a_record_of_another_model_is_refused(broken, told):
    with pytest.raises(BadSample, match=told):
        pack([broken], 1.0, PackForm(routed=SHAPE))


def test_numbers_of_dense_layers_are_not_read():
    pack([with_row(7, 7, 5, 6, 1, 2)], 1.0, PackForm(routed=SHAPE))


@pytest.mark.parametrize("rows", [1, 3])
def test_a_record_of_another_length_is_refused(rows):
    made = Sample("s", "g", "p", (5,), reward=1.0)
    made.append([6], [-0.1], 0)
    broken = msgspec.structs.replace(made.payload(), routing=b"\0\0" * rows)
    with pytest.raises(BadSample, match="routed experts"):
        TrainingSample.from_payload(broken, 0.0)


def test_layers_are_counted_as_the_engine_counts_them():
    routed = {"num_moe_experts": 8, "moe_router_topk": 4, "moe_layer_freq": [0, 0, 1, 1, 1], "num_layers": 5}
    arguments = ModelArguments(routed, 100, 100, 1e4, 1.0, None, False)
    assert routed_shape(arguments) == RoutedShape(5, 4, 8, (2, 3, 4))


def test_a_samples_record_reaches_the_pack_as_bytes():
    made = Sample("s", "g", "p", (11, 12), reward=1.0)
    made.append([13, 14], [-0.1, -0.2], 0)
    made.note_routing(0, rows_of(np.array([11, 12, 13])))
    assert made.payload().routing == pack_array([*rows_of(np.array([11, 12, 13])), [-1] * 6], "int16")
    record = pack([TrainingSample.from_payload(made.payload(), 1.0)], 1.0, PackForm(routed=SHAPE)).routing.of_engine
    assert record is not None
    assert (record.numpy().reshape(3, -1) == rows_of(np.array([11, 12, 13]))).all()
