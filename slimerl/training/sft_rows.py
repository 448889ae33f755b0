"""The rows of supervised fine-tuning, tokenised: `{"id", "prompt", "response"}` of a JSONL file.

Flows in: the file, the model's tokenizer. Flows out: samples. Invariants: a response ends with the end-of-sequence
token, and only its tokens count. Imports no Megatron: what is checked before a run must not wait for it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slimerl.samples.framing import ChatTemplate, framed
from slimerl.samples.rows import DataError, Row, not_utf8, parse_rows, raise_faults
from slimerl.spec.schema import DataSpec
from slimerl.training.training_sample import TrainingSample


def read_samples(
    path: Path, tokenizer: Any, data: DataSpec, max_tokens: int, target: str = "response"
) -> list[TrainingSample]:
    """Read, check and tokenise a data file.

    Args:
        tokenizer: of transformers.
        max_tokens: the model's longest sequence.
        target: key of what the prompt is answered with.

    Raises:
        DataError: one line per fault: file, line, reason; or the chat template cannot frame a prompt.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            rows = parse_rows(lines, str(path), target)
    except OSError as error:
        raise DataError(f"{path}: cannot read the data: {error.strerror}") from None
    except UnicodeDecodeError:
        with path.open("rb") as raw:
            raise DataError(not_utf8(raw, str(path))) from None
    prompts = _prompts(rows, tokenizer, data)
    responses = tokenizer([row.target for row in rows], add_special_tokens=False)
    samples, faults = [], []
    for row, prompt, response in zip(rows, prompts, responses["input_ids"], strict=True):
        tokens = [*prompt, *response, tokenizer.eos_token_id]
        where = f"{path}:{row.line}"
        if len(prompt) > data.max_prompt_tokens:
            bound = f"data.max_prompt_tokens = {data.max_prompt_tokens}"
            faults.append(f"{where}: the prompt has {len(prompt)} tokens, more than {bound}")
        elif len(tokens) > max_tokens:
            faults.append(f"{where}: the row has {len(tokens)} tokens, the model takes {max_tokens}")
        else:
            samples.append(_sample(row, tokens, len(prompt)))
    raise_faults(faults)
    return samples


def _prompts(rows: Sequence[Row], tokenizer: Any, data: DataSpec) -> list[list[int]]:
    if not data.chat_template:
        return tokenizer([row.prompt for row in rows])["input_ids"]
    chat = ChatTemplate(tokenizer)
    return chat.encode_all([framed(chat, row.prompt, data.system_prompt) for row in rows])


def load_tokenizer(model_path: Path, data: DataSpec) -> Any:
    """The checkpoint's tokenizer.

    Raises:
        DataError: there is none, it names no end-of-sequence token, or it has no chat template though one is wanted.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model_path))
    except Exception as error:
        plain = " ".join(str(error).split())
        raise DataError(f"{model_path}: cannot load its tokenizer: {plain}") from error
    if tokenizer.eos_token_id is None:
        raise DataError(f"{model_path}: the tokenizer names no end-of-sequence token; responses could never end")
    if data.chat_template and not tokenizer.chat_template:
        raise DataError(f"{model_path}: data.chat_template is set, but the tokenizer has no chat template")
    return tokenizer


def _sample(row: Row, tokens: Sequence[int], prompt_length: int) -> TrainingSample:
    response = len(tokens) - prompt_length
    return TrainingSample(
        sample_id=row.row_id,
        tokens=np.asarray(tokens, dtype=np.int32),
        prompt_length=prompt_length,
        sampled=np.ones(response, dtype=bool),
        behavior_logprobs=np.zeros(response, dtype=np.float32),
        advantage=1.0,
    )
