"""A prompt in the words of the model's chat template. Knows no tokenizer library: it is handed a tokenizer.

Flows in: a prompt's text. Flows out: the text that is tokenised. Invariant: whatever goes wrong inside the template,
which is a program of the checkpoint, is told as a fault of the template.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from slimerl.samples.rows import DataError

_SHOWN = 60
"""Characters of a prompt in an error."""


def framed(tokenizer: Any, prompt: str, system_prompt: str | None, tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """One user turn, behind a system turn where there is one.

    Args:
        tokenizer: of transformers, with a chat template.
        tools: as JSON schemas, which the template may tell of.

    Raises:
        DataError: the template is not valid, or refuses these turns.
    """
    turns = [{"role": "user", "content": prompt}]
    if system_prompt is not None:
        turns.insert(0, {"role": "system", "content": system_prompt})
    try:
        return tokenizer.apply_chat_template(
            turns, tools=list(tools) or None, add_generation_prompt=True, tokenize=False
        )
    except Exception as error:
        begin = prompt if len(prompt) <= _SHOWN else f"{prompt[:_SHOWN]}…"
        turned = "with data.system_prompt and the prompt" if system_prompt is not None else "with the prompt"
        said = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            f"the chat template fails {turned} {begin!r}: {said}; correct the checkpoint's chat_template.jinja, "
            f"{'drop data.system_prompt, ' if system_prompt is not None else ''}or set data.chat_template: false"
        ) from error
