"""The loop over real HTTP and real ranks: each step's samples are fetched once, trained, acknowledged and synced."""

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from trainer_control_service import ControlService

from slimerl.spec.load import spec_from_tree
from slimerl.spec.schema import ParallelSpec, RunSpec

GRIDS = [ParallelSpec(), ParallelSpec(data=2), ParallelSpec(tensor=2), ParallelSpec(tensor=2, data=2)]
STEPS = 2


def run_spec(path: Path, parallel: ParallelSpec, **training) -> RunSpec:
    tree = {
        "name": "loop",
        "output_dir": str(path / "run"),
        "model": {"path": str(path / "model")},
        "data": {"train_path": "unused.jsonl", "eval_path": "unused.jsonl"},
        "training": {
            "steps": STEPS,
            "prompts_per_step": 3,
            "micro_batch_tokens": 60,
            "parallel": parallel.model_dump(),
            "optimizer": {"lr": 1e-2},
        }
        | training,
        "rollout": {"samples_per_prompt": 4},
    }
    return spec_from_tree(tree, "test")


class RecordingSyncer:
    def __init__(self, events):
        self.events = events

    def sync(self, version):
        self.events.append(("synced", version))
        return {"send": 0.5}


class RecordingLog:
    def __init__(self, events):
        self.events = events
        self.records = []

    def metrics(self, step, values):
        self.records.append((step, dict(values)))

    def event(self, step, kind, name, text):
        self.events.append((kind, name))

    @contextmanager
    def phase(self, step, name):
        self.events.append((name, step))
        yield


class FailingCheckpoints:
    """Of a run with `checkpoint.on_failure: stop`, where one fails in `method` at `step`."""

    stopping = False

    def __init__(self, method, step):
        self._fails, self._step = (method, step), 0

    def trained(self, step):
        self._step = step
        self._at("trained")

    def after_step(self, step):
        self._at("after_step")

    def close(self):
        self._at("close")

    def take_figures(self):
        return {}

    def _at(self, method):
        from slimerl.training.checkpoint.write import SaveFailed

        if (method, self._step) == self._fails:
            raise SaveFailed("no space")


def run_loop(spec: RunSpec, checkpoints=None, begun=()):
    import megatron_patches

    megatron_patches.apply()
    from slimerl.resilience.deadline import Deadline
    from slimerl.training import assembly, parallel
    from slimerl.training.capabilities import detect
    from slimerl.training.loop import Run, train
    from slimerl.training.rollout_client import RolloutClient
    from slimerl.training.rollout_source import RolloutSource

    here = detect()
    grid = parallel.start(spec.training.parallel, here, here.device(0), 60, spec.seed)
    policy = assembly.build_policy(spec, grid, here)
    client = RolloutClient.connect(spec.run_dir, Deadline("the service", 10), 10) if grid.is_leader else None
    events = []
    log = RecordingLog(events)
    source = RolloutSource(spec, grid, policy.algorithm, policy.batching, client)
    run = Run(spec, policy.trainer, source, RecordingSyncer(events), log, lambda: policy.export(spec.export_dir))
    run = replace(run, **dict(begun))
    train(run if checkpoints is None else replace(run, checkpoints=checkpoints))
    return events, log.records


@pytest.mark.parametrize("parallel", GRIDS, ids=lambda p: f"TP{p.tensor}xDP{p.data}")
def test_a_run_fetches_each_sample_once_and_syncs_after_each_step(ranks, tmp_path, parallel):
    tiny.write_model(tmp_path / "model", "qwen3")
    spec = run_spec(tmp_path, parallel)
    with ControlService(spec.run_dir, STEPS) as service:
        results = ranks.run(parallel.world_size, run_loop, spec)
    assert service.of("/batches/next") == [1, 2], "one rank asks, once a step"
    assert sorted(each for wanted in service.of("/samples/fetch") for each in wanted) == service.ids([1, 2])
    assert len(service.of("/samples/fetch")) == STEPS * parallel.data, "one call of each replica's leader a step"
    assert [(each.batch_id, each.version) for each in service.of("/batches/trained")] == [("step-1", 1), ("step-2", 2)]
    assert len(service.of("/evaluate")) == 2, "before the first and after the last step"
    for events, _ in results:
        assert [each for each in events if each[0] in ("train", "synced")] == [
            ("synced", 0),
            ("train", 1),
            ("synced", 1),
            ("train", 2),
            ("synced", 2),
        ]
    assert (spec.export_dir / "model.safetensors").exists()
    records = results[0][1]
    assert [step for step, _ in records] == [0, 1, 2]
    assert records[0][1]["eval/accuracy"] == 0.25
    assert {"train/loss", "train/grad_norm", "agreement/mean_abs_logprob_delta", "time/step", "time/train"} <= set(
        records[1][1]
    )
    assert records[1][1]["sync/send_s"] == 0.5
    assert "eval/accuracy" in records[2][1]
    assert "eval/accuracy" not in records[1][1]


def test_an_evaluation_in_the_background_ends_before_its_weights_are_replaced(ranks, tmp_path):
    tiny.write_model(tmp_path / "model", "qwen3")
    spec = run_spec(tmp_path, ParallelSpec())
    evaluation = spec.evaluation.model_copy(update={"background": True, "every_steps": 1})
    spec = spec.model_copy(update={"evaluation": evaluation})
    with ControlService(spec.run_dir, STEPS) as service:
        [(events, records)] = ranks.run(1, run_loop, spec)
    order = [(path, message) for path, message in service.requests if "evaluate" in path or path == "/batches/next"]
    assert order == [
        ("/evaluate", 0),
        ("/batches/next", 1),
        ("/evaluate/begin", 1),
        ("/batches/next", 2),
        ("/evaluate", 1),
        ("/evaluate", 2),
    ]
    kinds = [each for each in events if each[0] in ("synced", "evaluate", "train")]
    assert kinds.index(("train", 2)) < kinds.index(("evaluate", 1)) < kinds.index(("synced", 2))
    assert [step for step, _ in records] == [0, 1, 1, 2], "its figures are a record of their own, of its step"
    assert records[2][1] == pytest.approx({**records[2][1], "eval/accuracy": 0.25, "eval/set/pass_at_1": 0.5})
    assert not any(name.startswith("eval/") for name in records[1][1])


@pytest.mark.parametrize("evaluated", [False, True])
def test_a_run_that_goes_on_makes_an_evaluation_that_is_not_recorded_and_no_other_again(ranks, tmp_path, evaluated):
    tiny.write_model(tmp_path / "model", "qwen3")
    spec = run_spec(tmp_path, ParallelSpec())
    evaluation = spec.evaluation.model_copy(update={"background": True, "every_steps": 1})
    spec = spec.model_copy(update={"evaluation": evaluation})
    with ControlService(spec.run_dir, STEPS) as service:
        [(_, records)] = ranks.run(1, run_loop, spec, None, {"done_steps": 1, "evaluated": evaluated})
    assert service.of("/evaluate") == ([2] if evaluated else [1, 2])
    assert [step for step, _ in records] == ([2] if evaluated else [1, 2])


def with_engines_that_evaluate(spec: RunSpec, every_steps: int) -> RunSpec:
    update = {"background": True, "every_steps": every_steps, "engines": 1}
    return spec.model_copy(update={"evaluation": spec.evaluation.model_copy(update=update)})


@pytest.mark.parametrize(
    ("polls", "recorded", "ends"),
    [
        (2, [0, 1, 0, 2, 3, 4, 3, 5, 6], {0: 2, 3: 5}),  # each has ended when it is asked for the second time
        (99, [0, 1, 2, 0, 3, 4, 5, 3, 6], {0: 3, 3: 6}),  # none ends by itself
    ],
    ids=["short", "long"],
)
def test_an_evaluation_on_engines_of_its_own_waits_for_nobody_but_the_next_one(ranks, tmp_path, polls, recorded, ends):
    tiny.write_model(tmp_path / "model", "qwen3")
    spec = with_engines_that_evaluate(run_spec(tmp_path, ParallelSpec(data=2), steps=6), 3)
    with ControlService(spec.run_dir, 6, polls) as service:
        (events, records), _ = ranks.run(2, run_loop, spec)
    assert [step for step, _ in records] == recorded
    assert [step for step, values in records if "eval/accuracy" in values] == [0, 3, 6]
    assert service.of("/evaluate") == [0, 3, 6]
    kinds = [each for each in events if each[0] in ("synced", "evaluate")]
    for evaluated, before in ends.items():
        assert kinds.index(("evaluate", evaluated)) + 1 == kinds.index(("synced", before))
    assert kinds[-1] == ("evaluate", 6)


class StoppingCheckpoints(FailingCheckpoints):
    """Of a run that is asked to end after its first step."""

    stopping = True

    def __init__(self):
        super().__init__("", 0)

    def require(self, step):
        self._at("require")


@pytest.mark.parametrize(("every_steps", "evaluated"), [(1, [0]), (3, [0])])
def test_a_run_that_is_asked_to_end_waits_for_evaluations_that_no_other_makes(ranks, tmp_path, every_steps, evaluated):
    """That of its own last step the run that goes on makes; of every_steps = 3 there is an earlier one."""
    tiny.write_model(tmp_path / "model", "qwen3")
    spec = with_engines_that_evaluate(run_spec(tmp_path, ParallelSpec(), steps=6), every_steps)
    with ControlService(spec.run_dir, 6, evaluation_polls=99) as service:
        [(_, records)] = ranks.run(1, run_loop, spec, StoppingCheckpoints())
    assert service.of("/evaluate") == evaluated
    assert (1 in service.of("/evaluate/begin")) == (every_steps == 1)
    assert max(step for step, _ in records) == 1


def test_all_grids_report_the_same_figures(ranks, tmp_path):
    tiny.write_model(tmp_path / "model", "qwen3")
    found = {}
    for parallel in (ParallelSpec(), ParallelSpec(tensor=2, data=2)):
        spec = run_spec(tmp_path, parallel, minibatches_per_step=2)
        with ControlService(spec.run_dir, STEPS):
            found[parallel.world_size] = ranks.run(parallel.world_size, run_loop, spec)[0][1]
    for (_, one), (_, four) in zip(found[1][1:], found[4][1:], strict=True):
        for name in ("train/loss", "train/grad_norm", "train/entropy", "agreement/max_abs_logprob_delta"):
            assert four[name] == pytest.approx(one[name], rel=1e-4), name


def test_the_service_running_out_of_batches_ends_every_rank_with_its_message(ranks, tmp_path):
    from rank_pool import RankFailed

    tiny.write_model(tmp_path / "model", "qwen3")
    spec = run_spec(tmp_path, ParallelSpec())
    with ControlService(spec.run_dir, 1) as service, pytest.raises(RankFailed, match="503: there is no step 2"):
        ranks.run(1, run_loop, spec)
    assert service.of("/batches/next") == [1, 2]


@pytest.mark.parametrize(
    ("method", "step", "exported"),
    [("trained", 2, True), ("after_step", 2, True), ("close", 2, True), ("after_step", 1, False)],
)
def test_c5_a_checkpoint_that_fails_at_the_end_ends_the_run_but_does_not_cost_the_model(
    ranks, tmp_path, method, step, exported
):
    """Injected: by checkpoint.on_failure a failed checkpoint stops the run, at the last step or before."""
    from rank_pool import RankFailed

    tiny.write_model(tmp_path / "model", "qwen3")
    spec = run_spec(tmp_path, ParallelSpec())
    with ControlService(spec.run_dir, STEPS), pytest.raises(RankFailed, match="no space"):
        ranks.run(1, run_loop, spec, FailingCheckpoints(method, step))
    assert (spec.export_dir / "model.safetensors").exists() == exported
