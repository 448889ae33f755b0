"""Pairs: rows become halves of a pair, pairs are never split, and both losses move the model as their formulas say."""

import json
from pathlib import Path

import pytest
import tiny
import torch
import value_ranks
from hypothesis import given
from hypothesis import strategies as st
from test_critic import PLAIN, descend, reference_logprobs
from tiny_models import EOS, make_tiny_model
from value_ranks import DPO, REWARD_MODEL, Models

from slimerl.samples.rows import DataError
from slimerl.spec.schema import DataSpec, ParallelSpec
from slimerl.training.packing import PackingRules, SampleShape, plan_step


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    tiny.write_model(path / "policy", "qwen3", num_hidden_layers=2)
    tiny.write_model(path / "scored", "qwen3", scored=True, num_hidden_layers=2)
    return Models(path / "policy", path / "scored")


def reference_score(model, sample) -> torch.Tensor:
    """At the last token that counts."""
    last = sample.prompt_length + int(sample.sampled.nonzero()[0].max())
    hidden = model.model(torch.from_numpy(sample.tokens[: last + 1]).long()[None]).last_hidden_state[0, -1]
    return model.score(hidden)[0]


def pairs_of(step):
    return list(zip(step.samples[::2], step.samples[1::2], strict=True))


def reference_run(model, algorithm, leads) -> list[tuple[float, float]]:
    """Train `model` in place on pairs; (loss, share of pairs in which the chosen one leads) of each step."""
    found = []
    for step in value_ranks.steps_of(algorithm):
        lead = torch.stack([leads(model, *pair) for pair in pairs_of(step)])
        margins = torch.tensor([chosen.margin for chosen, _ in pairs_of(step)], dtype=torch.float64)
        loss = -torch.nn.functional.logsigmoid(lead - margins).mean()
        descend(model, loss)
        found.append((loss.item(), (lead > 0).double().mean().item()))
    return found


def assert_same_training(ranks, models, algorithm, name, model, leads) -> None:
    [[(figures, weights)]] = ranks.run(
        1, value_ranks.train, models, ParallelSpec(), [algorithm], PLAIN, {"at_least": 2, "shared_prefix": True}
    )
    before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    for found, (loss, accuracy) in zip(figures, reference_run(model, algorithm, leads), strict=True):
        assert found["train/loss"] == pytest.approx(loss, rel=1e-4)
        assert found["preference/accuracy"] == pytest.approx(accuracy)
    for key, parameter in model.named_parameters():
        change = (parameter.detach() - before[key]).abs().max().item()
        difference = (weights[name][key] - parameter.detach()).abs().max().item()
        assert difference <= 2e-3 * change + 3e-6, f"{key}: {difference} of a change of {change}"


def test_a_reward_model_moves_as_plain_autograd_in_float64_moves_it(ranks, models):
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(models.scored, attn_implementation="eager").double()

    def leads(model, chosen, rejected):
        return reference_score(model, chosen) - reference_score(model, rejected)

    assert_same_training(ranks, models, REWARD_MODEL, "train", model, leads)


def test_dpo_moves_the_policy_as_plain_autograd_in_float64_moves_it(ranks, models):
    """The second step is taken against the reference of the start."""
    from transformers import AutoModelForCausalLM

    model, reference = (
        AutoModelForCausalLM.from_pretrained(models.policy, attn_implementation="eager").double() for _ in range(2)
    )

    def gained(model, sample):
        with torch.no_grad():
            before = reference_logprobs(reference, sample)
        return (reference_logprobs(model, sample) - before).sum()

    def leads(model, chosen, rejected):
        return DPO.dpo_beta * (gained(model, chosen) - gained(model, rejected))

    assert_same_training(ranks, models, DPO, "policy", model, leads)


def test_an_exported_reward_model_scores_in_transformers_as_here(ranks, models, tmp_path):
    from transformers import AutoModelForSequenceClassification

    split = ParallelSpec(tensor=2)
    found = ranks.run(2, value_ranks.scores_and_export, models.scored, tmp_path / "out", split)[0]
    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert type(exported).__name__ == "Qwen3ForSequenceClassification"
    assert exported.config.num_labels == 1
    given_model = AutoModelForSequenceClassification.from_pretrained(models.scored)
    for name, tensor in given_model.state_dict().items():
        assert torch.equal(exported.state_dict()[name], tensor), name
    for sample, scores in zip(tiny.random_step(3, samples=4).samples, found, strict=True):
        hidden = exported.model(torch.from_numpy(sample.tokens).long()[None]).last_hidden_state[0]
        places = sample.prompt_length + sample.sampled.nonzero()[0]
        assert scores == pytest.approx(exported.score(hidden)[places, 0].tolist(), abs=1e-5)


def test_a_language_models_checkpoint_gives_a_score_of_zero_everywhere(ranks, models, tmp_path):
    for scores in ranks.run(1, value_ranks.scores_and_export, models.policy, tmp_path / "out", ParallelSpec())[0]:
        assert set(scores) == {0.0}


SHAPES = st.lists(st.tuples(*[st.integers(1, 30)] * 3), min_size=1, max_size=20)


@given(SHAPES, st.integers(1, 3), st.integers(1, 3), st.integers(20, 200), st.booleans())
def test_pairs_are_never_split_and_no_one_is_left_out(sizes, ranks_count, minibatches, budget, shared):
    shapes = [
        SampleShape(prompt, response, number, response, prefix=number)
        for number, (prompt, *responses) in enumerate(sizes)
        for response in responses
    ]
    if len(sizes) < minibatches:
        with pytest.raises(ValueError, match="cannot be cut"):
            plan_step(shapes, PackingRules(ranks_count, budget, shared, pairs=True), minibatches)
        return
    plan = plan_step(shapes, PackingRules(ranks_count, budget, shared, pairs=True), minibatches)
    assert sorted(each for one in plan.minibatches for each in one.samples) == list(range(len(shapes)))
    for one in plan.minibatches:
        assert one.totals.groups * 2 == one.totals.sequences == len(one.samples)
        for micro_batch in (part for rank in one.ranks for part in rank):
            assert [each + 1 for each in micro_batch[::2]] == list(micro_batch[1::2])
            assert all(each % 2 == 0 for each in micro_batch[::2])
            prompts = 1 if shared else 2
            pairs = [(shapes[a], shapes[b]) for a, b in zip(micro_batch[::2], micro_batch[1::2], strict=True)]
            tokens = sum(prompts * a.prompt + a.response + b.response for a, b in pairs)
            assert len(pairs) <= 1 or tokens <= budget


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from slimerl.training.sft_rows import load_tokenizer

    model = make_tiny_model("qwen3", tmp_path_factory.mktemp("model"))
    return load_tokenizer(model, DataSpec(train_path=Path("unused")))


def read(path, tokenizer, *rows):
    from slimerl.training.preference_rows import read_pairs

    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_pairs(path, tokenizer, DataSpec(train_path=path), 1000)


def test_a_row_becomes_two_answers_to_one_prompt(tmp_path, tokenizer):
    [pair] = read(tmp_path / "p.jsonl", tokenizer, {"id": 7, "prompt": "1+1=", "chosen": "2", "rejected": "11"})
    for half, text in ((pair.chosen, "2"), (pair.rejected, "11")):
        assert tokenizer.decode(half.tokens[: half.prompt_length]) == "1+1="
        assert tokenizer.decode(half.tokens[half.prompt_length : -1]) == text
        assert half.tokens[-1] == EOS
    assert (pair.sample_id, pair.chosen.sample_id, pair.rejected.sample_id) == ("7", "7 chosen", "7 rejected")


def test_a_row_says_by_how_much_its_chosen_answer_is_to_lead(tmp_path, tokenizer):
    from slimerl.training.batches import PackForm, pack

    row = {"id": "a", "prompt": "1+1=", "chosen": "2", "rejected": "3"}
    rows = (row | {"margin": 1.5}, row | {"id": "b"}, row | {"id": "c", "margin": 2})
    pairs = read(tmp_path / "p.jsonl", tokenizer, *rows)
    halves = [half for pair in pairs for half in (pair.chosen, pair.rejected)]
    assert pack(halves, 1.0, PackForm(scores=True)).margins.tolist() == [1.5, 0.0, 2.0]
    assert pack(halves, 1.0, PackForm()).margins is None, "dpo has none"
    # the second one's prompt is another's: those of one prompt stand together
    other = (rows[0], row | {"id": "b", "prompt": "5+6="}, rows[2])
    halves = [half for pair in read(tmp_path / "p.jsonl", tokenizer, *other) for half in (pair.chosen, pair.rejected)]
    together = pack(halves, 1.0, PackForm(scores=True, shared_prefix=True))
    assert together.margins.tolist() == [1.5, 2.0, 0.0]
    with pytest.raises(DataError, match=r"p.jsonl:2: 'margin' is '1'; it is a number, 0 or more"):
        read(tmp_path / "p.jsonl", tokenizer, row, row | {"id": "b", "margin": "1"})
    with pytest.raises(DataError, match=r"p.jsonl:1: 'margin' is -1"):
        read(tmp_path / "p.jsonl", tokenizer, row | {"margin": -1})
    for above in (1e39, 10**400):
        with pytest.raises(DataError, match=r"p.jsonl:1: 'margin' is 1.* that float32 holds"):
            read(tmp_path / "p.jsonl", tokenizer, row | {"margin": above})


def test_r3_pairs_that_are_none_are_refused_once_each(tmp_path, tokenizer):
    good = {"id": "a", "prompt": "1+1=", "chosen": "2", "rejected": "3"}
    path = tmp_path / "p.jsonl"
    with pytest.raises(DataError) as refused:
        read(path, tokenizer, good, good, {"id": "b", "prompt": "1+1=", "chosen": "2"})
    assert str(refused.value).splitlines() == [
        f"{path}:2: id 'a' stands already in line 1",
        f"{path}:3: 'rejected' is missing",
    ]
    with pytest.raises(DataError, match="id 'a': chosen and rejected are the same"):
        read(path, tokenizer, good | {"rejected": "2"})
