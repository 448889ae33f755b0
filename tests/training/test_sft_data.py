"""Rows of supervised fine-tuning become samples whose response, and nothing else, is trained on."""

import json
from pathlib import Path

import pytest
from tiny_models import EOS, make_tiny_model

from slimerl.samples.rows import DataError
from slimerl.spec.load import spec_from_tree
from slimerl.spec.schema import DataSpec


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(model):
    from slimerl.training.sft_rows import load_tokenizer

    return load_tokenizer(model, DataSpec(train_path=Path("unused"), chat_template=True))


def written(path: Path, *rows: tuple[str, str]) -> Path:
    file = path / "rows.jsonl"
    lines = [json.dumps({"id": str(i), "prompt": p, "response": r}) for i, (p, r) in enumerate(rows)]
    file.write_text("\n".join(lines) + "\n")
    return file


def read(file: Path, tokenizer, max_tokens: int = 1000, **data):
    from slimerl.training.sft_rows import read_samples

    return read_samples(file, tokenizer, DataSpec(train_path=file, **data), max_tokens)


def test_a_response_ends_with_the_end_of_sequence_and_only_its_tokens_count(tmp_path, tokenizer):
    [sample] = read(written(tmp_path, ("1+1=", "2")), tokenizer)
    assert tokenizer.decode(sample.tokens[: sample.prompt_length]) == "1+1="
    assert sample.tokens[-1] == EOS
    assert tokenizer.decode(sample.tokens[sample.prompt_length : -1]) == "2"
    assert sample.sampled.tolist() == [True, True]


def test_a_chat_template_frames_the_prompt_and_leaves_the_response_alone(tmp_path, tokenizer):
    file = written(tmp_path, ("hello", "hi"))
    [sample] = read(file, tokenizer, chat_template=True, system_prompt="be short")
    prompt = tokenizer.decode(sample.tokens[: sample.prompt_length])
    assert prompt == (
        "<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(sample.tokens[sample.prompt_length : -1]) == "hi"


def test_a_prompt_that_writes_the_end_of_its_turn_does_not_end_it(tmp_path, tokenizer):
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    [sample] = read(written(tmp_path, ("x<|im_end|>y", "z")), tokenizer, chat_template=True)
    assert sample.tokens[: sample.prompt_length].tolist().count(end) == 1
    [plain] = read(written(tmp_path, ("x<|im_end|>y", "z")), tokenizer)
    assert plain.tokens.tolist().count(end) == 1, "without a template the row writes its special tokens itself"


def test_r3_rows_that_are_too_long_are_refused_with_file_and_line(tmp_path, tokenizer):
    file = written(tmp_path, ("short", "ok"), ("x" * 60, "ok"), ("short", "y" * 200))
    with pytest.raises(DataError) as refused:
        read(file, tokenizer, max_tokens=100, max_prompt_tokens=50)
    assert f"{file}:2: the prompt has 60 tokens" in str(refused.value)
    assert f"{file}:3: the row has 206 tokens" in str(refused.value)


def test_a_tokenizer_without_chat_template_is_refused_where_one_is_wanted(model, tmp_path):
    import shutil

    from slimerl.training.sft_rows import load_tokenizer

    shutil.copytree(model, tmp_path / "bare")
    (tmp_path / "bare" / "chat_template.jinja").unlink()
    with pytest.raises(DataError, match="no chat template"):
        load_tokenizer(tmp_path / "bare", DataSpec(train_path=Path("unused"), chat_template=True))


def order_of(seed: int, samples, steps: int, size: int) -> list[str]:
    from slimerl.training.sft_data import RowSource

    tree = {
        "name": "x",
        "seed": seed,
        "model": {"path": "m"},
        "data": {"train_path": "d"},
        "algorithm": {"name": "sft"},
        "training": {"steps": steps, "prompts_per_step": size},
    }
    source = RowSource(spec_from_tree(tree, "test"), None, None, samples)
    return [source._at(position).sample_id for position in range(steps * size)]


def test_each_epoch_has_every_row_once_in_an_order_of_its_own(tmp_path, tokenizer):
    samples = read(written(tmp_path, *[(f"{i}", "a") for i in range(20)]), tokenizer)
    order = order_of(1, samples, steps=8, size=5)
    first, second = order[:20], order[20:]
    assert sorted(first) == sorted(second) == sorted(sample.sample_id for sample in samples)
    assert first != second
    assert order_of(1, samples, steps=8, size=5) == order
    assert order_of(2, samples, steps=8, size=5) != order
