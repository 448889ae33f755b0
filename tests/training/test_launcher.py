"""The command that starts a node's trainer ranks follows from the spec and from what is installed."""

import pytest
from tiny_run import write_spec

from slimerl.spec import load_spec
from slimerl.training.launcher import Place, launcher_command, main, place_of


@pytest.fixture
def spec(tmp_path):
    """Of three nodes with two ranks each."""
    return load_spec(
        write_spec(
            tmp_path,
            training={"parallel": {"data": 6}, "prompts_per_step": 12},
            cluster={"gpus_per_node": 2},
            deadlines={"alive_s": 90.0, "start_s": 200.0, "sync_s": 200.0, "shutdown_s": 12.5},
        )
    )


def options(command: list[str]) -> dict[str, str]:
    """Of the launcher: after its module, before the ranks' own."""
    told = command[3 : command.index("-m", 2)]
    return dict(zip(told[::2], told[1::2], strict=True))


@pytest.mark.parametrize("monitored", [False, True])
def test_every_node_starts_its_ranks_with_the_given_arguments_and_none_again(spec, monitored):
    command = launcher_command(spec, Place("10.0.0.7", 29501, 1), ["spec.yaml", "seed=3"], monitored)
    assert command[-4:] == ["-m", "slimerl.training", "spec.yaml", "seed=3"]
    told = options(command)
    assert (told["--nnodes"], told["--nproc-per-node"], told["--max-restarts"]) == ("3", "2", "0")


def test_torchrun_is_told_where_the_first_node_is_and_which_this_one_is(spec):
    command = launcher_command(spec, Place("10.0.0.7", 29501, 1), [], monitored=False)
    assert command[1:3] == ["-m", "torch.distributed.run"]
    told = options(command)
    assert (told["--master-addr"], told["--master-port"], told["--node-rank"]) == ("10.0.0.7", "29501", "1")


def test_monitors_have_the_deadlines_of_the_spec(spec):
    command = launcher_command(spec, Place(), [], monitored=True)
    assert command[1:3] == ["-m", "slimerl.resilience.rank_monitor"]
    told = options(command)
    assert told["--ft-rank-heartbeat-timeout"] == "90"
    assert told["--rdzv-conf"] == "is_host=1,join_timeout=200,read_timeout=200"
    assert told["--term-timeout"] == told["--workers-stop-timeout"] == "13"


@pytest.mark.parametrize("address", ["10.0.0.7", "node17.cluster", "zeta"])
def test_nodes_meet_at_the_first_and_sort_by_their_numbers(spec, address):
    told = [options(launcher_command(spec, Place(address, 29501, node), [], monitored=True)) for node in range(120)]
    assert {one["--rdzv-endpoint"] for one in told} == {f"{address}:29501"}
    assert [one["--rdzv-conf"].partition(",")[0] for one in told] == ["is_host=1"] + ["is_host=0"] * 119
    names = [one["--local-addr"] for one in told]
    assert names[0] == address
    assert sorted(names) == names


def test_a_node_that_is_told_nothing_is_the_only_one():
    assert place_of({"MASTER_ADDR": "", "NODE_RANK": ""}) == Place("127.0.0.1", 29500, 0)
    assert place_of({"MASTER_ADDR": "node1", "MASTER_PORT": "3", "NODE_RANK": "2"}, nodes=3) == Place("node1", 3, 2)


def test_a_spec_that_cannot_be_used_is_told_before_anything_starts(tmp_path, capsys):
    assert main([str(write_spec(tmp_path)), "training.stepz=3"]) == 2
    assert "training.stepz" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        ({"NODE_RANK": "one"}, "NODE_RANK = 'one' is no whole number"),
        ({"NODE_RANK": "-1"}, "NODE_RANK = '-1' is no whole number"),
        ({"NODE_RANK": "1"}, "NODE_RANK = 1, and the trainer has 1 node, from 0 on"),
        ({"MASTER_PORT": "node1:29500"}, "MASTER_PORT = 'node1:29500' is no whole number"),
    ],
)
def test_a_place_that_the_trainer_does_not_have_is_refused_before_anything_starts(
    tmp_path, capsys, monkeypatch, told, problem
):
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert main([str(write_spec(tmp_path))]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == problem
