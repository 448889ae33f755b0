"""All that is checked before anything starts. Apart from the parts, which are also asked alone, at less cost."""

from slimerl.algorithms.custom import CustomFunctionError
from slimerl.conductor.preflight.agent import agent_faults
from slimerl.conductor.preflight.data import data_faults
from slimerl.conductor.preflight.disk import disk_faults
from slimerl.conductor.preflight.machine import machine_faults, version_faults
from slimerl.conductor.preflight.model import model_faults
from slimerl.conductor.preflight.paths import path_faults
from slimerl.conductor.preflight.reward import reward_faults
from slimerl.conductor.preflight.scored import critic_faults
from slimerl.spec import RunSpec
from slimerl.training.capabilities import detect
from slimerl.training.needs import unsupplied


def preflight(spec: RunSpec) -> list[str]:
    """All faults of the spec on this machine, in the order in which they would strike.

    Where paths are refused nothing else is told. What can be checked only with a sound model (prompts with its
    tokenizer, memory, disk space) waits until it is.
    """
    if refused := path_faults(spec):
        return refused
    capabilities = detect()
    faults = [*version_faults(spec), *_algorithm_faults(spec)]
    config, of_model = model_faults(spec, capabilities)
    faults += of_model
    of_critic = list(critic_faults(spec))
    faults += of_critic
    if of_critic:
        of_model = [*of_model, *of_critic]
    faults += data_faults(spec, config)
    faults += agent_faults(spec)
    faults += reward_faults(spec)
    faults += disk_faults(spec, None if of_model else config)
    faults += machine_faults(spec, None if of_model else config, capabilities)
    return faults


def _algorithm_faults(spec: RunSpec) -> list[str]:
    """Of what the algorithm needs, the user's own functions among it."""
    try:
        return unsupplied(spec.algorithm)
    except CustomFunctionError as error:
        return [str(error)]
