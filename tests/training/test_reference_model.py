"""The reference model stays what it was while the policy is trained, and leaves no trace in the policy."""

from pathlib import Path

import pytest
import tiny
import torch

from slimerl.spec.load import SpecError, spec_from_tree
from slimerl.spec.schema import AlgorithmSpec, OptimizerSpec, ParallelSpec
from slimerl.training.reference import ReferenceModel, ReferenceOutOfTurn

STEPS = [tiny.random_step(seed) for seed in range(4)]
OPTIMIZER = OptimizerSpec(lr=1e-2)
CASES = {
    "one rank": ("qwen3", ParallelSpec(), "fp32"),
    "DP2 in bfloat16": ("qwen3", ParallelSpec(data=2), "bf16"),
    "PP2xVPP2, tied": ("llama", ParallelSpec(pipeline=2, virtual=2), "fp32"),
    "experts": ("deepseek_v3", ParallelSpec(), "fp32"),
}


def packs(built, step):
    return tiny.micro_batches(step, built, budget=60)


def reference_logprobs(trainer, batches):
    return [each.reference_logprobs for minibatch in trainer._with_logprobs(batches) for each in minibatch]


def logprobs_after_training(model: Path, parallel: ParallelSpec, dtype: str, refresh_steps: int = 0):
    """(of the reference in each step, of the policy in each step, of a model that was never trained), all for the same
    samples."""
    grid = tiny.start(parallel)
    untrained = tiny.trainer(tiny.build(model, parallel, dtype, grid), AlgorithmSpec(), OPTIMIZER, steps=len(STEPS))
    built = tiny.build(model, parallel, dtype, grid)
    algorithm = AlgorithmSpec(kl_coef=0.1, reference_refresh_steps=refresh_steps)
    trainer = tiny.trainer(built, algorithm, OPTIMIZER, steps=len(STEPS))
    fixed = packs(built, STEPS[0])
    of_reference, of_policy = [], []
    for step in STEPS[1:]:
        of_policy.append(trainer.logprobs(fixed[0]))
        of_reference.append(reference_logprobs(trainer, fixed))
        trainer.step(packs(built, step))
    return of_reference, of_policy, untrained.logprobs(fixed[0])


def same(one, other) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_it_answers_as_the_model_of_the_start_while_the_policy_moves(ranks, tmp_path, case):
    kind, parallel, dtype = CASES[case]
    tiny.write_model(tmp_path, kind, tied=kind == "llama", num_hidden_layers=4)
    *_, last = ranks.run(parallel.world_size, logprobs_after_training, tmp_path, parallel, dtype)
    of_reference, of_policy, untrained = last
    assert untrained, "the last stage knows log-probabilities"
    assert all(same(each, untrained) for each in of_reference)
    assert not any(same(each, untrained) for each in of_policy[1:])


def test_refreshed_it_becomes_the_policy_of_that_step(ranks, tmp_path):
    tiny.write_model(tmp_path, "qwen3")
    [(of_reference, of_policy, untrained)] = ranks.run(1, logprobs_after_training, tmp_path, ParallelSpec(), "fp32", 2)
    assert same(of_reference[0], untrained)
    assert same(of_reference[1], untrained), "not due after one step"
    assert same(of_reference[2], of_policy[2])


def bytes_of(built, trainer) -> list[torch.Tensor]:
    """Everything that a turn must give back: the buffer that weights lie in, master weights, moments."""
    from slimerl.training.fused_adam import inner_optimizers

    held = [
        buffer.param_data for chunk in trainer.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]
    for inner in inner_optimizers(trainer._optimizer):
        held += [parameter.data for group in inner.param_groups for parameter in group["params"]]
        held += [value for state in inner.state.values() for value in state.values()]
    return [tensor.clone() for tensor in held]


def turn_that_fails(model: Path, parallel: ParallelSpec, dtype: str):
    """(weights were others inside, everything is as before behind, the errors of what is refused inside)."""
    built = tiny.build(model, parallel, dtype)
    trainer = tiny.trainer(built, AlgorithmSpec(kl_coef=0.1), OPTIMIZER, steps=len(STEPS))
    trainer.step(packs(built, STEPS[0]))
    before, errors = bytes_of(built, trainer), []
    try:
        with trainer._reference.turn():
            inside = bytes_of(built, trainer)
            for refused in (lambda: trainer._reference.refresh(1), lambda: trainer._reference.turn().__enter__()):
                try:
                    refused()
                except ReferenceOutOfTurn as error:
                    errors.append(str(error))
            raise KeyError("of the pass")
    except KeyError:
        pass
    return not torch.equal(inside[0], before[0]), same(bytes_of(built, trainer), before), errors


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_turn_leaves_every_weight_and_the_optimizer_bit_for_bit_even_when_its_pass_fails(ranks, tmp_path, dtype):
    """Fault: the forward pass of the reference raises."""
    tiny.write_model(tmp_path, "qwen3")
    for moved, restored, errors in ranks.run(2, turn_that_fails, tmp_path, ParallelSpec(data=2), dtype):
        assert moved
        assert restored
        assert len(errors) == 2
        assert all("the weights in place are reference" in error for error in errors)


def test_after_half_an_exchange_nothing_is_done_any_more():
    """Fault: the copy back fails."""
    from megatron.core.models.gpt import GPTModel

    class Model(GPTModel):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.weight = torch.nn.Parameter(torch.ones(3))

    reference = ReferenceModel([model := Model()])
    with pytest.raises(RuntimeError), reference.turn():
        model.weight.data = torch.ones(4)
    with pytest.raises(ReferenceOutOfTurn, match="the weights in place are unknown"), reference.turn():
        pass


def test_a_checkpoint_between_two_refreshes_is_refused():
    tree = {
        "name": "r",
        "model": {"path": "m"},
        "data": {"train_path": "t.jsonl"},
        "training": {"steps": 20, "prompts_per_step": 2},
        "algorithm": {"name": "grpo", "kl_coef": 0.1, "reference_refresh_steps": 4},
        "checkpoint": {"every_steps": 8},
    }
    spec_from_tree(tree, "spec.yaml")
    tree["checkpoint"]["every_steps"] = 6
    with pytest.raises(SpecError, match=r"is no multiple of algorithm\.reference_refresh_steps = 4"):
        spec_from_tree(tree, "spec.yaml")


def test_a_refresh_without_a_reference_is_refused():
    with pytest.raises(ValueError, match=r"there is no reference model with algorithm\.kl_coef 0"):
        AlgorithmSpec(reference_refresh_steps=4)
