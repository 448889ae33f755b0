"""What is saved is what is loaded: weights, optimizer, schedule, random numbers; in its layout bit for bit."""

import re
import resource

import checkpoint_ranks
import pytest
import tiny
import torch

from slimerl.spec.schema import ParallelSpec

DP2, TP2, PP2, ONE = ParallelSpec(data=2), ParallelSpec(tensor=2), ParallelSpec(pipeline=2), ParallelSpec()
EP2 = ParallelSpec(data=2, expert=2)
GRIDS = [DP2, TP2, PP2, ONE]


def named(parameter):
    return f"TP{parameter.tensor}PP{parameter.pipeline}DP{parameter.data}" if parameter in GRIDS else str(parameter)


def same(one, other):
    """Bit for bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize(("parallel", "dtype"), [(DP2, "fp32"), (TP2, "fp32"), (DP2, "bf16")], ids=named)
def test_c1_the_state_comes_back_bit_for_bit_and_goes_on_as_if_never_stopped(ranks, tmp_path, parallel, dtype):
    """Injected: the weights change while the checkpoint is written, and the process that goes on is another one."""
    tiny.write_model(tmp_path / "model", "qwen3")
    root = tmp_path / "checkpoints"
    saved = ranks.run(2, checkpoint_ranks.save_and_train_on, tmp_path / "model", root, parallel, dtype, 2)
    loaded = ranks.run(2, checkpoint_ranks.load_and_train_on, tmp_path / "model", root / "step-2", parallel, dtype, 2)
    assert saved[0][0]["draws"] != saved[1][0]["draws"], "each rank has random numbers of its own"
    for (at_save, rates, after), (at_load, rates_again, after_again) in zip(saved, loaded, strict=True):
        assert not same(at_save["weights"], after["weights"])
        for part in at_save:
            assert same(at_save[part], at_load[part]), part
        assert rates == rates_again
        assert rates[0] != rates[1], "the learning rate is not constant"
        assert same(after["weights"], after_again["weights"])
        assert same(after["moments"], after_again["moments"])


@pytest.mark.parametrize(
    ("family", "parallel", "dtype"),
    [("qwen3", DP2, "fp32"), ("qwen3", TP2, "bf16"), ("qwen3", DP2, "bf16"), ("qwen3_moe", EP2, "bf16")],
    ids=named,
)
def test_c1_the_parts_of_a_local_checkpoint_come_back_bit_for_bit(ranks, tmp_path, family, parallel, dtype):
    """Injected: as above."""
    tiny.write_model(tmp_path / "model", family)
    arguments = (tmp_path / "model", tmp_path / "disk", parallel, dtype)
    saved = ranks.run(2, checkpoint_ranks.save_locally_and_train_on, *arguments)
    loaded = ranks.run(2, checkpoint_ranks.load_locally_and_train_on, *arguments)
    assert saved[0][0]["draws"] != saved[1][0]["draws"]
    for (at_save, rates, after), (at_load, rates_again, after_again) in zip(saved, loaded, strict=True):
        assert not same(at_save["weights"], after["weights"])
        for part in at_save:
            assert same(at_save[part], at_load[part]), part
        assert rates == rates_again
        assert same(after["weights"], after_again["weights"])
        assert same(after["moments"], after_again["moments"])


@pytest.mark.parametrize("other", [DP2, PP2], ids=named)
def test_c3_a_checkpoint_of_one_layout_loads_into_another(ranks, tmp_path, other):
    """Injected: two tensor-parallel ranks wrote it; the ranks that read it cut the model otherwise."""
    tiny.write_model(tmp_path / "model", "qwen3", num_hidden_layers=4)
    root, model = tmp_path / "checkpoints", tmp_path / "model"
    at_save, _, after = ranks.run(2, checkpoint_ranks.save_and_train_on, model, root, TP2, "fp32", 2)[0]
    at_load, _, after_again = ranks.run(
        other.world_size, checkpoint_ranks.load_and_train_on, model, root / "step-2", other, "fp32", 2, False
    )[0]
    assert same(at_save["weights"], at_load["weights"])
    assert at_save["schedule"] == at_load["schedule"]
    for name, tensor in after["weights"].items():
        torch.testing.assert_close(after_again["weights"][name], tensor, atol=1e-6, rtol=0, msg=name)


@pytest.fixture(scope="module")
def errors(ranks, tmp_path_factory):
    path = tmp_path_factory.mktemp("parts")
    tiny.write_model(path / "model", "qwen3")
    return ranks.run(1, checkpoint_ranks.errors_of_loads, path / "model", path / "checkpoints")[0]


@pytest.mark.parametrize(
    ("left_out", "said"),
    [
        ("schedule", "lacks schedule"),
        ("optimizer", "lacks optimizer"),
        ("moments", "lacks .*exp_avg"),
        ("updates", r"counted \[None\] updates"),
        ("random", "lacks random"),
        ("model", "lacks .*layers"),
        ("an update", r"counted \[2\] updates, but 3"),
        ("the learning rate", "max_lr was 0.01, is 0.02.*--fresh"),
    ],
)
def test_c4_a_part_that_would_silently_start_afresh_is_an_error(errors, left_out, said):
    """Injected: a checkpoint without the part; one of fewer updates; one of another learning rate."""
    assert re.search(said, errors[left_out]), errors[left_out]
    assert errors["nothing"] == ""


def test_the_clipping_of_the_gradient_is_that_of_the_spec_and_not_of_the_checkpoint(ranks, tmp_path):
    tiny.write_model(tmp_path / "model", "qwen3")
    arguments = (tmp_path / "model", tmp_path / "c", 0.01)
    [norm] = ranks.run(1, checkpoint_ranks.clipped_norm, *arguments, deadline_s=120)
    assert norm == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("on_rank", [0, 1])
@pytest.mark.parametrize(
    ("which", "soft", "said"),
    [(resource.RLIMIT_FSIZE, 20_000, "too large|Errno|failed"), (resource.RLIMIT_NOFILE, None, "Too many open files")],
    ids=["disk-full", "no-file-handles"],
)
def test_c5_a_save_that_fails_on_any_rank_is_told_to_all_and_costs_nothing(ranks, tmp_path, which, soft, said, on_rank):
    """Injected: writes of one rank end after 20 kB, or it can open no further file."""
    tiny.write_model(tmp_path / "model", "qwen3")
    arguments = (tmp_path / "model", tmp_path / "c", DP2, which, soft, on_rank)
    for error, after_failure, at_end in ranks.run(2, checkpoint_ranks.save_with_limit, *arguments):
        assert re.search(f"rank {on_rank}: .*({said})", error), error
        assert "step-2" in after_failure
        assert "step-3" not in after_failure
        assert at_end == ["step-2", "step-4"], "the next one is whole, and nothing of the failed one takes disk space"
