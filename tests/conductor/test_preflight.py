"""Bad input is refused before anything starts: one line per fault that names the key or file, and the way out.

Each case runs `slimerl check` as a user does, on a tiny checkpoint that is sound but for the one injected fault.
"""

import json
import shutil
from pathlib import Path

import pytest
from preflight_home import ROW, change, check, write_rows
from tiny_models import make_tiny_model
from typer.testing import CliRunner

from slimerl.cli import app


def rows(*given):
    return lambda home: write_rows(home, *given)


def config(**values):
    return lambda home: change(home / "model" / "config.json", **values)


def nothing(home):
    """The fault is in the overrides."""


def without(name):
    return lambda home: (home / "model" / name).unlink()


CASES = {
    "unknown key": (
        ["training.step=3"],
        nothing,
        "spec.yaml: unknown key 'training.step'; did you mean 'training.steps'?",
    ),
    "wrong type": (
        ["training.steps=many"],
        nothing,
        "spec.yaml: training.steps: input should be a valid integer (found 'many')",
    ),
    "section as a value": (["engine=2"], nothing, "spec.yaml: 'engine' is a section of keys, found 2"),
    "key without its unit": (
        ["deadlines.start=5"],
        nothing,
        "spec.yaml: unknown key 'deadlines.start'; did you mean 'deadlines.start_s', in seconds?",
    ),
    "key with another unit": (
        ["sync.bucket_mb=64"],
        nothing,
        "spec.yaml: unknown key 'sync.bucket_mb'; did you mean 'sync.bucket_mib', in MiB?",
    ),
    "unit in the value": (
        ["sync.bucket_mib=64MiB"],
        nothing,
        "spec.yaml: sync.bucket_mib: input should be a valid integer (found '64MiB'; write a plain number of MiB)",
    ),
    "TP does not divide the heads": (
        ["training.parallel.tensor=3"],
        nothing,
        "training.parallel.tensor = 3 does not divide the model's num_attention_heads = 4; choose a common divisor of "
        "the heads, KV heads and MLP width",
    ),
    "PP does not divide the layers": (
        ["training.parallel.pipeline=3"],
        nothing,
        "training.parallel.pipeline * virtual = 3 does not divide the model's num_hidden_layers = 2; choose a divisor, "
        "or give uneven stages in training.parallel.pipeline_layout",
    ),
    "uneven stages with too few layers": (
        ["training.parallel.pipeline=2", "training.parallel.pipeline_layout=Et|L"],
        nothing,
        "training.parallel.pipeline_layout = 'Et|L' places 1 layers, the model's num_hidden_layers is 2; write one t "
        "for each layer",
    ),
    "stages beyond all measure": (
        ["training.parallel.pipeline=2", "training.parallel.pipeline_layout=Et*1000000000000|L"],
        nothing,
        "training.parallel.pipeline_layout: pipeline layout 'Et*1000000000000|L' would be 1e+12 characters long, "
        "spelled out; lower its counts",
    ),
    "loss function of no module": (
        ["algorithm.name=custom", "algorithm.loss_function=nosuch:f"],
        nothing,
        "algorithm.loss_function: cannot load nosuch:f: No module named 'nosuch'; is it on PYTHONPATH?",
    ),
    "loss function with other parameters": (
        ["algorithm.name=custom", "algorithm.loss_function=os:getcwd"],
        nothing,
        "algorithm.loss_function: os:getcwd takes (), it must take (tokens)",
    ),
    "loss function that does not tell its parameters": (
        ["algorithm.name=custom", "algorithm.loss_function=builtins:max"],
        nothing,
        "algorithm.loss_function: builtins:max does not tell its parameters; it must take (tokens)",
    ),
    "infinite number": (
        ["training.optimizer.lr=.inf"],
        nothing,
        "spec.yaml: training.optimizer.lr: input should be a finite number (found inf)",
    ),
    "warm-up longer than the run": (
        ["training.optimizer.warmup_steps=3"],
        nothing,
        "training.optimizer.warmup_steps = 3 exceeds training.steps = 2; lower it",
    ),
    "experts of a dense model": (
        ["training.parallel.expert=2", "training.parallel.data=2"],
        nothing,
        "training.parallel.expert = 2, but the model has no experts; remove it",
    ),
    "engine TP does not divide the heads": (
        ["engine.tensor_parallel=3"],
        nothing,
        "engine.tensor_parallel = 3 does not divide the model's num_attention_heads = 4; choose a divisor",
    ),
    "SGLang would pad KV heads on the CPU": (
        ["engine.tensor_parallel=4"],
        nothing,
        "engine.tensor_parallel = 4 does not fit the model's num_key_value_heads = 2; choose a divisor of it",
    ),
    "context longer than the model's": (
        ["engine.context_tokens=4096"],
        nothing,
        "engine.context_tokens = 4096 exceeds the model's max_position_embeddings = 2048; lower it",
    ),
    "KV cache too small for one request": (
        ["engine.max_total_tokens=39", "rollout.max_running_requests=8"],
        nothing,
        "engine.max_total_tokens = 39 cannot hold one request of data.max_prompt_tokens + max_new_tokens = 40; raise "
        "it to at least that",
    ),
    "more requests than tokens": (
        ["engine.max_total_tokens=100"],
        nothing,
        "rollout.max_running_requests = 256 exceeds engine.max_total_tokens = 100: a running request holds a token at "
        "least; lower the one or raise the other",
    ),
    "engine argument against the spec": (
        ["engine.extra_args=[--dtype=bfloat16]"],
        nothing,
        "engine.extra_args: --dtype would contradict model.dtype; remove it and set model.dtype instead",
    ),
    "missing data": (
        ["data.eval_path=nowhere.jsonl"],
        nothing,
        "data.eval_path: nowhere.jsonl does not exist; name a JSONL file (a relative path starts at {home})",
    ),
    "missing model": (
        ["model.path=nowhere"],
        nothing,
        "model.path: nowhere: there is no directory nowhere; name a Hugging Face checkpoint (a relative path starts at "
        "{home})",
    ),
    "missing weights": (
        [],
        without("model.safetensors"),
        "model.path: model has neither model.safetensors nor model.safetensors.index.json",
    ),
    "weights that config.json contradicts": (
        [],
        config(vocab_size=600),
        "model.path: checkpoint model: model.embed_tokens.weight has shape (512, 128), config.json says (600, 128)",
    ),
    "unknown family": (
        [],
        config(model_type="gpt2"),
        "model.path: model: model_type 'gpt2' is not supported; known are …",
    ),
    "malformed row": (
        [],
        rows(ROW, '{"id": "b"'),
        "train.jsonl:2: not valid JSON (column 11): Expecting ',' delimiter",
    ),
    "duplicate id": ([], rows(ROW, ROW | {"id": "b"}, ROW), "train.jsonl:3: id 'a' stands already in line 1"),
    "empty data set": ([], rows(), "train.jsonl: no rows"),
    "empty prompt": ([], rows(ROW, ROW | {"id": "b", "prompt": ""}), "train.jsonl:2: 'prompt' is empty"),
    "prompt longer than its bound": (
        [],
        rows(ROW | {"prompt": "1" * 17}),
        "train.jsonl:1: prompt of id 'a' has 17 tokens, more than data.max_prompt_tokens = 16; shorten it or raise the "
        "bound",
    ),
    "prompts longer than the context": (
        ["data.max_prompt_tokens=250"],
        nothing,
        "spec.yaml: data.max_prompt_tokens + max_new_tokens (of rollout or evaluation) = 274 exceeds "
        "engine.context_tokens = 256",
    ),
    "no tokenizer": (
        [],
        without("tokenizer.json"),
        "model.path: model: cannot load its tokenizer: …",
    ),
    "tokenizer of another model": (
        [],
        lambda home: add_token(home / "model", 700),
        "model.path: model: the tokenizer has id 700 ('<far>'), but config.json says vocab_size = 512; take the "
        "tokenizer that belongs to this model",
    ),
    "end of sequence outside of the vocabulary": (
        [],
        config(eos_token_id=512),
        "model.path: model: end-of-sequence id 512 is outside of the vocabulary (vocab_size = 512); correct it in "
        "config.json, generation_config.json or tokenizer_config.json",
    ),
    "no chat template": (
        ["data.chat_template=true", "data.max_prompt_tokens=200"],
        without("chat_template.jinja"),
        "model: data.chat_template is set, but the tokenizer has no chat template; add chat_template.jinja to the "
        "checkpoint or set data.chat_template: false",
    ),
    "no write permission": (
        ["output_dir=/proc/none/run"],
        nothing,
        "output_dir: /proc is not writable (No such file or directory); set output_dir to a directory that is",
    ),
    "output below a file": (
        ["output_dir=spec.yaml/run"],
        nothing,
        "output_dir: {home}/spec.yaml is a file, not a directory; set output_dir to another place",
    ),
    "no local disk": (
        ["checkpoint.local_dir=/proc/none/disk"],
        nothing,
        "checkpoint.local_dir: /proc is not writable (No such file or directory); set checkpoint.local_dir to a "
        "directory that is",
    ),
    "export over the data": (
        ["training.export_path=."],
        nothing,
        "training.export_path: {home} would be replaced, but holds {home}; set training.export_path to a directory of "
        "its own",
    ),
}


def add_token(model: Path, number: int) -> None:
    file = model / "tokenizer.json"
    tree = json.loads(file.read_text())
    tree["model"]["vocab"]["<far>"] = number
    file.write_text(json.dumps(tree))


@pytest.mark.parametrize("case", CASES)
def test_s3_bad_input_is_one_clear_line_and_nothing_starts(home, case):
    """Injected: the fault that the case is named after."""
    overrides, prepare, expected = CASES[case]
    prepare(home)
    code, lines = check(home, *overrides)
    assert code == 2
    expected = expected.format(home=home)
    begin, more, _ = expected.partition("…")
    assert len(lines) == 1
    assert lines[0].startswith(begin) if more else lines == [expected]


USED = [
    "checkpoints",
    "checkpoints/step-5",
    "logs",
    "lock/x",
    "spec.yaml",
    "stop",
    "trace",
    "tensorboard",
    "x/../trace.json",
]
USED += ["metrics.jsonl", "events.jsonl", "resources", "rollout.json", "sync"]


@pytest.mark.parametrize("name", USED)
def test_s3_an_export_over_what_the_run_itself_keeps_is_refused(home, name):
    """Injected: training.export_path is a path in the run directory that the run writes."""
    code, [line] = check(home, f"training.export_path=run/{name}")
    assert code == 2
    assert line.startswith(f"training.export_path: {(home / 'run' / name).resolve()} would be replaced, but run/")


def test_s3_an_export_to_where_a_link_of_the_run_leads_is_refused(home):
    """Injected: the checkpoints lie on another disk, and the export is to go there."""
    (home / "run").mkdir()
    (home / "run" / "lock").touch()
    (home / "big").mkdir()
    (home / "run" / "checkpoints").symlink_to(home / "big")
    code, [line] = check(home, "training.export_path=big")
    assert (code, "run/checkpoints is the run's own" in line) == (2, True)


@pytest.mark.parametrize("name", ["model", "exported/last", "checkpoints-exported"])
def test_an_export_in_the_run_directory_beside_what_the_run_keeps_is_sound(home, name):
    assert check(home, f"training.export_path=run/{name}")[0] == 0


def test_sound_input_passes_and_the_derived_values_are_printed(home):
    result = CliRunner().invoke(app, ["check", "spec.yaml"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.stderr
    for derived in ("32 = 8 prompts × 4, up to 1,280 tokens", "40 tokens of a context of 256", "memory, all roles"):
        assert derived in result.stdout
    assert not (home / "run").exists()


def test_s2_what_follows_from_the_spec_is_printed_with_its_units(home):
    """Injected: a spec whose derived values differ from the defaults."""
    result = CliRunner().invoke(
        app, ["check", "spec.yaml", "training.parallel.data=2", "training.parallel.tensor=2"], env={"COLUMNS": "200"}
    )
    assert result.exit_code == 0, result.stderr
    table = result.stdout
    assert "4 = tensor 2 × context 1 × pipeline 1 × data 2" in table
    assert "resumable checkpoint" in table
    assert "GiB: weights" in table


def test_s3_independent_faults_are_told_all_at_once(home):
    """Injected: a wrong grid, a wrong engine, a bad row, a long prompt, no held-out file, a taken directory."""
    write_rows(home, "{", ROW | {"prompt": "1" * 20})
    code, lines = check(
        home,
        "training.parallel.tensor=3",
        "training.parallel.pipeline=3",
        "engine.tensor_parallel=3",
        "data.eval_path=nowhere.jsonl",
        "output_dir=/proc/none/run",
    )
    assert code == 2
    starts = [
        "training.parallel.tensor = 3",
        "training.parallel.pipeline * virtual = 3",
        "engine.tensor_parallel = 3",
        "train.jsonl:1: not valid JSON",
        "train.jsonl:2: prompt of id 'a' has 20 tokens",
        "data.eval_path: nowhere.jsonl does not exist",
        "output_dir: /proc is not writable",
    ]
    assert [line[: len(start)] for line, start in zip(lines, starts, strict=True)] == starts


def test_s3_sizes_that_sglang_pads_without_cuda_are_refused(home):
    """Injected: an MLP of 160 numbers, a multiple of 32, but not of 32 for each of two ranks."""
    shutil.rmtree(home / "model")
    make_tiny_model("llama", home / "model", intermediate_size=160)
    assert check(home)[0] == 0
    code, lines = check(home, "engine.tensor_parallel=2")
    assert code == 2
    assert lines == [
        "engine.tensor_parallel = 2: SGLang without CUDA would pad the model's intermediate_size = 160 to a multiple "
        "of 64; choose another tensor_parallel, or a model whose intermediate_size is one"
    ]


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_s3_experts_over_ranks_that_do_not_divide_them_are_refused(home, family):
    """Injected: 8 experts over 3 ranks; the same models pass with 2."""
    shutil.rmtree(home / "model")
    make_tiny_model(family, home / "model")
    assert check(home, "training.parallel.expert=2", "training.parallel.data=2") == (0, [])
    assert check(home, "training.parallel.expert=3", "training.parallel.data=3") == (
        2,
        [
            "training.parallel.expert = 3 does not divide the model's num_moe_experts = 8; choose a divisor of the "
            "experts"
        ],
    )


def test_experts_that_are_spread_and_cut_pass(home):
    """Injected: two dimensions that are sound together alone."""
    shutil.rmtree(home / "model")
    make_tiny_model("qwen3_moe", home / "model")
    grid = [f"training.parallel.{each}" for each in ("data=4", "expert=2", "expert_tensor=2")]
    assert check(home, *grid) == (0, [])


def test_r3_a_row_longer_than_the_model_is_refused_for_fine_tuning(home):
    """Injected: a response of 2,100 tokens for a model of 2,048."""
    write_rows(home, ROW, ROW | {"id": "long", "response": "7" * 2100})
    code, lines = check(home, "algorithm.name=sft")
    assert code == 2
    [line] = lines
    assert line.startswith("train.jsonl:2: the row has 2105 tokens, ")
    assert "2048" in line


def test_r3_every_kind_of_bad_row_is_told_by_file_and_line(home):
    """Injected: four bad rows of four kinds in one file."""
    write_rows(home, ROW, "[1]", ROW, ROW | {"id": "c", "prompt": " "}, ROW | {"id": "d", "prompt": "1" * 30})
    code, lines = check(home)
    assert code == 2
    assert [line.split(" ")[0] for line in lines] == [f"train.jsonl:{number}:" for number in (2, 3, 4, 5)]
