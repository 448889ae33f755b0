"""The trainer role: `torchrun --nproc-per-node N -m slimerl.training RUN_DIR/spec.yaml [KEY=VALUE]…`.

Flows in: the spec, the model, samples. Flows out: the trained model and the record of the run.
Ends with 0 when all steps are done, with 2 where spec, model or data cannot be used, with 143 on SIGTERM.
"""

import logging
import os
import sys
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import megatron_patches
from megatron_patches.device import without_import_warnings
from slimerl.resharding.coverage import CoverageError
from slimerl.resharding.families import ConfigError
from slimerl.resharding.hf_checkpoint import CheckpointError
from slimerl.resharding.layouts import LayoutError
from slimerl.resilience import heartbeat
from slimerl.resilience.deadline import Deadline
from slimerl.resilience.imports import without_collections
from slimerl.resilience.kernel_caches import bounded_kernel_caches
from slimerl.resilience.name_lookups import bounded_lookups
from slimerl.resilience.processes import die_with_parent
from slimerl.resilience.rank_monitor import is_installed
from slimerl.resilience.tied import tied_parent
from slimerl.samples.rows import DataError
from slimerl.spec import RunSpec, SpecError, load_spec
from slimerl.telemetry import trace
from slimerl.telemetry.resources import ResourceMeter, collect
from slimerl.telemetry.run_log import is_evaluated
from slimerl.training.gpu_environment import set_gpu_environment
from slimerl.training.in_process_faults import in_process_faults
from slimerl.training.memory import keep_freed_memory
from slimerl.training.phase_limits import phase_limits
from slimerl.training.termination import end_on_sigterm

if TYPE_CHECKING:
    from slimerl.telemetry import RunLog
    from slimerl.training.assembly import Policy
    from slimerl.training.capabilities import Capabilities
    from slimerl.training.checkpoint.resume import Resumed
    from slimerl.training.in_process import InProcessRestarts
    from slimerl.training.loop import Syncer, Turns
    from slimerl.training.parallel import Grid
    from slimerl.training.rollout_client import RolloutClient
    from slimerl.training.source import Source

COLLECTIVE_MARGIN_S = 60.0
"""Other ranks wait in a collective for what rank 0 waits for; they must not give up first."""


def main(arguments: list[str]) -> int:
    """Run one rank of the trainer; returns its exit code."""
    die_with_parent(tied_parent())
    end_on_sigterm()
    os.environ.update(bounded_lookups())
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if not arguments:
        print("usage: python -m slimerl.training SPEC [KEY=VALUE]…", file=sys.stderr)
        return 2
    try:
        spec = load_spec(Path(arguments[0]), arguments[1:])
    except SpecError as error:
        print(error, file=sys.stderr)
        return 2
    if faults := in_process_faults(spec, torch.cuda.is_available(), is_installed()):
        print("\n".join(faults), file=sys.stderr)
        return 2
    torch.set_num_threads(spec.training.threads_per_rank)
    if torch.cuda.is_available():
        set_gpu_environment(spec.training.parallel)
    else:
        keep_freed_memory()
        os.environ.update(bounded_kernel_caches())
    with without_collections(), without_import_warnings():
        megatron_patches.apply()
        from slimerl.training import parallel
        from slimerl.training.checkpoint.content import ResumeError
        from slimerl.training.model_config import UnsupportedModel
    try:
        _run(spec)
    except (
        CheckpointError,
        ConfigError,
        CoverageError,
        DataError,
        LayoutError,
        ResumeError,
        UnsupportedModel,
    ) as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        parallel.stop()
        heartbeat.stop()
    return 0


def _run(spec: RunSpec) -> None:
    if not spec.resilience.in_process_restarts:
        run_rank(spec)
        return
    from slimerl.training.in_process import InProcessRestarts

    restarts = InProcessRestarts.of_ranks(spec)
    restarts.run(partial(run_rank, spec, restarts))


def run_rank(spec: RunSpec, restarts: "InProcessRestarts | None" = None) -> None:
    """Build everything and train. Every rank calls it. Args: `restarts`: of an attempt that may be followed by another
    one in this process."""
    with without_collections():
        from slimerl.training import assembly
        from slimerl.training.capabilities import detect
        from slimerl.training.checkpoint import resume
        from slimerl.training.checkpoint.checkpointer import Checkpointer
        from slimerl.training.checkpoint.identity import identity
        from slimerl.training.checkpoint.write import ranks_agree_on
        from slimerl.training.clock import SilentLog
        from slimerl.training.loop import Run, train

    capabilities = detect()
    grid = _grid(spec, capabilities, restarts)
    name = f"trainer-{grid.rank}"
    if restarts is None or not restarts.used:
        trace.start(spec.run_dir, name)
    if assembly.shares_gpus(spec, capabilities):
        heartbeat.enter("wait for room")
        with trace.span("wait for room"):
            _wait_for_room(spec, grid.is_first)
    heartbeat.enter("build")
    with trace.span("build"):
        policy = assembly.build_policy(spec, grid, capabilities)
    if restarts is not None:
        restarts.when_left(policy.let_go)
    source, syncer, turns = _source_and_syncer(spec, policy, grid, capabilities)
    heartbeat.enter("resume")
    with trace.span("resume"):
        same_run = identity(spec)
        resumed = resume.find(spec, grid, same_run)
        if resumed is not None:
            source.restore(resume.load(resumed, policy.state, spec, grid))
    done = resumed.step if resumed is not None else 0
    with closing(syncer), _run_log(spec, resumed, restarts) if grid.is_first else nullcontext(SilentLog()) as log:
        resources = partial(_resources, spec.run_dir, ResourceMeter(spec.run_dir, name), grid.is_first, restarts)
        export = partial(policy.export, spec.export_dir)
        last = resume.newest(resumed, spec)
        checkpoints = Checkpointer(spec, policy.state, grid, source.state, same_run, last.shared, last.local)
        compare = assembly.rank_comparison(policy)
        if restarts is not None:
            restarts.when_left(checkpoints.give_up)
        evaluated = ranks_agree_on(is_evaluated(spec.run_dir, done) if grid.is_first else None)
        ends = (log, export, resources, checkpoints)
        train(Run(spec, policy.trainer, source, syncer, *ends, done, turns, compare, evaluated))
        checkpoints.remove_local()
    heartbeat.enter("export")
    # nobody leaves while the model is being written
    dist.barrier()


def _grid(spec: RunSpec, capabilities: "Capabilities", restarts: "InProcessRestarts | None") -> "Grid":
    """Where the ranks meet; of a further attempt, once the rollout role has begun anew."""
    from slimerl.training import parallel

    device = capabilities.device(int(os.environ.get("LOCAL_RANK", "0")))
    if capabilities.cuda:
        torch.cuda.set_device(device)
    limits = spec.deadlines
    if restarts is None or not restarts.used:
        heartbeat.start(spec.run_dir, f"trainer-{os.environ.get('RANK', 0)}", phase_limits(limits), limits.stall_s)
    elif spec.uses_engines and os.environ["RANK"] == "0":
        # before any other rank looks for it
        _connected(spec).begin_anew(spec.run_dir)
    # between two collectives rank 0 may sync, evaluate and wait for a batch, one after the other
    waits_s = limits.start_s + limits.sync_s + 2 * limits.batch_s + COLLECTIVE_MARGIN_S
    meeting_place = None if restarts is None else restarts.meeting_place()
    return parallel.start(spec.training.parallel, capabilities, device, waits_s, spec.seed, meeting_place)


def _source_and_syncer(
    spec: RunSpec, policy: "Policy", grid: "Grid", capabilities: "Capabilities"
) -> "tuple[Source, Syncer, Turns | None]":
    """Where samples come from and weights go to, and the turns that trainer and engines take where they share GPUs."""
    from slimerl.training import assembly

    if not spec.uses_engines:
        return *assembly.without_engines(spec, policy), None
    client = _connected(spec) if grid.is_leader else None
    source, syncer = assembly.with_engines(spec, policy, client)
    if assembly.shares_gpus(spec, capabilities):
        turns = assembly.in_turns(spec, policy, syncer)
        return source, turns, turns
    return source, assembly.repeated(policy, syncer, client), None


def _connected(spec: RunSpec) -> "RolloutClient":
    from slimerl.training.rollout_client import RolloutClient
    from slimerl.training.several_rollouts import SeveralRollouts

    deadline = Deadline("the rollout role to announce itself", spec.deadlines.start_s)
    successor_s = spec.deadlines.start_s if spec.resilience.rollout_restarts else 0.0
    several = spec.rollout.processes
    if several > 1:
        return SeveralRollouts.connect_all(spec.run_dir, deadline, spec.deadlines.request_s, several, successor_s)
    return RolloutClient.connect(spec.run_dir, deadline, spec.deadlines.request_s, successor_s)


def _wait_for_room(spec: RunSpec, is_first: bool) -> None:
    """The engines leave the GPUs before anything of the model is there."""
    from slimerl.training.colocated import wait_for_room

    status = _connected(spec).status if is_first else None
    deadline = Deadline("the engines to leave the GPUs to the trainer", spec.deadlines.start_s)
    wait_for_room(status, spec.engine.replicas, deadline)


def _resources(
    run_dir: Path, meter: ResourceMeter, is_first: bool, restarts: "InProcessRestarts | None"
) -> dict[str, float]:
    """Publish this rank's, and on the first rank collect those of every role."""
    meter.publish()
    counted = {} if restarts is None else {"resilience/in_process_restarts": float(restarts.used)}
    return collect(run_dir) | counted if is_first else {}


def _run_log(spec: RunSpec, resumed: "Resumed | None", restarts: "InProcessRestarts | None") -> "RunLog":
    """The record, which goes on after the checkpoint's step."""
    from slimerl.telemetry import RunLog

    if resumed is None:
        # a run whose only checkpoints went with a node has a record
        return RunLog(spec.run_dir, after_step=-1)
    log = RunLog(spec.run_dir, after_step=resumed.step)
    for rejected in resumed.rejected:
        log.event(resumed.step, "alarm", "checkpoint damaged", rejected)
    if restarts is not None and restarts.used:
        log.event(resumed.step, "alarm", "restarted in process", restarts.text)
    log.event(resumed.step, "note", "resumed", f"from {resumed.directory}")
    return log


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
