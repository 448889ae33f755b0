"""Where the rollout processes of a run keep what another that takes over needs. Pure.

Flows in: the spec, the number of a process. Flows out: directories below RUN_DIR/journal.
Invariant: no two processes write to the same one, and an only process has the whole of it.
"""

from pathlib import Path

from slimerl.rollout.journal_file import JOURNAL_DIR
from slimerl.spec import RunSpec

_LEDGER = "ledger"


def journal_of(spec: RunSpec, process: int) -> Path:
    """Of the samples of a rollout process."""
    directory = spec.run_dir / JOURNAL_DIR
    return directory if spec.rollout.processes == 1 else directory / f"process-{process}"


def ledger_log_of(spec: RunSpec) -> Path:
    """Of the admission ledger of several, which the first has."""
    return spec.run_dir / JOURNAL_DIR / _LEDGER


def needed_to_take_over(spec: RunSpec, process: int) -> list[Path]:
    """Without any of these nothing can take its place."""
    journal = journal_of(spec, process)
    return [journal, ledger_log_of(spec)] if process == 0 and spec.rollout.processes > 1 else [journal]
