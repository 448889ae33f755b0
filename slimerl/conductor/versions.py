"""The versions that slimerl is written against, and those that are installed.

Flows in: nothing. Flows out: pins, and faults where the environment differs. Invariant: the pins are those of the
requirements files.
"""

from importlib.metadata import PackageNotFoundError, version

TRAINER_PINS = {"megatron-core": "0.16.1", "transformers": "5.19.0"}
"""torch is not among them: on GPUs SGLang brings the build that it was compiled against."""
ENGINE_PINS = {"sglang": "0.5.23"}
COPIES_PINS = {"nvidia-resiliency-ext": "0.4.1"}
"""Of checkpoint.local_copies."""


def installed(package: str) -> str | None:
    """The version, without the mark of a build (`2.13.0+cpu` → `2.13.0`); None: not installed."""
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return None


def version_fault(package: str, pin: str) -> str | None:
    """One line where `package` is not installed at `pin`; None: it is."""
    found = installed(package)
    if found == pin:
        return None
    state = "is not installed" if found is None else f"is installed as {found}, not as {pin}"
    files = "requirements-sglang-nodeps.txt" if package in ENGINE_PINS else "requirements.txt"
    if package in COPIES_PINS:
        files = "requirements-gpu.txt"
    return f"{package} {state}; install it as launch/install.sh does (pip install {package}=={pin}, see {files})"
