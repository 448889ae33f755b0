"""Keyed sampling without CUDA: the sampled token depends on (seed, position) and the distribution alone.

SGLang honours `sampling_seed` only in its deterministic mode, and that mode refuses the `torch_native` attention
backend. Two changes fill the gap: the seed is carried into every batch, and the draw is made by `draw_keyed`.
Invariant: the noise of a row is a pure function of its seed and position, whatever else is in the batch.
"""

import random
from types import ModuleType

import torch

from slimerl.engine.inside.import_hooks import after_import

# Multipliers of splitmix64 (Steele, Lea, Flood 2014) and of PCG's generator, as signed 64-bit integers: torch has
# no unsigned multiplication, and two's complement wraps to the same bits.
_SEED_STEP = -7046029254386353131
_POSITION_STEP = -4658895280553007687
_COLUMN_STEP = -7723592293110705685
_MIX = 6364136223846793005


def _hash32(seeds: torch.Tensor, positions: torch.Tensor, columns: int) -> torch.Tensor:
    """Uniform 32-bit integers [rows, columns] (as int64) from seeds [rows] and positions [rows]."""
    rows = _finish((_finish(seeds.to(torch.int64) * _SEED_STEP) ^ positions.to(torch.int64)) * _POSITION_STEP)
    h = rows[:, None] + torch.arange(1, columns + 1, dtype=torch.int64)[None] * _COLUMN_STEP
    # `_finish` shifts in the sign, which leaves the sign bit zero: the 32 bits below it
    return _finish(h.bitwise_xor_(h >> 32).mul_(_MIX)).bitwise_right_shift_(31).bitwise_and_(0xFFFFFFFF)


def _finish(h: torch.Tensor) -> torch.Tensor:
    """Fold the well mixed high bits of a product into the low ones."""
    return h ^ (h >> 29)


def draw_keyed(
    logprobs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor | None = None
) -> torch.Tensor:
    """Sample one index a row.

    The exponential race: with E ~ Exp(1), argmin(E / p) has distribution p (the Gumbel-max trick without its second
    logarithm). Scale-free: rows need not be normalised, -inf is never drawn.

    Args:
        logprobs: [rows, columns], natural logarithms of weights.
        seeds, positions: [rows].
        tokens: [rows, columns], the token of each column, where columns are not in the order of tokens: the noise
            belongs to the token.

    Returns:
        [rows, 1], int64.
    """
    hashes = _hash32(seeds, positions, logprobs.shape[1])
    if tokens is not None:
        hashes = hashes.gather(1, tokens)
    uniform = hashes.to(torch.float32).add_(0.5).mul_(2.0**-32)
    # The winners are the small E: log1p keeps their relative precision where log(1 - u) would lose it.
    noise = uniform.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_().log_()
    return (logprobs.to(torch.float32) - noise).argmax(dim=1, keepdim=True)


def install_keyed_sampler() -> None:
    """Hook SGLang's sampler and batch information; see the module docstring."""
    after_import("sglang.srt.layers.sampler", _draw_by_key)
    after_import("sglang.srt.sampling.sampling_batch_info", _carry_seeds)


def _draw_by_key(sampler: ModuleType) -> None:
    stock = sampler.top_k_top_p_min_p_sampling_from_probs_torch
    ranked: torch.Tensor | None = None

    def draw(logprobs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return draw_keyed(logprobs, seeds, positions, ranked)

    def filtered_draw(
        probs: torch.Tensor,
        top_ks: torch.Tensor,
        top_ps: torch.Tensor,
        min_ps: torch.Tensor,
        need_min_p_sampling: bool,
        *args: object,
        **options: object,
    ) -> object:
        """The stock function asserts that min-p comes without seeds. What min-p removes ranks last, so removing it
        first leaves top-k and top-p as they were; the race needs no renormalisation.

        It draws among ranks, and every row of a batch goes through it as soon as one asks for a filter (a greedy one
        does): noise of ranks would make a draw depend on its neighbours."""
        nonlocal ranked
        if need_min_p_sampling:
            floor = probs.max(dim=-1, keepdim=True).values * min_ps.view(-1, 1)
            probs = probs.masked_fill(probs < floor, 0.0)
        # the very sort that the stock function makes
        ranked = probs.sort(dim=-1, descending=True).indices
        try:
            return stock(probs, top_ks, top_ps, min_ps, False, *args, **options)
        finally:
            ranked = None

    sampler.multinomial_with_seed = draw  # type: ignore[attr-defined]
    sampler.top_k_top_p_min_p_sampling_from_probs_torch = filtered_draw  # type: ignore[attr-defined]


def _carry_seeds(batch_info: ModuleType) -> None:
    """Every batch carries seeds, since SGLang cannot merge a batch that has them with one that has none."""
    stock = batch_info.SamplingBatchInfo.from_schedule_batch.__func__
    fresh: random.Random | None = None

    def from_schedule_batch(cls: type, batch: object, *args: object, **options: object) -> object:
        nonlocal fresh
        # A request without a seed draws a fresh one. Tensor-parallel ranks must draw the same: SGLang gives them
        # one torch seed and the same batches in the same order.
        fresh = fresh or random.Random(torch.initial_seed())
        info = stock(cls, batch, *args, **options)
        seeds = [request.sampling_params.sampling_seed for request in batch.reqs]  # type: ignore[attr-defined]
        filled = [fresh.getrandbits(62) if seed is None else seed for seed in seeds]
        info.sampling_seed = torch.tensor(filled, dtype=torch.int64)
        return info

    batch_info.SamplingBatchInfo.from_schedule_batch = classmethod(from_schedule_batch)
