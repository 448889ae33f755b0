"""What the rules of the tiers do to the distribution of the tokens: exact laws and a million draws each."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from slimerl.engine.inside.keyed_sampler import draw_keyed
from slimerl.rollout.speculation import coupled, rules

DRAWS = 1_000_000
TOKENS, LENGTH = 4, 4
rng = np.random.default_rng(7)
POLICY = rng.dirichlet(np.full(TOKENS, 0.8), size=TOKENS)
"""Next token given the last one; 0 is the last one of the prompt."""
OLD = 0.5 * POLICY + 0.5 * rng.dirichlet(np.full(TOKENS, 0.8), size=TOKENS)
"""Of the policy that the drafts come from."""


def drawn(law: np.ndarray, before: np.ndarray, noise: np.random.Generator) -> np.ndarray:
    """A token for each row of `law[before]`, or of `law` where it has a row for each already."""
    rows = law[before].cumsum(axis=1)
    return (noise.random((len(before), 1)) * rows[:, -1:] >= rows).sum(axis=1)


def sequences(law: np.ndarray, count: int, noise: np.random.Generator) -> np.ndarray:
    found = np.zeros((count, LENGTH + 1), dtype=np.int64)
    for place in range(1, LENGTH + 1):
        found[:, place] = drawn(law, found[:, place - 1], noise)
    return found[:, 1:]


def log_law(law: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    before = np.concatenate([np.zeros((len(tokens), 1), dtype=np.int64), tokens[:, :-1]], axis=1)
    return np.log(law[before, tokens])


def goes_on(drafts: np.ndarray, kept: np.ndarray, noise: np.random.Generator, residual: bool) -> np.ndarray:
    """Behind what is kept: at the rejected place from the policy, with `residual` without the rejected token; then from
    the policy."""
    found = np.concatenate([np.zeros((len(drafts), 1), dtype=np.int64), drafts], axis=1)
    for place in range(LENGTH):
        law = POLICY[found[:, place]].copy()
        if residual:
            here = np.flatnonzero(kept == place)
            law[here, drafts[here, place]] = 0
        new = drawn(law, np.arange(len(drafts)), noise)
        found[:, place + 1] = np.where(place < kept, drafts[:, place], new)
    return found[:, 1:]


def chi2_p(tokens: np.ndarray) -> float:
    """Of whole sequences against the policy's law."""
    places = TOKENS ** np.arange(LENGTH)
    counts = np.bincount(tokens @ places, minlength=TOKENS**LENGTH)
    every = np.stack(np.unravel_index(np.arange(TOKENS**LENGTH), (TOKENS,) * LENGTH, order="F"), axis=1)
    expected = np.exp(log_law(POLICY, every).sum(axis=1)) * len(tokens)
    assert expected.min() > 0
    rare = expected < 5
    pairs = [(counts[~rare], expected[~rare])]
    pairs.append((counts[rare].sum(keepdims=True), expected[rare].sum(keepdims=True))) if rare.any() else None
    observed, wanted = (np.concatenate([pair[side] for pair in pairs]) for side in (0, 1))
    return float(stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue)


@pytest.mark.parametrize("residual", [True, False])
def test_tier_exact_has_the_law_of_direct_sampling_and_without_the_residual_it_has_not(residual: bool):
    """Injected: the rejected place drawn from the policy instead of the residual. Drafts are another policy's."""
    noise = np.random.default_rng(11)
    drafts = sequences(OLD, DRAWS, noise)
    acceptance = rules.exact_acceptance(log_law(POLICY, drafts))
    kept = rules.kept(acceptance, noise.random(drafts.shape))
    p = chi2_p(goes_on(drafts, kept, noise, residual))
    assert (p > 0.001) == residual, p
    assert np.bincount(kept, minlength=LENGTH + 1).min() > 100, "drafts are kept up to every place"


def test_direct_sampling_itself_passes_the_test_that_the_tiers_are_held_to():
    assert chi2_p(sequences(POLICY, DRAWS, np.random.default_rng(3))) > 0.001


def test_a_drafts_fate_says_nothing_of_the_draft_where_one_draft_serves_all():
    """The same draft for every sample, as from one sibling, and the most likely one."""
    noise = np.random.default_rng(5)
    draft = [int(POLICY[0].argmax())]
    while len(draft) < LENGTH:
        draft.append(int(POLICY[draft[-1]].argmax()))
    drafts = np.tile(draft, (DRAWS, 1))
    kept = rules.kept(rules.exact_acceptance(log_law(POLICY, drafts)), noise.random(drafts.shape))
    assert chi2_p(goes_on(drafts, kept, noise, residual=True)) > 0.001


@given(st.integers(0, 2**32 - 1))
def test_the_token_behind_a_rejection_has_the_policys_log_probability(seed: int):
    law = np.random.default_rng(seed).dirichlet(np.ones(5))
    rejected, token = 0, 3
    among_others = math.log(law[token] / (1 - law[rejected]))
    assert rules.residual_logprob(among_others, math.log(law[rejected])) == pytest.approx(math.log(law[token]))


def test_nothing_is_kept_behind_the_first_rejection_and_certain_tokens_always_are():
    acceptance = np.array([[1.0, 0.5, 1.0], [1.0, 1.0, 1.0], [0.0, 1.0, 1.0]])
    assert rules.kept(acceptance, np.full((3, 3), 0.5)).tolist() == [1, 3, 0]
    assert int(rules.kept(np.zeros(0), np.zeros(0))) == 0


def test_tier_lenient_is_biased_as_its_law_says_even_where_lenience_is_one():
    """One place, a million drafts; the bias stands in total variation."""
    noise = np.random.default_rng(2)
    new, old = POLICY[1], OLD[2]
    for lenience in (1.0, math.exp(0.5)):
        drafts = noise.choice(TOKENS, p=old, size=DRAWS)
        acceptance = rules.lenient_acceptance(np.log(new)[drafts], np.log(old)[drafts], lenience)
        kept = rules.kept(acceptance[:, None], noise.random((DRAWS, 1)))
        tokens = np.where(kept == 1, drafts, noise.choice(TOKENS, p=new, size=DRAWS))
        counts = np.bincount(tokens, minlength=TOKENS)
        law = rules.lenient_law(new, old, lenience)
        bias = rules.total_variation(law, new)
        assert stats.chisquare(counts, law * DRAWS).pvalue > 0.001
        assert stats.chisquare(counts, new * DRAWS).pvalue < 1e-9, "the rule alone is biased"
        assert bias > 0.02
        estimate = rules.lenient_bias(np.log(new)[drafts], np.log(old)[drafts], lenience)
        assert estimate == pytest.approx(bias, abs=0.003)
        apart = rules.total_variation(new, old)
        print(f"lenient, lenience {lenience:.2f}: bias {bias:.4f}, policies {apart:.4f} apart (total variation)")


def test_tier_lenient_is_exact_where_the_policy_has_not_moved_and_reports_no_bias():
    assert rules.lenient_law(POLICY, POLICY, 1.0) == pytest.approx(POLICY)
    same = np.log(POLICY[1])
    assert rules.lenient_bias(same, same, 1.0) == 0
    assert rules.lenient_bias(np.zeros(0), np.zeros(0), 1.0) == 0


def test_tier_coupled_draws_from_the_policy_and_keeps_at_least_what_is_promised():
    """A policy that knows nothing of the noise; at least (1 - TV) / (1 + TV) of the old tokens come again."""
    count = 200_000
    gumbel = coupled.noise(np.arange(count), np.full(count, 17), TOKENS)
    for new, old in ((POLICY[0], OLD[0]), (POLICY[1], OLD[1]), (POLICY[2], OLD[3])):
        before, after = (coupled.draw(np.log(law)[None], gumbel) for law in (old, new))
        assert stats.chisquare(np.bincount(after, minlength=TOKENS), new * count).pvalue > 0.001
        variation = rules.total_variation(new, old)
        assert (before == after).mean() >= (1 - variation) / (1 + variation) - 0.005


def test_tier_coupled_is_biased_once_the_policy_was_trained_on_the_noise():
    """Each sample's policy has become likelier to say what it said; the same noise says it again for certain."""
    count = 100_000
    gumbel = coupled.noise(np.arange(count), np.full(count, 3), TOKENS)
    before = coupled.draw(np.log(OLD[1])[None], gumbel)
    logits = np.tile(np.log(OLD[1]), (count, 1))
    logits[np.arange(count), before] += 0.5
    new = np.exp(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))
    said_again = (coupled.draw(np.log(new), gumbel) == before).mean()
    bias = said_again - new[np.arange(count), before].mean()
    assert said_again == 1.0
    assert bias > 0.1
    print(f"coupled: bias {bias:.4f} (probability of the old token beyond the policy's)")


def test_the_noise_is_that_of_the_engine():
    seeds, positions = rng.integers(0, 2**31, 300), rng.integers(0, 4000, 300)
    logprobs = np.log(rng.dirichlet(np.full(500, 0.05), size=300).clip(1e-30)).astype(np.float32)
    engine = draw_keyed(torch.from_numpy(logprobs), torch.from_numpy(seeds), torch.from_numpy(positions))
    own = coupled.draw(logprobs, coupled.noise(seeds, positions, 500))
    assert own.tolist() == engine[:, 0].tolist()


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.floats(0.02, 3))
def test_a_winner_is_certain_only_where_no_unlisted_token_could_win(seed: int, listed: int, spread: float):
    source = np.random.default_rng(seed)
    logprobs = np.log(source.dirichlet(np.full(40, spread)).clip(1e-20))
    gumbel = source.gumbel(size=40)
    ids = np.argsort(-logprobs)[:listed]
    winner = coupled.certain_winner(ids, logprobs[ids], gumbel)
    assert winner in (-1, int((logprobs + gumbel).argmax()))
    assert listed < 40 or winner >= 0


def test_acceptance_noise_is_uniform_the_same_again_and_another_for_each_sample_and_place():
    noise = np.concatenate([rules.keyed_uniforms(5, f"0/p/{number}", 30, 50) for number in range(400)])
    assert stats.kstest(noise, "uniform").pvalue > 0.001
    assert len(set(noise.tolist())) == len(noise)
    whole, part = rules.keyed_uniforms(5, "0/p/1", 30, 20), rules.keyed_uniforms(5, "0/p/1", 40, 3)
    assert part.tolist() == whole[10:13].tolist()
    assert stats.pearsonr(noise[:-1], noise[1:]).pvalue > 0.001
