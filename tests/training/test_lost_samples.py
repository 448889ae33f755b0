"""Samples that one of several rollout processes has lost: the trainer asks for the batch again, all ranks together."""

from pathlib import Path

import msgspec
from trainer_control_service import ControlService

from slimerl.samples.messages import BatchManifest, Refusal, address_file, decode, encode
from slimerl.spec.load import spec_from_tree
from slimerl.spec.schema import RunSpec

RANKS = 2


class First(ControlService):
    """Hands out the batch with its last group at the second process, until it was asked for again."""

    def answer(self, path: str, body: bytes) -> tuple[int, bytes]:
        status, answer = super().answer(path, body)
        if path == "/batches/next":
            manifest = decode(answer, BatchManifest)
            shards = dict.fromkeys((each.group_id for each in manifest.samples), 0)
            if len(self.of(path)) == 1:
                shards[manifest.samples[-1].group_id] = 1
            answer = encode(msgspec.structs.replace(manifest, shards=shards))
        return status, answer


class Second(ControlService):
    """Has lost what it held."""

    def answer(self, path: str, body: bytes) -> tuple[int, bytes]:
        super().answer(path, body)
        return 404, encode(Refusal("not in the store as ready samples"))


def several_spec(path: Path) -> RunSpec:
    tree = {
        "name": "lost",
        "output_dir": str(path / "run"),
        "model": {"path": str(path / "model")},
        "data": {"train_path": "unused.jsonl"},
        "training": {"steps": 1, "prompts_per_step": 3, "parallel": {"data": RANKS}},
        "rollout": {"samples_per_prompt": 4, "processes": 2},
        "engine": {"replicas": 2},
    }
    return spec_from_tree(tree, "test")


def take_step(spec: RunSpec) -> int:
    """How many micro-batches this rank got of step 1."""
    import megatron_patches

    megatron_patches.apply()
    from slimerl.algorithms import algorithm_of
    from slimerl.resilience.deadline import Deadline
    from slimerl.training import parallel, rollout_source
    from slimerl.training.batches import PackForm
    from slimerl.training.batching import Batching
    from slimerl.training.capabilities import detect
    from slimerl.training.clock import SilentLog, StepClock
    from slimerl.training.packing import PackingRules
    from slimerl.training.several_rollouts import SeveralRollouts

    here = detect()
    grid = parallel.start(spec.training.parallel, here, here.device(0), 60, spec.seed)
    deadline = Deadline("the services", 10)
    client = SeveralRollouts.connect_all(spec.run_dir, deadline, 10, 2) if grid.is_leader else None
    batching = Batching(PackingRules(ranks=RANKS, micro_batch_tokens=60), PackForm())
    rollout_source.ASK_AGAIN_S = 0.01
    source = rollout_source.RolloutSource(spec, grid, algorithm_of(spec.algorithm), batching, client)
    taken = source.take(1, StepClock(SilentLog()))
    assert taken is not None
    return sum(len(minibatch) for minibatch in taken.minibatches)


def test_a2_a_batch_of_which_a_process_has_lost_some_is_asked_for_again_by_all_ranks(ranks, tmp_path):
    """Injected: the second process does not have what the manifest says it holds; then the batch is made up anew."""
    spec = several_spec(tmp_path)
    with First(spec.run_dir, 1) as first, Second(tmp_path / "second", 1) as second:
        (spec.run_dir / address_file(1)).write_bytes(msgspec.json.encode(second.address))
        packs = ranks.run(RANKS, take_step, spec)
    assert first.of("/batches/next") == [1, 1]
    assert second.of("/samples/fetch"), "it was asked"
    whole = [each for wanted in first.of("/samples/fetch")[-RANKS:] for each in wanted]
    assert sorted(whole) == first.ids([1]), "what was fetched before the loss was known is fetched again"
    assert all(packs)
