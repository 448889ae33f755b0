"""What is out of bounds is said, recorded and counted; what is within them is not."""

import io
import json

import pytest
import torch
from rich.console import Console

from slimerl.algorithms import TokenBatch, algorithm_of
from slimerl.spec.schema import AlgorithmSpec
from slimerl.telemetry import RunLog, read_records
from slimerl.telemetry.progress import ProgressView
from slimerl.telemetry.report import final_table
from slimerl.training.alarms import ALARMS, REMEMBERED_STEPS, REMINDER_STEPS, Alarms

GOOD = {
    "agreement/mean_abs_logprob_delta": 1e-6,
    "agreement/max_abs_logprob_delta": 1e-5,
    "agreement/mean_ratio": 1.000001,
    "rollout/staleness_max": 0.0,
    "rollout/uniform_groups_fraction": 0.4,
    "rollout/event_loop_lag_s": 0.05,
    "train/clip_fraction": 0.1,
    "train/correction_truncated": 0.01,
    "train/correction_masked": 0.01,
    "train/entropy": 1.0,
    "train/grad_norm": 0.2,
    "memory/trainer_rss_gib": 1.0,
    "process/rollout_fds": 300.0,
}


class Kept:
    """The log, kept in memory."""

    def __init__(self):
        self.events = []

    def metrics(self, step, values): ...

    def phase(self, step, name): ...

    def event(self, step, kind, name, text):
        self.events.append((step, kind, name, text))


def after(steps, dtype="fp32"):
    """Alarms that have seen so many good steps, and their log, empty."""
    log = Kept()
    alarms = Alarms(dtype, log)
    for step in range(1, steps + 1):
        assert alarms.check(step, GOOD) == {}
    log.events.clear()
    return alarms, log


def test_a_good_run_of_any_length_raises_no_alarm():
    after(REMEMBERED_STEPS + 50)


def test_an_alarm_that_lasts_is_said_again_only_after_a_while_and_recorded_in_every_step():
    alarms, log = after(10)
    bad = GOOD | {"train/clip_fraction": 0.6}
    recorded = [alarms.check(step, bad) for step in range(11, 11 + REMINDER_STEPS + 1)]
    assert all("alarm/clipped" in figures for figures in recorded)
    assert [step for step, *_ in log.events] == [11, 11 + REMINDER_STEPS]


def test_an_alarm_that_comes_back_is_said_at_once():
    alarms, log = after(10)
    for step in range(11, 17):
        alarms.check(step, GOOD | {"train/clip_fraction": 0.6 if step % 2 else 0.1})
    assert [step for step, *_ in log.events] == [11, 13, 15]


@pytest.mark.parametrize(
    ("figure", "value", "name"),
    [
        ("agreement/mean_abs_logprob_delta", 2e-3, "agreement_mean"),
        ("agreement/max_abs_logprob_delta", 0.2, "agreement_max"),
        ("agreement/mean_ratio", 0.97, "agreement_ratio"),
        ("agreement/mean_ratio", 1.03, "agreement_ratio"),
        ("train/clip_fraction", 0.6, "clipped"),
        ("train/correction_truncated", 0.2, "correction_truncated"),
        ("train/correction_masked", 0.2, "correction_masked"),
        ("train/routing_unrecorded", 0.2, "routing_unrecorded"),
        ("train/grad_norm", 5.0, "gradient_spike"),
        ("train/entropy", 0.05, "entropy_collapse"),
        ("rollout/uniform_groups_fraction", 1.0, "no_gradient"),
        ("rollout/event_loop_lag_s", 3.0, "event_loop_lag"),
        ("checkpoint/failed", 1.0, "checkpoint_failed"),
        ("checkpoint/local_failed", 1.0, "local_checkpoint_failed"),
    ],
)
def test_each_figure_out_of_bounds_is_an_event_and_a_metric(figure, value, name):
    alarms, log = after(10)
    assert alarms.check(11, GOOD | {figure: value}) == {f"alarm/{name}": value}
    ((step, kind, found, text),) = log.events
    assert (step, kind, found) == (11, "alarm", name)
    assert figure in text
    assert alarms.check(12, GOOD) == {}, "a step that is good again is quiet again"


def test_groups_without_a_difference_are_no_alarm_where_they_are_not_compared():
    """Injected: distillation with one sample to a prompt."""
    uniform = GOOD | {"rollout/uniform_groups_fraction": 1.0}
    assert Alarms("fp32", Kept(), compares_groups=False).check(1, uniform) == {}
    assert Alarms("fp32", Kept(), compares_groups=True).check(1, uniform) == {"alarm/no_gradient": 1.0}


def test_every_alarm_has_its_reason_and_remedy_and_a_name_of_its_own():
    assert len({alarm.name for alarm in ALARMS}) == len(ALARMS)
    assert all(alarm.reason and alarm.remedy for alarm in ALARMS)


@pytest.mark.parametrize(
    ("figure", "growth", "name"),
    [("memory/trainer_rss_gib", 0.002, "memory_growth"), ("process/rollout_fds", 0.5, "descriptor_growth")],
)
def test_what_grows_steadily_is_found_and_what_jumps_once_is_not(figure, growth, name):
    log = Kept()
    alarms = Alarms("fp32", log)
    found = [alarms.check(step, GOOD | {figure: GOOD[figure] + growth * step}) for step in range(100)]
    assert f"alarm/{name}" in found[-1]
    assert not any(found[:20]), "a warm-up is no leak"

    quiet = Alarms("fp32", Kept())
    jumped = [quiet.check(step, GOOD | {figure: GOOD[figure] * (2 if step > 10 else 1)}) for step in range(100)]
    assert not any(jumped)


def test_m2_the_first_batch_is_compared_with_the_engine_before_any_training():
    alarms = Alarms("fp32", log := Kept())
    alarms.check(1, GOOD)
    alarms.check(2, GOOD)
    ((step, kind, name, text),) = log.events
    assert (step, kind, name) == (1, "note", "first_batch")
    assert "1e-06" in text
    assert "1.000001" in text


LOGITS = torch.randn(4000, 50, generator=torch.Generator().manual_seed(1))


def test_m2_an_engine_of_another_temperature_alarms_at_the_first_batch():
    """Fault: the engine samples at temperature 0.7, the trainer computes at 1."""
    assert {"agreement_mean", "agreement_max"} <= first_batch(LOGITS, LOGITS / 0.7)
    assert first_batch(LOGITS, LOGITS) == set()


def test_m2_an_engine_that_samples_from_fewer_tokens_alarms_by_the_ratio():
    """Fault: the engine samples from its 40 most probable tokens, of which the trainer knows nothing."""
    least = LOGITS.topk(40).values[:, -1:]
    assert "agreement_ratio" in first_batch(LOGITS, LOGITS.masked_fill(least > LOGITS, -torch.inf))


def first_batch(trainer_logits, engine_logits):
    """Names of the alarms, from the figures that the loss reports of tokens that this engine has sampled."""
    trainer, engine = trainer_logits.log_softmax(-1), engine_logits.log_softmax(-1)
    sampled = torch.multinomial(engine.exp(), 1, generator=torch.Generator().manual_seed(2))
    trainer, engine = trainer.gather(1, sampled)[:, 0], engine.gather(1, sampled)[:, 0]
    tokens = TokenBatch(trainer, trainer, engine, torch.ones_like(engine))
    terms = algorithm_of(AlgorithmSpec(correction="none")).loss(tokens)
    figures = {name: values.mean().item() for name, values in terms.means.items()}
    figures |= {name: values.max().item() for name, values in terms.maxima.items()}
    return {name.removeprefix("alarm/") for name in Alarms("fp32", Kept()).check(1, figures)}


def test_m2_the_ratio_is_reported_each_step_whatever_the_correction():
    behavior = torch.log(torch.tensor([0.5, 0.2]))
    policy = torch.log(torch.tensor([0.25, 0.4]))
    tokens = TokenBatch(policy, policy, behavior, torch.ones(2))
    for correction in ("none", "token_tis"):
        ratio = algorithm_of(AlgorithmSpec(correction=correction)).loss(tokens).means["agreement/mean_ratio"]
        assert ratio.tolist() == pytest.approx([0.5, 2.0])


def test_samples_of_older_weights_may_differ_without_an_alarm():
    alarms, _ = after(3)
    stale = {"agreement/mean_abs_logprob_delta": 0.5, "agreement/mean_ratio": 1.2, "rollout/staleness_max": 1.0}
    assert alarms.check(4, GOOD | stale) == {}


def test_bf16_may_differ_by_more():
    alarms, _ = after(3, dtype="bf16")
    assert alarms.check(4, GOOD | {"agreement/mean_abs_logprob_delta": 0.05}) == {}
    assert alarms.check(5, GOOD | {"agreement/mean_abs_logprob_delta": 0.3}) == {"alarm/agreement_mean": 0.3}


def test_m7_the_clipped_and_the_truncated_fraction_are_reported_and_alarm():
    """Fault: most tokens have moved beyond the clip, and beyond the cap of the correction."""
    behavior = torch.full((10,), -3.0)
    proximal = behavior + torch.tensor([2.0] * 4 + [0.0] * 6)  # 4 of 10 beyond the cap
    policy = proximal + torch.tensor([0.5] * 7 + [0.0] * 3)  # 7 of 10 beyond the clip
    spec = AlgorithmSpec(correction="token_tis")
    means = algorithm_of(spec).loss(TokenBatch(policy, proximal, behavior, torch.ones(10))).means
    figures = {name: values.mean().item() for name, values in means.items() if name.startswith("train/")}
    assert figures["train/clip_fraction"] == pytest.approx(0.7)
    assert figures["train/correction_truncated"] == pytest.approx(0.4)
    found = Alarms("fp32", Kept()).check(1, figures)
    assert {"alarm/clipped", "alarm/correction_truncated"} <= found.keys()


def test_m7_the_masked_fraction_is_reported_and_alarms():
    """Fault: the trainer finds 4 of 10 tokens far more probable than the engine said, and their masks cut them off."""
    behavior = torch.full((10,), -9.0)
    proximal = behavior + torch.tensor([4.0] * 4 + [0.0] * 6)
    spec = AlgorithmSpec(correction="mis")
    means = algorithm_of(spec).loss(TokenBatch(proximal, proximal, behavior, torch.ones(10))).means
    masked = means["train/correction_masked"].mean().item()
    assert masked == pytest.approx(0.4)
    assert "alarm/correction_masked" in Alarms("fp32", Kept()).check(1, {"train/correction_masked": masked})


def test_an_alarm_reaches_the_log_the_record_the_terminal_and_the_final_table(tmp_path, caplog):
    out = io.StringIO()
    console = Console(file=out, force_terminal=False, width=120)
    with ProgressView(tmp_path, 1, console), RunLog(tmp_path) as log:
        figures = GOOD | {"train/clip_fraction": 0.9}
        log.metrics(1, figures | Alarms("fp32", log).check(1, figures))
    assert "step 1: clipped: train/clip_fraction is 0.9, above 0.5" in caplog.text
    (event,) = [each for each in read_records(tmp_path / "events.jsonl") if each["edge"] == "alarm"]
    assert (event["step"], event["name"]) == (1, "clipped")
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["alarm/clipped"] == 0.9
    assert "clipped: train/clip_fraction is 0.9" in out.getvalue()
    console.print(final_table(tmp_path, "tiny"))
    assert "alarm clipped" in out.getvalue()
