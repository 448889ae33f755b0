"""The keyed draw on its own: a pure function of its row, and a fair one."""

import torch

from slimerl.engine.inside.keyed_sampler import draw_keyed


def test_a_row_draws_the_same_whatever_else_is_in_the_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs = torch.randn(64, 1000, generator=generator).log_softmax(-1)
    seeds = torch.randint(-(2**62), 2**62, (64,), generator=generator)
    positions = torch.randint(0, 4096, (64,), generator=generator)
    together = draw_keyed(logprobs, seeds, positions)
    alone = [draw_keyed(logprobs[[row]], seeds[[row]], positions[[row]]) for row in range(64)]
    assert torch.equal(together, torch.cat(alone))
    order = torch.randperm(64, generator=generator)
    assert torch.equal(draw_keyed(logprobs[order], seeds[order], positions[order]), together[order])


def test_a_row_draws_the_same_token_in_whatever_order_the_columns_stand() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs = torch.randn(64, 1000, generator=generator).log_softmax(-1)
    keys = torch.arange(64)
    ranked, tokens = logprobs.sort(dim=-1, descending=True)
    drawn = tokens.gather(1, draw_keyed(ranked, keys, keys, tokens))
    assert torch.equal(drawn, draw_keyed(logprobs, keys, keys))


def test_draws_follow_the_distribution_over_seeds_and_over_positions() -> None:
    """Chi-square with 49 degrees of freedom: 94.6 is the 1 - 1e-4 quantile. Seeds and positions are consecutive."""
    count, columns = 200_000, 50
    weights = torch.arange(1, columns + 1, dtype=torch.float64)
    probabilities = weights / weights.sum()
    logprobs = probabilities.log().float().expand(count, columns)
    running, fixed = torch.arange(count), torch.full((count,), 7)
    for seeds, positions in ((running, fixed), (fixed, running), (running, running)):
        drawn = draw_keyed(logprobs, seeds, positions)[:, 0]
        observed = torch.bincount(drawn, minlength=columns).double()
        expected = probabilities * count
        assert float(((observed - expected) ** 2 / expected).sum()) < 94.6


def test_draws_follow_a_distribution_in_which_few_tokens_have_it_all() -> None:
    """Chi-square with 2 degrees of freedom: 18.4 is the 1 - 1e-4 quantile. The likely tokens win by noise of every
    size, where among many equal ones the least noise alone counts."""
    probabilities = torch.tensor([0.85, 0.13, 0.02], dtype=torch.float64)
    count = 200_000
    seeds = torch.randint(0, 2**31, (count,), generator=torch.Generator().manual_seed(0))
    drawn = draw_keyed(probabilities.log().float().expand(count, 3), seeds, torch.full((count,), 7))[:, 0]
    observed, expected = torch.bincount(drawn, minlength=3).double(), probabilities * count
    assert float(((observed - expected) ** 2 / expected).sum()) < 18.4


def test_neighbouring_keys_draw_independently() -> None:
    """Pairs of draws over a 5 x 5 table, 16 degrees of freedom: 44.4 is the 1 - 2e-4 quantile."""
    count, columns = 200_000, 5
    logprobs = torch.full((count, columns), 1 / columns).log()
    running = torch.arange(count)
    base = draw_keyed(logprobs, running, running * 0)[:, 0]
    for seeds, positions in (
        (running + 1, running * 0),
        (running, running * 0 + 1),
        (running + (1 << 32), running * 0),
    ):
        pairs = base * columns + draw_keyed(logprobs, seeds, positions)[:, 0]
        observed = torch.bincount(pairs, minlength=columns**2).double()
        expected = count / columns**2
        assert float(((observed - expected) ** 2 / expected).sum()) < 60.0


def test_what_has_no_probability_is_never_drawn() -> None:
    logprobs = torch.full((10_000, 8), -torch.inf)
    logprobs[:, 3] = -20.0
    assert set(draw_keyed(logprobs, torch.arange(10_000), torch.arange(10_000))[:, 0].tolist()) == {3}


def test_the_draw_does_not_depend_on_the_scale_of_the_weights() -> None:
    logprobs, seeds = torch.randn(100, 30), torch.arange(100)
    assert torch.equal(draw_keyed(logprobs, seeds, seeds), draw_keyed(logprobs.log_softmax(-1), seeds, seeds))
