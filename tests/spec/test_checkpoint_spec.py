"""Local checkpoints are refused where no run could go on from them, or never would."""

import pytest

from slimerl.spec.load import SpecError, spec_from_tree


def spec(checkpoint, **sections):
    tree = {
        "name": "c",
        "model": {"path": "model"},
        "data": {"train_path": "data.jsonl"},
        "training": {"steps": 100, "prompts_per_step": 8},
        "checkpoint": checkpoint,
    }
    return spec_from_tree(tree | sections, "test")


REFRESHED = {"name": "grpo", "kl_coef": 0.1, "reference_refresh_steps": 2}


@pytest.mark.parametrize(
    ("checkpoint", "sections", "told"),
    [
        ({"local_dir": "disk"}, {}, r"checkpoint\.local_dir = disk must be absolute"),
        ({"local_dir": "/d", "local_every_steps": 10}, {}, r"= 10 must be less than checkpoint\.every_steps = 10"),
        ({"local_dir": "/d", "every_steps": 0}, {}, r"must be less than checkpoint\.every_steps = 0"),
        (
            {"local_dir": "/d", "local_every_steps": 3},
            {"algorithm": REFRESHED},
            r"local_every_steps = 3 is no multiple of algorithm\.reference_refresh_steps = 2",
        ),
        ({"local_copies": 2}, {}, r"local_copies means nothing without checkpoint\.local_dir"),
        ({"local_dir": "/d", "local_copies": 2}, {}, r"1 trainer ranks do not fill groups of so many nodes"),
        ({"every_steps": 5}, {"algorithm": REFRESHED}, r"checkpoint\.every_steps = 5 is no multiple"),
    ],
)
def test_what_no_run_could_go_on_from_is_refused_with_what_to_set(checkpoint, sections, told):
    with pytest.raises(SpecError, match=told):
        spec(checkpoint, **sections)


def test_local_checkpoints_need_a_directory_and_are_more_frequent_than_the_others():
    assert spec({"every_steps": 1}).checkpoint.local_dir is None
    often = spec({"local_dir": "/dev/shm/c", "every_steps": 10, "local_every_steps": 4}, algorithm=REFRESHED)
    assert often.checkpoint.local_every_steps == 4
