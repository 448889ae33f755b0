"""The proof of a sync: an engine rank that holds anything else than what was sent is named."""

from typing import Any

import pytest
import torch
from resharding_models import engine_reference, megatron_reference, random_state

from slimerl.engine.inside.digest import digest
from slimerl.resharding.coverage import CoverageError
from slimerl.resharding.families import family_of
from slimerl.resharding.layouts import EngineLayout, MegatronLayout
from slimerl.resharding.proof import ProofError, WeightProof, digest_granules
from slimerl.resharding.tensors import Placement

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "dtype": "bfloat16",
}
FAMILY = family_of(CONFIG)
TENSORS = FAMILY.logical_tensors(CONFIG)
STATE = random_state(CONFIG)
SHAPES = {tensor.name: tensor.shape for tensor in TENSORS}
SIZE = 4
RANKS = [FAMILY.engine_placements(CONFIG, EngineLayout(tensor=SIZE), rank) for rank in range(SIZE)]


def report(parameters: dict[str, torch.Tensor], placed: list[Placement], granules: dict[str, int]) -> dict[str, int]:
    """What an engine rank answers: for each tensor the sum of the digests of its boxes."""
    found: dict[str, int] = {}
    for place in placed:
        if not place.is_padding:
            view = place.view_of(parameters[place.parameter])
            bounds = (place.box.starts, place.box.stops)
            value = digest(view, place.tensor, SHAPES[place.tensor], bounds, granules[place.tensor])
            found[place.tensor] = (found.get(place.tensor, 0) + value) % (1 << 64)
    return found


def proof_of_all() -> WeightProof:
    proof = WeightProof(TENSORS, RANKS)
    for name, tensor in STATE.items():
        proof.add(name, tensor)
    return proof


def engine() -> list[dict[str, torch.Tensor]]:
    return [
        {name: tensor.clone() for name, tensor in engine_reference(CONFIG, STATE, SIZE, rank).items()}
        for rank in range(SIZE)
    ]


def reports(parameters: list[dict[str, torch.Tensor]], proof: WeightProof) -> list[dict[str, int]]:
    return [report(held, placed, proof.granules) for held, placed in zip(parameters, RANKS, strict=True)]


def test_w12_an_engine_that_holds_what_was_sent_is_proven():
    proof = proof_of_all()
    proof.check("engine-0", reports(engine(), proof))


@pytest.mark.parametrize(
    ("parameter", "tensor"),
    [
        ("model.layers.1.self_attn.qkv_proj.weight", r"model\.layers\.1\.self_attn\.v_proj\.weight"),
        ("model.layers.0.mlp.gate_up_proj.weight", r"model\.layers\.0\.mlp\.up_proj\.weight"),
        ("model.norm.weight", r"model\.norm\.weight"),
    ],
)
def test_w12_one_flipped_bit_on_one_rank_is_named_with_engine_rank_and_tensor(parameter, tensor):
    """Fault: the sign of the last element of one parameter of one rank."""
    proof, parameters = proof_of_all(), engine()
    parameters[2][parameter].view(-1)[-1:].view(torch.int16).bitwise_xor_(-(1 << 15))
    with pytest.raises(ProofError, match=f"engine-0 rank 2 does not hold what was sent of {tensor}$"):
        proof.check("engine-0", reports(parameters, proof))


def test_w12_ranks_in_each_others_place_are_found():
    proof = proof_of_all()
    swapped = reports([engine()[rank] for rank in (1, 0, 2, 3)], proof)
    with pytest.raises(ProofError, match="engine-0 rank 0"):
        proof.check("engine-0", swapped)


def test_w3_a_tensor_that_was_never_sent_is_named():
    proof = WeightProof(TENSORS, RANKS)
    for name in STATE.keys() - {"model.layers.0.self_attn.k_norm.weight"}:
        proof.add(name, STATE[name])
    with pytest.raises(ProofError, match=r"never sent: model\.layers\.0\.self_attn\.k_norm\.weight"):
        proof.check("engine-0", reports(engine(), proof))


def test_w3_what_is_sent_must_be_what_was_planned():
    proof = WeightProof(TENSORS, RANKS)
    with pytest.raises(ProofError, match="stranger"):
        proof.add("stranger", torch.zeros(3))
    with pytest.raises(ProofError, match=r"model\.norm\.weight is sent as torch\.float32"):
        proof.add("model.norm.weight", STATE["model.norm.weight"].float())
    proof.add("model.norm.weight", STATE["model.norm.weight"])
    with pytest.raises(ProofError, match="sent twice"):
        proof.add("model.norm.weight", STATE["model.norm.weight"])


def test_a_rank_that_reports_too_little_is_named():
    proof = proof_of_all()
    complete = reports(engine(), proof)
    with pytest.raises(ProofError, match="engine-0 has 4 ranks, 3 reported"):
        proof.check("engine-0", complete[:3])
    short = {name: value for name, value in complete[3].items() if name != "model.norm.weight"}
    with pytest.raises(ProofError, match=r"rank 3 and the plan disagree about what it holds: model\.norm\.weight"):
        proof.check("engine-0", [*complete[:3], short])


def test_an_engine_plan_that_leaves_a_part_out_is_refused_before_anything_is_sent():
    with pytest.raises(CoverageError, match="embed_tokens"):
        WeightProof(TENSORS, [RANKS[0], RANKS[1], RANKS[2], []])


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_digests_of_the_trainers_shards_add_up_to_those_of_the_engines(tensor):
    layout = MegatronLayout(tensor=tensor)
    trainer = [FAMILY.megatron_placements(CONFIG, layout, rank) for rank in range(tensor)]
    granules = digest_granules(TENSORS, [*trainer, *RANKS])
    totals = dict.fromkeys(SHAPES, 0)
    for rank, placed in enumerate(trainer):
        for name, value in report(megatron_reference(CONFIG, STATE, layout, rank), placed, granules).items():
            # Norms lie on every rank: one of them counts.
            if rank == 0 or "norm" not in name:
                totals[name] = (totals[name] + value) % (1 << 64)
    for name, total in totals.items():
        bounds = ((0,) * len(SHAPES[name]), SHAPES[name])
        assert digest(STATE[name], name, SHAPES[name], bounds, granules[name]) == total, name
