"""From a spec to a gateway, not yet listening.

Flows in: the spec, its tokenizer, the agent loop that waits for programs. Flows out: a `Gateway`.
"""

import asyncio
import secrets

from slimerl.rollout.agents.policy import Generates
from slimerl.rollout.gateway.desk import Desk
from slimerl.rollout.gateway.elsewhere import Elsewhere
from slimerl.rollout.gateway.external import ExternalAgents
from slimerl.rollout.gateway.front import Gateway
from slimerl.rollout.gateway.sampler import TurnSampler
from slimerl.rollout.gateway.template import TemplateError
from slimerl.rollout.gateway.text import ModelText
from slimerl.rollout.parts import Parts
from slimerl.rollout.prompts import read_rows
from slimerl.rollout.shares import is_given, name_of_session
from slimerl.rollout.tokenizer import PromptTokenizer, TokenizerError
from slimerl.spec import RunSpec


async def build_gateway(
    spec: RunSpec,
    tokenizer: PromptTokenizer,
    agents: ExternalAgents,
    dispatcher: Generates,
    parts: Parts,
    key: str,
    process: int = 0,
) -> Gateway:
    """
    Args:
        parts: of samples that no task asked for.
        key: that programs show.
        process: number of the rollout process.

    Raises:
        TokenizerError: the chat template cannot be gone on with.
        DataError: the data cannot be read any more.
    """
    text = checked_text(tokenizer)
    # a turn may have to wait for a weight sync, and for the training of a step where engines share its GPUs
    request_s = spec.deadlines.batch_s
    sampler = TurnSampler(dispatcher, agents.sessions, parts, spec.data.max_prompt_tokens, request_s)
    desk = Desk(agents, sampler, text, spec.rollout.temperature, spec.name)
    texts = await asyncio.to_thread(_texts, spec)
    if spec.rollout.processes == 1:
        return Gateway(key, desk, texts, spec.data.system_prompt)
    agents.new_name = lambda: name_of_session(process, secrets.randbits(64))
    agents.is_given = is_given
    elsewhere = Elsewhere(process, spec.rollout.processes, spec.run_dir, key, request_s)
    return Gateway(key, desk, texts, spec.data.system_prompt, elsewhere)


def checked_text(tokenizer: PromptTokenizer) -> ModelText:
    """Raises TokenizerError: the chat template cannot be gone on with."""
    text = ModelText(tokenizer.library, tokenizer.stop_token_ids)
    try:
        if text.frame is not None:
            text.frame.check()
    except TemplateError as error:
        raise TokenizerError(f"agent.kind external: {error}; take another template for the model") from error
    return text


def _texts(spec: RunSpec) -> dict[tuple[bool, str], str]:
    paths = [(False, spec.data.train_path), (True, spec.data.eval_path)]
    return {(held_out, row.row_id): row.prompt for held_out, path in paths if path for row in read_rows(path)}
