"""A fine-tuning run on ranks of the pool, as the trainer role makes it, that may be asked to stop."""

from pathlib import Path

from slimerl.spec import RunSpec


def fine_tune(spec: RunSpec, ask_after: int | None = None) -> list[int]:
    """The steps that were made; `ask_after`: the file appears while this step is recorded."""
    import megatron_patches

    megatron_patches.apply()
    from slimerl.training import assembly, parallel
    from slimerl.training.capabilities import detect
    from slimerl.training.checkpoint import resume
    from slimerl.training.checkpoint.checkpointer import Checkpointer
    from slimerl.training.checkpoint.directory import STOP_FILE
    from slimerl.training.checkpoint.identity import identity
    from slimerl.training.clock import SilentLog
    from slimerl.training.loop import Run, train

    here = detect()
    grid = parallel.start(spec.training.parallel, here, here.device(0), 60, spec.seed)
    policy = assembly.build_policy(spec, grid, here)
    source, syncer = assembly.without_engines(spec, policy)
    same_run = identity(spec)
    found = resume.find(spec, grid, same_run)
    if found is not None:
        source.restore(resume.load(found, policy.state, spec, grid))
    done = 0 if found is None else found.step
    made: list[int] = []

    def record() -> dict[str, float]:
        made.append(done + len(made) + 1)
        if made[-1] == ask_after and grid.is_first:
            Path(spec.run_dir / STOP_FILE).touch()
        return {}

    checkpoints = Checkpointer(spec, policy.state, grid, source.state, same_run, done)
    export = lambda: policy.export(spec.export_dir)  # noqa: E731
    train(Run(spec, policy.trainer, source, syncer, SilentLog(), export, record, checkpoints, done))
    return made
