"""The spec is strict: what it does not know it refuses, and the refusal names the key and the way out."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from slimerl.spec import SpecError, load_spec
from slimerl.spec.load import all_keys, dump_spec, spec_from_tree
from slimerl.spec.schema import RunSpec
from slimerl.spec.yaml_core import dumped, parsed

MINIMAL = {
    "name": "tiny",
    "model": {"path": "m"},
    "data": {"train_path": "t.jsonl"},
    "training": {"steps": 3, "prompts_per_step": 2},
}
CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.fixture
def minimal(tmp_path):
    file = tmp_path / "spec.yaml"
    file.write_text(yaml.safe_dump(MINIMAL))
    return file


def refusal(path, *overrides):
    with pytest.raises(SpecError) as caught:
        load_spec(path, overrides)
    return str(caught.value)


def test_a_minimal_spec_loads_with_defaults(minimal):
    spec = load_spec(minimal)
    assert spec.training.parallel.world_size == 1
    assert spec.run_dir == Path("runs/tiny")


def test_overrides_win_over_the_file_and_make_missing_sections(minimal):
    spec = load_spec(minimal, ["training.steps=7", "training.parallel.tensor=2", "rollout.temperature=1"])
    assert (spec.training.steps, spec.training.parallel.tensor, spec.rollout.temperature) == (7, 2, 1.0)


def test_s1_an_unknown_key_is_named_with_the_nearest_right_one(minimal):
    message = refusal(minimal, "training.step=3")
    assert "unknown key 'training.step'" in message
    assert "did you mean 'training.steps'" in message


@pytest.mark.parametrize("value", ["[a]", "{a: 1}"])
def test_s1_a_correction_of_another_type_is_refused_by_name(minimal, value):
    assert "algorithm.correction" in refusal(minimal, f"algorithm.correction={value}")


def test_a_path_begins_at_home_where_it_says_so(minimal, monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert load_spec(minimal, ["output_dir=~/runs"]).run_dir == Path("/home/someone/runs")
    assert "output_dir" in refusal(minimal, "output_dir=~nobody-of-this-name/runs")


def test_s1_a_key_of_another_section_is_found_by_its_last_part(minimal):
    assert "did you mean 'training.optimizer.lr'" in refusal(minimal, "training.lr=1")


@pytest.mark.parametrize(
    "override", ["training.steps=many", "training.steps=1.5", "training.steps=true", "data.chat_template=1"]
)
def test_s1_a_wrong_type_is_refused_and_shown(minimal, override):
    key, _, value = override.partition("=")
    message = refusal(minimal, override)
    assert key in message
    assert f"found {yaml.safe_load(value)!r}" in message


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("deadlines.start", "deadlines.start_s', in seconds"),
        ("deadlines.batch_minutes", "deadlines.batch_s', in seconds"),
        ("sync.bucket_mb", "sync.bucket_mib', in MiB"),
        ("training.micro_batch", "training.micro_batch_tokens', in tokens"),
        ("training.optimizer.warmup", "training.optimizer.warmup_steps', in steps"),
    ],
)
def test_s1_a_key_in_another_unit_is_answered_with_the_right_one(minimal, given, meant):
    """Injected: a key as another system, or a tired person, would call it."""
    assert f"unknown key '{given}'; did you mean '{meant}?" in refusal(minimal, f"{given}=5")


@pytest.mark.parametrize(("key", "unit"), [("deadlines.start_s", "seconds"), ("sync.bucket_mib", "MiB")])
def test_s1_a_value_with_a_unit_is_told_to_be_a_plain_number(minimal, key, unit):
    assert f"write a plain number of {unit}" in refusal(minimal, f"{key}=5min")


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan", "1e999"])
@pytest.mark.parametrize("key", ["training.optimizer.lr", "deadlines.start_s", "algorithm.clip_high"])
def test_an_endless_number_is_refused(minimal, key, value):
    assert f"{key}: input should be a finite number (found " in refusal(minimal, f"{key}={value}")


def test_a_whole_number_beyond_the_reals_is_refused(minimal):
    assert "training.optimizer.lr: input should be a number below" in refusal(
        minimal, f"training.optimizer.lr=1{'0' * 400}"
    )


@pytest.mark.parametrize(
    ("key", "largest"),
    [
        ("seed", 2**31 - 1),
        ("training.threads_per_rank", 1024),
        ("engine.threads", 1024),
        ("reward.workers", 1024),
        ("training.prompts_per_step", 2**31 - 1),
        ("rollout.max_staleness", 2**31 - 1),
    ],
)
def test_a_number_that_no_machine_takes_is_refused(minimal, key, largest):
    """Injected: one more than the largest; that one passes."""
    load_spec(minimal, [f"{key}={largest}"])
    assert refusal(minimal, f"{key}={largest + 1}").startswith(f"{minimal}: {key}: input should be less than")


@pytest.mark.parametrize("name", [".", ".."])
def test_a_run_is_not_named_as_another_directory(minimal, name):
    assert "name: a run's name is that of its directory" in refusal(minimal, f"name='{name}'")


@pytest.mark.parametrize("text", ["1: a\n", "? [a]\n: b\n", "? {a: b}\n: c\n", "null: a\n"])
def test_s1_a_key_that_is_no_text_is_refused(minimal, text):
    minimal.write_text(text)
    assert "is no text" in refusal(minimal)


def test_yaml_nested_beyond_all_measure_is_one_plain_line(minimal):
    minimal.write_text("a: " + "[" * 3_000)
    assert refusal(minimal) == f"{minimal}: not valid YAML: nested too deeply"


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("010", 10),
        ("0o10", 8),
        ("0x1F", 31),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("yes", "yes"),
        ("off", "off"),
        ("True", True),
        ("2024-02-30", "2024-02-30"),
        ("1e-6", 1e-6),
        (".5", 0.5),
        ("+1.", 1.0),
        ("-.INF", float("-inf")),
        ("", None),
        ("~", None),
        ("=", "="),
        ("'010'", "010"),
    ],
)
def test_a_plain_value_is_what_yaml_1_2_says(written, value):
    """From the tables of its core schema."""
    [found] = parsed(f"[{written or 'null'}]") if written else [parsed("a:")["a"]]
    assert (found, type(found)) == (value, type(value))


def test_a_number_or_truth_value_of_yaml_1_1_is_refused_and_shown(minimal):
    """Injected: what PyYAML takes for 1000, 90 and true."""
    for override, told in (("seed=1_000", "'1_000'"), ("seed=1:30", "'1:30'"), ("data.chat_template=yes", "'yes'")):
        assert f"(found {told}" in refusal(minimal, override)
    assert load_spec(minimal, ["seed=010", "output_dir=2024-02-30"]).seed == 10


@settings(deadline=None)
@given(st.one_of(st.text("0123456789eE+-._:xonyftruealsNIi~<=", max_size=6), st.text(max_size=6)))
def test_text_that_looks_like_something_else_is_written_so_that_it_reads_back(text):
    for read in (parsed, yaml.safe_load):
        assert read(dumped({"key": text})) == {"key": text}


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("!!int 'a'", "'a' is no integer"),
        ("!!float 'a'", "'a' is no number"),
        ("!!bool 'yes'", "'yes' is no truth value, true or false"),
        ("!!timestamp 'a'", "a value is not what its tag says"),
        ("9" * 5000, f"'{'9' * 40}…' is no number that can be read: it has 5000 digits"),
        ("[" * 3000, "nested too deeply"),
    ],
)
def test_a_value_that_cannot_be_is_one_line_in_the_file_and_in_an_override(minimal, value, told):
    """Injected: values that Python's own readers stumble over."""
    said = refusal(minimal, f"seed={value}")
    assert said.startswith("override 'seed=")
    minimal.write_text(minimal.read_text() + f"seed: {value}\n")
    for line in (said, refusal(minimal)):
        assert told in line
        assert len(line.splitlines()) == 1
        assert len(line) < 400


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("rollout: {<<: {samples_per_prompt: 4}}", "unknown key 'rollout.<<'; a run spec has no merge keys"),
        (
            "training.parallel.tensor: 2",
            "unknown key 'training.parallel.tensor'; in a file each section stands by itself",
        ),
        ('"a\\nb\\e[31m": 1', r"unknown key 'a\nb\x1b[31m'"),
        (f"seed: {'x' * 5000}", f"(found '{'x' * 79}…)"),
        ("output_dir: ''", "output_dir: a path is not empty"),
        ("output_dir: [a]", "output_dir: a path is text (found ['a'])"),
        ("engine: {extra_args: --a}", "engine.extra_args: input should be a list"),
        ("rollout: {temperature: 1e-7}", "rollout.temperature: input should be greater than or equal to"),
        ("evaluation: {every_steps: 5}", "evaluation.every_steps needs held-out rows: set data.eval_path"),
    ],
)
def test_s1_what_is_no_key_or_value_is_told_as_it_is_written_on_one_short_line(minimal, written, told):
    minimal.write_text(f"{minimal.read_text()}{written}\n")
    line = refusal(minimal)
    assert told in line
    assert line.isprintable()
    assert len(line) < 300


def test_s1_a_section_written_as_a_value_is_told_so(minimal):
    assert refusal(minimal, "engine=null").endswith("'engine' is a section of keys, found None")


def test_s1_every_fault_has_a_line_of_its_own(minimal):
    assert len(refusal(minimal, "training.steps=x", "sead=1").splitlines()) == 2


def test_a_key_that_stands_twice_is_refused(minimal):
    minimal.write_text(minimal.read_text() + "name: other\n")
    assert "'name' stands twice" in refusal(minimal)


def test_a_missing_file_is_one_plain_line(tmp_path):
    assert "cannot read the spec: No such file" in refusal(tmp_path / "none.yaml")


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [1\n", "\t\n  x: :"])
def test_text_that_is_no_mapping_is_refused(tmp_path, text):
    file = tmp_path / "spec.yaml"
    file.write_text(text)
    assert str(file) in refusal(file)


def test_an_override_without_a_value_says_how_to_write_it(minimal):
    assert "section.key=value" in refusal(minimal, "training.steps")


def test_an_override_through_a_value_is_refused(minimal):
    assert "'name' is a value, not a section" in refusal(minimal, "name.first=1")


def test_m3_a_nucleus_below_one_is_refused_since_the_ratio_would_be_biased(minimal):
    assert "biased" in refusal(minimal, "rollout.top_p=0.9")


def test_over_sampling_that_no_staleness_allows_is_refused_with_what_to_set(minimal):
    assert "set max_staleness to 1" in refusal(minimal, "rollout.oversample=1.5")
    assert "raise it to 2" in refusal(minimal, "rollout.oversample=2.5", "rollout.max_staleness=1")
    drained = ["rollout.oversample=1.5", "rollout.max_staleness=1", "rollout.on_update=drain"]
    assert "choose retract" in refusal(minimal, *drained)
    assert load_spec(minimal, [*drained, "rollout.chunk_tokens=16"]).rollout.oversample == 1.5
    assert load_spec(minimal, ["rollout.oversample=1"]).rollout.max_staleness == 0


def test_groups_of_one_are_refused_for_grpo(minimal):
    assert "samples_per_prompt must be at least 2" in refusal(minimal, "rollout.samples_per_prompt=1")


def test_more_updates_than_a_step_with_lost_samples_has_samples_are_refused(minimal):
    """A step of 2 prompts may come to 4 samples, where all others are lost; a fifth update would end the run."""
    step = ("training.prompts_per_step=2", "rollout.samples_per_prompt=8")
    assert load_spec(minimal, [*step, "training.minibatches_per_step=4"]).training.minibatches_per_step == 4
    told = refusal(minimal, *step, "training.minibatches_per_step=5")
    assert "may have 4 left, 2 of each prompt: too few for training.minibatches_per_step = 5" in told


def test_a_context_too_short_for_prompt_and_response_is_refused(minimal):
    assert "engine.context_tokens" in refusal(minimal, "engine.context_tokens=100")


def test_s2_the_spec_is_frozen(minimal):
    spec = load_spec(minimal)
    with pytest.raises(ValueError, match="frozen"):
        spec.training.steps = 9


def test_the_dumped_spec_loads_to_an_equal_one(minimal):
    spec = load_spec(minimal, ["output_dir=/x/y", "training.optimizer.lr=3.0e-4", "engine.extra_args=[--a, b]"])
    assert spec_from_tree(yaml.safe_load(dump_spec(spec)), "dump") == spec


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_config_loads(config):
    load_spec(config)


@settings(deadline=None)
@given(st.sampled_from(sorted(all_keys(RunSpec))), st.text("abcdefgh_", min_size=1, max_size=8))
def test_s1_no_key_outside_the_schema_ever_passes(key, suffix):
    section, _, leaf = key.rpartition(".")
    unknown = f"{section}.{leaf}{suffix}" if section else leaf + suffix
    if unknown in set(all_keys(RunSpec)):
        return
    tree = yaml.safe_load(yaml.safe_dump(MINIMAL))
    node = tree
    for part in unknown.split(".")[:-1]:
        node = node.setdefault(part, {})
    if isinstance(node, dict):
        node[unknown.rpartition(".")[2]] = 1
        if key.startswith("evaluation.sets."):
            tree["evaluation"]["sets"] = [node]
        with pytest.raises(SpecError, match=r"unknown key|does not read"):
            spec_from_tree(tree, "tree")
