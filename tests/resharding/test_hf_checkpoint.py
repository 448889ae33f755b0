"""Reading and writing Hugging Face directories: exact, atomic, and clear about what is wrong."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from resharding_models import State, random_state, same_bits
from safetensors.torch import load_file, save_file
from sparse_models import DEEPSEEK

from slimerl.resharding.families import Form, family_of
from slimerl.resharding.hf_checkpoint import CheckpointError, HfCheckpoint, check_keys, read_config, write_checkpoint

CONFIG = {
    "model_type": "llama",
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
}
TENSORS = family_of(CONFIG).logical_tensors(CONFIG)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint of one file, with a tokenizer."""
    directory = tmp_path / "source"
    directory.mkdir()
    save_file(random_state(CONFIG), directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    return directory


def read(directory: Path) -> State:
    with HfCheckpoint(directory) as checkpoint:
        return {name: tensor.clone() for name, tensor in checkpoint.items()}


def assert_same(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    assert all(same_bits(found[name], tensor) for name, tensor in expected.items())


def test_w10_a_written_checkpoint_has_the_same_keys_bits_and_companions(source, tmp_path):
    target = tmp_path / "new" / "model"
    write_checkpoint(target, random_state(CONFIG).items(), source)
    assert_same(read(target), random_state(CONFIG))
    assert sorted(path.name for path in target.iterdir()) == sorted(path.name for path in source.iterdir())
    assert read_config(target) == CONFIG


def test_a_checkpoint_in_many_shards_reads_as_one(source, tmp_path):
    target = tmp_path / "sharded"
    write_checkpoint(target, random_state(CONFIG).items(), source, shard_bytes=3000)
    files = sorted(target.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in TENSORS)
    assert set(load_file(files[0])) == {name for name, file in index["weight_map"].items() if file == files[0].name}
    assert_same(read(target), random_state(CONFIG))


def test_weights_of_whole_numbers_are_refused_by_name(source):
    """Injected: a tensor that was quantised, in the shape of the one that it stands for."""
    state = random_state(CONFIG)
    name = next(iter(state))
    save_file(state | {name: state[name].to(torch.int8)}, source / "model.safetensors")
    with HfCheckpoint(source) as checkpoint, pytest.raises(CheckpointError, match=f"{name} holds whole numbers"):
        check_keys(checkpoint, TENSORS)


def test_others_may_read_the_weights_where_they_may_read_the_directory(source, tmp_path):
    write_checkpoint(tmp_path / "out", random_state(CONFIG).items(), source)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert modes == {(tmp_path / "out").stat().st_mode & 0o666}


def test_transformers_reads_what_is_written(source, tmp_path):
    transformers = pytest.importorskip("transformers")
    state = {name: torch.rand_like(tensor) for name, tensor in random_state(CONFIG).items()}
    write_checkpoint(tmp_path / "out", state.items(), source, shard_bytes=3000)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert_same(dict(model.named_parameters()), state)


def test_the_buffer_of_a_tensor_may_be_used_again_before_its_shard_is_full(source, tmp_path):
    def in_one_buffer():
        buffer = torch.empty(max(tensor.numel for tensor in TENSORS))
        for name, tensor in random_state(CONFIG).items():
            view = buffer[: tensor.numel()].view(tensor.shape)
            yield name, view.copy_(tensor)

    write_checkpoint(tmp_path / "out", in_one_buffer(), source)
    assert_same(read(tmp_path / "out"), random_state(CONFIG))


def test_the_config_states_the_dtype_of_the_tensors(source, tmp_path):
    state = {name: tensor.bfloat16() for name, tensor in random_state(CONFIG).items()}
    write_checkpoint(tmp_path / "out", state.items(), source)
    assert read_config(tmp_path / "out")["torch_dtype"] == "bfloat16"


def test_c2_a_writer_that_fails_leaves_no_directory_and_the_old_one_as_it_was(source, tmp_path):
    """Fault: the trainer dies in the middle of an export."""
    target = tmp_path / "out"

    def failing():
        yield from list(random_state(CONFIG).items())[:3]
        raise RuntimeError("the gather failed")

    with pytest.raises(RuntimeError, match="the gather failed"):
        write_checkpoint(target, failing(), source, shard_bytes=100)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    write_checkpoint(target, random_state(CONFIG).items(), source)
    with pytest.raises(RuntimeError, match="the gather failed"):
        write_checkpoint(target, failing(), source, overwrite=True)
    assert_same(read(target), random_state(CONFIG))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_what_a_killed_writer_left_beside_it_goes_with_the_next_one(source, tmp_path):
    """Injected: killed before the rename, another writer of this machine lives; each leaves as much as a model."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    names = [f".target.partial-{ended.pid}", f".target.partial-{os.getppid()}", f".target2.partial-{ended.pid}"]
    for name in names:
        (tmp_path / name).mkdir()
    write_checkpoint(tmp_path / "target", read(source).items(), source)
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted([*names[1:], "source", "target"])


def test_an_existing_directory_is_replaced_only_on_demand(source, tmp_path):
    target = tmp_path / "out"
    write_checkpoint(target, random_state(CONFIG).items(), source)
    with pytest.raises(FileExistsError, match="out exists"):
        write_checkpoint(target, random_state(CONFIG).items(), source)
    changed = {name: tensor + 1 for name, tensor in random_state(CONFIG).items()}
    write_checkpoint(target, changed.items(), source, overwrite=True)
    assert_same(read(target), changed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("model.norm.weight"), r"lacks model\.norm\.weight"),
        (lambda state: state.update(extra=torch.zeros(1)), "has extra"),
        (lambda state: state.update({"model.norm.weight": torch.zeros(3)}), r"model\.norm\.weight has shape \(3,\)"),
    ],
)
def test_w3_a_checkpoint_with_other_tensors_than_its_config_is_refused_by_name(source, change, message):
    state = random_state(CONFIG)
    change(state)
    save_file(state, source / "model.safetensors")
    with HfCheckpoint(source) as checkpoint, pytest.raises(CheckpointError, match=message):
        check_keys(checkpoint, TENSORS)


def test_w8_a_tied_head_may_stand_in_the_file_if_it_repeats_its_owner(source):
    tied = {**CONFIG, "tie_word_embeddings": True}
    family = family_of(tied)
    state = random_state(tied)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, source / "model.safetensors")
    with HfCheckpoint(source) as checkpoint:
        check_keys(checkpoint, family.logical_tensors(tied), family.aliases(tied))
    state["lm_head.weight"][0, 0] += 1
    save_file(state, source / "model.safetensors")
    with HfCheckpoint(source) as checkpoint, pytest.raises(CheckpointError, match=r"lm_head\.weight should repeat"):
        check_keys(checkpoint, family.logical_tensors(tied), family.aliases(tied))


def test_a_prediction_layer_may_stand_in_the_file_of_a_model_that_is_built_without(source):
    """Fault: DeepSeek-V3's own checkpoint is refused, because it has a layer more than the trainer."""
    family = family_of(DEEPSEEK)
    state = random_state(DEEPSEEK, Form(prediction=True))
    copies = family.aliases(DEEPSEEK)
    assert set(copies) == {f"model.layers.4.{name}.weight" for name in ("embed_tokens", "shared_head.head")}
    state |= {name: state[owner].clone() for name, owner in copies.items()}
    save_file(state, source / "model.safetensors")
    with HfCheckpoint(source) as checkpoint:
        tensors = family.logical_tensors(DEEPSEEK)
        check_keys(checkpoint, tensors, copies, family.unused_tensors(DEEPSEEK))
        check_keys(checkpoint, family.logical_tensors(DEEPSEEK, form=Form(prediction=True)), copies)
        with pytest.raises(CheckpointError, match=r"has model\.layers\.4\."):
            check_keys(checkpoint, tensors, copies)


def test_c2_a_torn_file_is_named(source):
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*torn"):
        HfCheckpoint(source)


def test_an_index_that_disagrees_with_its_files_is_refused(source, tmp_path):
    target = tmp_path / "out"
    write_checkpoint(target, random_state(CONFIG).items(), source, shard_bytes=3000)
    index_path = target / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    index["weight_map"]["ghost"] = next(iter(index["weight_map"].values()))
    index_path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="disagree about ghost"):
        HfCheckpoint(target)


def test_an_index_that_has_a_tensor_in_another_of_its_files_is_refused(source, tmp_path):
    """Fault: the union of the names is right, and a read would end in a traceback of safetensors."""
    target = tmp_path / "out"
    write_checkpoint(target, random_state(CONFIG).items(), source, shard_bytes=3000)
    index_path = target / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    right = index["weight_map"]["model.norm.weight"]
    wrong = next(file for file in index["weight_map"].values() if file != right)
    index["weight_map"]["model.norm.weight"] = wrong
    index_path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rf"index\.json has model\.norm\.weight in {wrong}, but it is in {right}"):
        HfCheckpoint(target)


@pytest.mark.parametrize(
    "content",
    ["[]", "null", "{}", *(f'{{"weight_map": {value}}}' for value in ('["a"]', "null", '{"a": 3}', '{"a": ["b"]}'))],
)
def test_an_index_of_another_form_is_refused_by_its_name(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        HfCheckpoint(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        HfCheckpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot read .*config\.json"):
        read_config(tmp_path)


def test_nothing_to_write_is_an_error(source, tmp_path):
    with pytest.raises(CheckpointError, match="no tensors"):
        write_checkpoint(tmp_path / "out", [], source)
    twice = [("a", torch.zeros(1)), ("a", torch.zeros(1))]
    with pytest.raises(CheckpointError, match="a is written twice"):
        write_checkpoint(tmp_path / "out", twice, source)


def test_where_a_link_stands_the_checkpoint_is_written_to_where_it_leads(source, tmp_path):
    """Injected: the name is a link to an earlier checkpoint on another disk; then to one that is yet to be made."""
    disk = tmp_path / "disk"
    write_checkpoint(disk / "model", [("old", torch.zeros(1))], source)
    for name, leads_to in (("here", disk / "model"), ("later", disk / "new" / "model")):
        (tmp_path / name).symlink_to(leads_to)
        write_checkpoint(tmp_path / name, random_state(CONFIG).items(), source, overwrite=True)
        assert (tmp_path / name).readlink() == leads_to
        assert_same(read(leads_to), random_state(CONFIG))
    left = {path.name for folder in (tmp_path, disk) for path in folder.iterdir()}
    assert not any(name.startswith(".") for name in left)
