"""Files of the model whose content is not what they are for are one line each before anything starts."""

import json
import subprocess
import sys

import pytest
from preflight_home import ROW, change, check, write_rows

DEEP = "[" * 100_000


def content(name, data):
    def write(home):
        (home / "model" / name).write_bytes(data if isinstance(data, bytes) else data.encode())

    return write


def keys(**values):
    return lambda home: change(home / "model" / "config.json", **values)


CONFIGS = {
    "a list": (content("config.json", "[]"), "config.json: holds list, not an object"),
    "not UTF-8": (content("config.json", b'{"a": "\xff"}'), "config.json: cannot be read ('utf-8' codec"),
    "nested without end": (content("config.json", DEEP), "config.json: cannot be read (maximum recursion depth"),
    "cut off": (content("config.json", "{"), "config.json: cannot be read (Expecting property name"),
    "a list of families": (keys(model_type=["qwen3"]), "model_type '['qwen3']' is not supported"),
    "a number for an object": (keys(rope_parameters=5), "config.json: rope_parameters = 5 is not an object"),
    "a text for a number": (
        keys(rope_parameters={"rope_theta": "x"}, rope_theta=None),
        "rope_theta = 'x' is not a num",
    ),
    "KV heads that do not divide the heads": (
        keys(num_key_value_heads=3),
        "config.json: num_attention_heads 4 is no multiple of num_key_value_heads 3",
    ),
    "layers without end": (keys(num_hidden_layers=10**30), "num_hidden_layers = a number of 31 digits is more than"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_s3_a_config_that_describes_no_model_is_one_line(home, case):
    """Injected: config.json is what the case says."""
    prepare, told = CONFIGS[case]
    prepare(home)
    code, [line] = check(home)
    assert code == 2
    assert line.startswith("model.path: model: ")
    assert told in line


GENERATION = {
    "{": "cannot be read (Expecting property name",
    "[]": "holds list, not an object; correct it",
    '{"eos_token_id": "x"}': "eos_token_id = 'x' is neither a number nor a list of numbers; correct it",
    '{"eos_token_id": [[1]]}': "eos_token_id = [[1]] is neither a number nor a list of numbers; correct it",
    b'{"a": "\xff"}': "cannot be read ('utf-8' codec",
    DEEP: "cannot be read (maximum recursion depth",
}


@pytest.mark.parametrize("written", GENERATION, ids=lambda each: str(each)[:24])
def test_s3_a_generation_config_that_names_no_ids_is_one_line(home, written):
    """Injected: generation_config.json holds something else."""
    content("generation_config.json", written)(home)
    code, lines = check(home)
    assert code == 2
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"model.path: model/generation_config.json: {GENERATION[written]}")


NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}x"
NO_NINE = "{% if '9' in messages[-1].content %}{{ raise_exception('no nine') }}{% endif %}{{ messages[-1].content }}"


@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
@pytest.mark.parametrize(
    ("template", "overrides", "told"),
    [
        ("{% if %}", [], "model.path: model: the chat template fails with the prompt '1': "),
        (
            "{{ raise_exception('no') }}",
            [],
            "model.path: model: the chat template fails with the prompt '1': no;",
        ),
        (
            NO_SYSTEM,
            ["data.system_prompt=Be brief."],
            "model.path: model: the chat template fails with data.system_prompt and the prompt '1': no system turn; "
            "correct the checkpoint's chat_template.jinja, drop data.system_prompt, or set data.chat_template: false",
        ),
        (NO_NINE, [], "train.jsonl: the chat template fails with the prompt '9+9=': no nine;"),
    ],
)
def test_s3_a_chat_template_that_fails_is_one_line(home, template, overrides, told, algorithm):
    """Injected: a template that is not valid, or that refuses what it is given."""
    content("chat_template.jinja", template)(home)
    write_rows(home, ROW, ROW | {"id": "b", "prompt": "9+9="})
    code, [line] = check(home, "data.chat_template=true", f"algorithm.name={algorithm}", *overrides)
    assert code == 2
    assert line.startswith(told)


def test_s3_an_index_that_names_no_files_is_one_line(home):
    """Injected: the index of the weights is a list; then it names files by numbers."""
    (home / "model" / "model.safetensors").unlink()
    for written in ([], {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": {"a": [1]}}):
        (home / "model" / "model.safetensors.index.json").write_text(json.dumps(written))
        code, [line] = check(home)
        assert code == 2
        assert line.startswith("model.path: ")
        assert "model/model.safetensors.index.json: " in line


def test_fine_tuning_is_checked_without_megatron_and_its_warnings(home):
    program = "import sys; import slimerl.conductor.preflight.whole; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert "slimerl.training.sft_rows" in loaded.stdout.split()
    assert not [name for name in loaded.stdout.split() if name.partition(".")[0] == "megatron"]
