"""Recomputation, overlapped reduction and memory hand-over change when and where, never what is computed."""

from pathlib import Path

import pytest
import tiny
import torch
from machine_steps import STEPS, Variant, prepare, train, weights_of

from slimerl.engine.protocol import MemoryTag
from slimerl.spec.schema import ParallelSpec

ALONE = ParallelSpec()


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe", "deepseek_v3"])
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    tiny.write_model(directory, request.param)
    return directory


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dense")
    tiny.write_model(directory, "qwen3")
    return directory


def assert_same_run(one, other, tolerance: float = 0.0) -> None:
    for figures, wanted in zip(one[0], other[0], strict=True):
        assert figures == pytest.approx(wanted, rel=tolerance, abs=tolerance)
    assert one[1].keys() == other[1].keys()
    for name, tensor in one[1].items():
        torch.testing.assert_close(tensor, other[1][name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputed_activations_give_the_same_gradient(ranks, model_path: Path, recompute: str) -> None:
    [plain] = ranks.run(1, train, model_path, ALONE, Variant())
    [again] = ranks.run(1, train, model_path, ALONE, Variant(recompute=recompute))
    assert_same_run(again, plain, 1e-6)


def recomputed_layers(model_path: Path, recompute: str) -> list[int]:
    """How often each layer's forward ran in one step of two micro-batches."""
    machine = prepare(model_path, ALONE, Variant(recompute=recompute))
    calls = [0] * machine.built.config.num_layers
    for index, layer in enumerate(machine.built.chunks[0].decoder.layers):
        layer.register_forward_pre_hook(lambda *_, at=index: calls.__setitem__(at, calls[at] + 1))
    machine.trainer.step(machine.packs(0))
    return calls


def test_full_recomputation_runs_each_layer_twice(ranks, dense: Path) -> None:
    assert ranks.run(1, recomputed_layers, dense, "none") == [[2, 2, 2]]
    assert ranks.run(1, recomputed_layers, dense, "full") == [[4, 4, 4]]


def test_gradients_reduced_during_the_backward_pass_are_the_same(ranks, dense: Path) -> None:
    apart = ranks.run(2, train, dense, ParallelSpec(data=2), Variant())
    overlapped = ranks.run(2, train, dense, ParallelSpec(data=2), Variant(overlap=True))
    for one, other in zip(overlapped, apart, strict=True):
        assert_same_run(one, other, 1e-6)


def reductions_under_way(model_path: Path, overlap: bool) -> list[bool]:
    """Of each bucket group: is its reduction under way when the backward pass of the second step has ended?"""
    machine = prepare(model_path, ParallelSpec(data=2), Variant(overlap=overlap))
    machine.trainer.step(machine.packs(0))  # in the first one Megatron learns when a bucket is complete
    [chunk] = machine.trainer.chunks
    finish, found = chunk.finish_grad_sync, []

    def observed(**arguments):
        found.extend(group.grad_reduce_handle is not None for group in chunk.bucket_groups)
        finish(**arguments)

    chunk.finish_grad_sync = observed
    machine.trainer.step(machine.packs(1))
    return found


def test_with_overlap_every_reduction_is_under_way_when_the_backward_pass_ends(ranks, dense: Path) -> None:
    assert ranks.run(2, reductions_under_way, dense, True) == [[True]] * 2
    assert ranks.run(2, reductions_under_way, dense, False) == [[False]] * 2


class RecordingEngines:
    """What the hand-over asks of a fleet, in order."""

    def __init__(self, fail: bool = False) -> None:
        self.asked: list[tuple[str, list[MemoryTag]]] = []
        self._fail = fail

    def release_memory(self, tags) -> None:
        self.asked.append(("release", list(tags)))

    def resume_memory(self, tags) -> None:
        if self._fail:
            raise RuntimeError("engine-0 has no memory left")
        self.asked.append(("resume", list(tags)))

    def serve(self) -> None:
        self.asked.append(("serve", []))


def turns(model_path: Path, dtype: str):
    """Train with a whole round of hand-overs after each step but the last."""
    from slimerl.training.hand_over import HandOver, TrainerParts, share_problems

    machine = prepare(model_path, ALONE, Variant(dtype))
    engines, figures, freed, held = RecordingEngines(), [], [], []
    # before the first step, when Adam has no moments yet
    hand_over = HandOver(TrainerParts(machine.trainer.chunks, machine.optimizer), engines, share_problems)
    for seed in range(STEPS):
        figures.append(machine.trainer.step(machine.packs(seed)))
        if seed == STEPS - 1:
            break
        weights = weights_of(machine)
        freed.append((hand_over.begin_sync(), hand_over.begin_generation()))
        held.append(sum(p.untyped_storage().nbytes() for p in machine.built.chunks[0].parameters()))
        hand_over.begin_training()
        for name, tensor in weights_of(machine).items():
            assert torch.equal(tensor, weights[name]), name
    return figures, weights_of(machine), engines.asked, freed, held


@pytest.mark.parametrize(("dtype", "bytes_of_optimizer"), [("fp32", 4 + 4 + 4), ("bf16", 4 + 4 + 4 + 4)])
def test_memory_comes_back_bit_for_bit_and_training_goes_on_as_if_nothing_had_been(
    ranks, dense: Path, dtype: str, bytes_of_optimizer: int
) -> None:
    [(figures, weights, asked, freed, held)] = ranks.run(1, turns, dense, dtype)
    [plain] = ranks.run(1, train, dense, ALONE, Variant(dtype))
    assert_same_run((figures, weights), plain)
    one_round = [
        ("resume", [MemoryTag.WEIGHTS]),
        ("resume", [MemoryTag.KV_CACHE]),
        ("serve", []),
        ("release", [MemoryTag.KV_CACHE, MemoryTag.WEIGHTS]),
    ]
    assert asked == one_round * (STEPS - 1)
    # moments, gradients and (bf16) master weights; then the weights themselves; buffers are padded a little
    elements = sum(tensor.numel() for tensor in weights.values())
    for optimizer_bytes, weight_bytes in freed:
        assert optimizer_bytes == pytest.approx(elements * bytes_of_optimizer, rel=0.02)
        assert weight_bytes == pytest.approx(elements * next(iter(weights.values())).itemsize, rel=0.02)
    assert held == [0] * (STEPS - 1)


def wrong_turns(model_path: Path) -> list[str]:
    from slimerl.training.hand_over import HandOver, OutOfOrder, TrainerBusy, TrainerParts, share_problems

    machine = prepare(model_path, ALONE, Variant())
    machine.trainer.step(machine.packs(0))
    before = weights_of(machine)
    memory = TrainerParts(machine.trainer.chunks, machine.optimizer)
    engines = RecordingEngines()
    hand_over = HandOver(memory, engines, share_problems)
    problems = []
    for turn in (hand_over.begin_generation, hand_over.begin_training):
        with pytest.raises(OutOfOrder) as refused:
            turn()
        problems.append(str(refused.value))
    group = machine.trainer.chunks[0].bucket_groups[0]
    group.grad_reduce_handle = object()
    with pytest.raises(TrainerBusy) as busy:
        hand_over.begin_sync()
    group.grad_reduce_handle = None
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(machine).items())
    assert not engines.asked
    hand_over.begin_sync()
    return [*problems, str(busy.value)]


def test_a_turn_out_of_order_or_amid_communication_is_refused_before_anything_moves(ranks, dense: Path) -> None:
    [(generation, training, busy)] = ranks.run(1, wrong_turns, dense)
    assert generation == "memory cannot pass from syncing to generating: the phase is training"
    assert training == "memory cannot pass from generating to training: the phase is training"
    assert busy.startswith("model chunk 0: gradients are being reduced")


def failing_engines(model_path: Path) -> tuple[str, str, bool, dict[str, float]]:
    import torch.distributed as dist

    from slimerl.training.hand_over import HandOver, HandOverFailed, OutOfOrder, TrainerParts, share_problems

    machine = prepare(model_path, ParallelSpec(data=2), Variant())
    machine.trainer.step(machine.packs(0))
    before = weights_of(machine)
    memory = TrainerParts(machine.trainer.chunks, machine.optimizer)
    engines = RecordingEngines(fail=True) if dist.get_rank() == 0 else None
    hand_over = HandOver(memory, engines, share_problems)
    with pytest.raises(HandOverFailed) as failed:
        hand_over.begin_sync()
    with pytest.raises(OutOfOrder) as refused:
        hand_over.begin_sync()
    same = all(torch.equal(tensor, before[name]) for name, tensor in weights_of(machine).items())
    return str(failed.value), str(refused.value), same, machine.trainer.step(machine.packs(1))


def test_every_rank_learns_that_the_engines_failed_and_has_its_state_whole(ranks, dense: Path) -> None:
    """Adam's moments among it, which the next step shows."""
    plain, _ = ranks.run(2, train, dense, ParallelSpec(data=2), Variant(), 2)[0]
    for failed, refused, same, figures in ranks.run(2, failing_engines, dense):
        assert "rank 0: the engines did not take part: RuntimeError: engine-0 has no memory left" in failed
        assert refused.endswith("the phase is failed")
        assert same
        assert figures == pytest.approx(plain[1], rel=1e-6)


def test_bytes_that_only_the_device_has_are_neither_freed_nor_brought_back_as_zeros() -> None:
    from slimerl.training.hand_over import NotCopied, StowedStorage

    tensor = torch.arange(6.0)
    kept = StowedStorage(tensor.untyped_storage(), keep=True)
    with pytest.raises(NotCopied, match="24 bytes cannot be freed: it was not copied to the host"):
        kept.free()
    kept.copy_out()
    kept.free()
    kept.restore()
    assert torch.equal(tensor, torch.arange(6.0))
    tensor += 1
    with pytest.raises(NotCopied):  # the host has what it was a round ago
        kept.free()
    with pytest.raises(NotCopied, match="was not stowed"):
        kept.restore()
    assert torch.equal(tensor, torch.arange(6.0) + 1)


def test_torchs_adam_runs_its_fused_kernel() -> None:
    from types import SimpleNamespace

    from slimerl.training.fused_adam import fuse_torch_adam

    torch.manual_seed(0)
    start = torch.randn(5, 3)
    results = []
    for fuse in (False, True):
        weight = torch.nn.Parameter(start.clone())
        adam = torch.optim.AdamW([weight], lr=0.1)
        if fuse:
            none_here = SimpleNamespace(optimizer=None)
            fuse_torch_adam(SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=adam), none_here]))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(3):
                weight.grad = start.sin()
                adam.step()
        assert ("aten::_fused_adamw_" in {event.key for event in profile.key_averages()}) is fuse
        results.append(weight.detach())
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-6)
