"""PPO with a critic: both models learn what the formulas say, however the work is split, and go on after a restart."""

import pytest
import tiny
import torch
import value_ranks
from test_loop import run_loop, run_spec
from trainer_control_service import ControlService
from value_ranks import DPO, PPO, REWARD_MODEL, Models

from slimerl.spec.load import spec_from_tree
from slimerl.spec.schema import OptimizerSpec, ParallelSpec

# an epsilon above the gradients' rounding: Adam otherwise turns 1e-9 against 2e-9 into a full-sized difference
OPTIMIZER = OptimizerSpec(lr=1e-2, eps=1e-4)
RATE, EPSILON = 1e4, 1e6
# an epsilon far above the gradient makes Adam's update a plain gradient step: rate / epsilon times the gradient
PLAIN = OptimizerSpec(lr=RATE, eps=EPSILON, beta1=1e-7, beta2=1e-7, clip_grad_norm=1e9)
SPLITS = {
    "DP2": (ParallelSpec(data=2), {"at_least": 2, "shared_prefix": True}),
    "PP2": (ParallelSpec(pipeline=2), {"at_least": 2}),
    "CP2": (ParallelSpec(context=2), {"shared_prefix": True}),
    "TP2": (ParallelSpec(tensor=2), {}),
    "TP2 with SP": (ParallelSpec(tensor=2, sequence_parallel=True), {"at_least": 4, "shared_prefix": True}),
}
ALGORITHMS = [PPO.model_copy(update={"kl_coef": 0.2, "kl_in": "reward", "kl_estimator": "k1"}), DPO, REWARD_MODEL]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    tiny.write_model(path / "policy", "qwen3", num_hidden_layers=2)
    tiny.write_model(path / "scored", "llama", scored=True, tied=True, num_hidden_layers=2)
    return Models(path / "policy", path / "scored")


@pytest.fixture(scope="module")
def whole(ranks, models):
    """What one process makes of it in one micro-batch."""
    return ranks.run(1, value_ranks.train, models, ParallelSpec(), ALGORITHMS, OPTIMIZER, {})[0]


@pytest.mark.parametrize("split", SPLITS)
def test_m4_critic_pairs_and_scores_do_not_depend_on_the_split(ranks, models, whole, split):
    parallel, packing = SPLITS[split]
    for of_rank in ranks.run(2, value_ranks.train, models, parallel, ALGORITHMS, OPTIMIZER, packing):
        for (figures, weights), (expected_figures, expected) in zip(of_rank, whole, strict=True):
            for found, wanted in zip(figures, expected_figures, strict=True):
                assert found.keys() == wanted.keys()
                for key in wanted.keys() - {"train/computed_tokens", "train/padding_share"}:
                    assert found[key] == pytest.approx(wanted[key], rel=1e-4, abs=2e-6), key
            assert weights.keys() == expected.keys()
            for model, tensors in expected.items():
                worst = {name: (weights[model][name] - tensors[name]).abs().max().item() for name in tensors}
                assert max(worst.values()) <= 1e-5, (model, max(worst, key=worst.__getitem__))


def reference_values(model, sample) -> torch.Tensor:
    """V of each sampled token: read where the token before it stands."""
    hidden = model.model(torch.from_numpy(sample.tokens).long()[None]).last_hidden_state[0]
    places = sample.prompt_length - 1 + sample.sampled.nonzero()[0]
    return model.score(hidden)[places, 0]


def reference_logprobs(model, sample) -> torch.Tensor:
    tokens = torch.from_numpy(sample.tokens).long()
    places = torch.from_numpy(sample.prompt_length + sample.sampled.nonzero()[0])
    return torch.log_softmax(model(tokens[None]).logits[0], -1)[places - 1, tokens[places]]


def generalized_advantages(reward, values):
    """Token by token from the end; the reward comes with the last one."""
    advantages, tail, following = [], 0.0, 0.0
    for value in reversed(values):
        delta = reward + PPO.gamma * following - value
        tail = delta + PPO.gamma * PPO.gae_lambda * tail
        advantages.append(tail)
        reward, following = 0.0, value
    return torch.tensor(advantages[::-1], dtype=torch.float64)


def descend(model, loss) -> None:
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= RATE / EPSILON * parameter.grad


def reference_step(policy, critic, samples, minibatches: int) -> list[float]:
    """One step in float64, in place; the critic's losses."""
    with torch.no_grad():
        old = {each.sample_id: reference_values(critic, each) for each in samples}
        proximal = {each.sample_id: reference_logprobs(policy, each) for each in samples}
    raw = {each.sample_id: generalized_advantages(each.advantage, old[each.sample_id].tolist()) for each in samples}
    every = torch.cat(list(raw.values()))
    losses = []
    for part in range(minibatches):
        own = samples[len(samples) * part // minibatches : len(samples) * (part + 1) // minibatches]
        tokens = sum(int(each.sampled.sum()) for each in own)
        surrogate, errors = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for each in own:
            name = each.sample_id
            advantages = (raw[name] - every.mean()) / (every.var(correction=0) + 1e-8).sqrt()
            ratio = (reference_logprobs(policy, each) - proximal[name]).exp()
            loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - PPO.clip_low, 1 + PPO.clip_high))
            surrogate = surrogate + torch.where(advantages < 0, loss.minimum(-3 * advantages), loss).sum()
            values, returns = reference_values(critic, each), raw[name] + old[name]
            clipped = old[name] + (values - old[name]).clamp(-PPO.value_clip, PPO.value_clip)
            errors = errors + 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2).sum()
        descend(policy, surrogate / tokens)
        descend(critic, errors / tokens)
        losses.append(errors.item())
    return losses


def test_both_models_move_as_plain_autograd_in_float64_moves_them(ranks, models):
    """Unequal lengths, tool tokens in between; in the second of two updates ratio and values have moved."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    policy = AutoModelForCausalLM.from_pretrained(models.policy, attn_implementation="eager").double()
    critic = AutoModelForSequenceClassification.from_pretrained(models.scored, attn_implementation="eager").double()
    start = {"policy": policy, "critic": critic}
    start = {name: {k: v.detach().clone() for k, v in each.named_parameters()} for name, each in start.items()}
    algorithm = [PPO]
    packing = {"minibatches": 2, "at_least": 2}
    [[(figures, weights)]] = ranks.run(1, value_ranks.train, models, ParallelSpec(), algorithm, PLAIN, packing)
    tokens = 0
    for step, found in zip(value_ranks.steps_of(PPO), figures, strict=True):
        losses = reference_step(policy, critic, step.samples, minibatches=2)
        tokens = sum(int(each.sampled.sum()) for each in step.samples)
        assert found["critic/loss"] == pytest.approx(sum(losses) / tokens, rel=1e-3)
    for name, model in (("policy", policy), ("critic", critic)):
        for key, parameter in model.named_parameters():
            change = (parameter.detach() - start[name][key]).abs().max().item()
            difference = (weights[name][key] - parameter.detach()).abs().max().item()
            assert difference <= 2e-3 * change + 3e-6, f"{name} {key}: {difference} of a change of {change}"
    assert figures[-1]["critic/clip_fraction"] > 0


@pytest.mark.parametrize("near", [False, True], ids=["shared", "local"])
@pytest.mark.parametrize(("parallel", "saved_after"), [(ParallelSpec(data=2), 1), (ParallelSpec(tensor=2), 2)])
def test_c1_policy_and_critic_come_back_bit_for_bit_also_from_a_warm_up(
    ranks, tmp_path, models, parallel, saved_after, near
):
    """Injected: a checkpoint while the critic alone is trained, and one behind that."""
    found = ranks.run(2, value_ranks.critic_resumed, models, tmp_path, parallel, 1, saved_after, near)
    for (saved, after, figures), (loaded, after_again, figures_again) in found:
        for then, now in ((saved, loaded), (after, after_again)):
            assert all(torch.equal(then[name][key], now[name][key]) for name in then for key in then[name])
        assert figures == figures_again
        moved = {name for name in saved if any(not torch.equal(saved[name][k], after[name][k]) for k in saved[name])}
        assert moved == {"policy", "critic"}


def test_during_the_warm_up_the_critic_alone_learns(ranks, models, whole):
    warming = PPO.model_copy(update={"value_warmup_steps": 1})
    [[(figures, _), (alone, weights)]] = ranks.run(
        1, value_ranks.train, models, ParallelSpec(), [PPO, warming], OPTIMIZER, {}
    )
    assert "train/grad_norm" in figures[0]
    assert "train/grad_norm" not in alone[0]
    assert alone[0]["train/loss"] == figures[0]["train/loss"], "what is not trained is looked at all the same"
    assert alone[0]["critic/loss"] == figures[0]["critic/loss"]
    assert "train/grad_norm" in alone[1]
    assert alone[1]["train/approx_kl"] != figures[1]["train/approx_kl"]
    assert weights.keys() == {"policy", "critic"}


def test_a_run_from_its_spec_has_its_critic(ranks, tmp_path, models):
    tree = run_spec(tmp_path, ParallelSpec(data=2)).model_dump(mode="json")
    tree |= {"algorithm": {"name": "ppo", "gae_lambda": 0.9}, "model": {"path": str(models.policy)}}
    tree["training"]["critic"] = {"path": str(models.scored), "optimizer": {"lr": 3e-2}}
    spec = spec_from_tree(tree, "test")
    with ControlService(spec.run_dir, 2):
        (_, records), _ = ranks.run(2, run_loop, spec)
    first, second = records[1][1], records[2][1]
    assert (first["critic/lr"], first["train/lr"]) == (3e-2, 1e-2)
    assert second["critic/loss"] != first["critic/loss"]
    assert first["critic/explained_variance"] <= 1
    assert first["train/loss"] == pytest.approx(0, abs=1e-5), "whitened advantages, and the ratio is 1"
