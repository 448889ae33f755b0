"""The model's tokenizer as the rollout needs it: prompts to ids, responses to text, the ids that end a response.

Flows in: the checkpoint directory, `spec.data`, the tools that prompts announce. Flows out: ids and text. Responses are
decoded for the reward and for agent loops: token ids are the truth, and text is never turned back into them.
Any thread may call; one at a time has the tokenizer.
"""

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slimerl.samples.framing import ChatTemplate, framed
from slimerl.samples.rows import DataError
from slimerl.spec.schema import DataSpec


class TokenizerError(RuntimeError):
    """The checkpoint's tokenizer cannot serve this spec; the message says what to do."""


class PromptTokenizer:
    """`encode` and `decode` bound to one checkpoint and one way of framing prompts."""

    def __init__(self, model_path: Path, data: DataSpec, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """`tools`: as JSON schemas, for the chat template.

        Raises TokenizerError: no tokenizer, no sound chat template where one is asked for, no end-of-sequence id.
        """
        # Imported here: it takes seconds, and only the role needs it.
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(model_path))
        except Exception as error:
            plain = " ".join(str(error).split())
            raise TokenizerError(f"model.path: {model_path}: cannot load its tokenizer: {plain}") from error
        if data.chat_template and not self._tokenizer.chat_template:
            raise TokenizerError(
                f"{model_path}: data.chat_template is set, but the tokenizer has no chat template; "
                "add chat_template.jinja to the checkpoint or set data.chat_template: false"
            )
        self._data = data
        self._tools = list(tools)
        self._lock = threading.Lock()
        self._model_path = model_path
        self._chat = ChatTemplate(self._tokenizer)
        try:
            self._framed("1")
        except DataError as error:
            raise TokenizerError(f"model.path: {model_path}: {error}") from error
        self.stop_token_ids = stop_token_ids(model_path, self._tokenizer.eos_token_id)
        """Ids that end a response, ascending."""
        if not self.stop_token_ids:
            raise TokenizerError(f"{model_path}: neither tokenizer nor config.json names an end-of-sequence token")

    def vocabulary_faults(self, vocabulary: int) -> list[str]:
        """One line for each id that the model has no row for; none: they agree.

        Args:
            vocabulary: `vocab_size` of the model's `config.json`.
        """
        where = f"model.path: {self._model_path}"
        faults = []
        entries = self._tokenizer.get_vocab()
        token = max(entries, key=entries.__getitem__)
        if entries[token] >= vocabulary:
            faults.append(
                f"{where}: the tokenizer has id {entries[token]} ({token!r}), but config.json says vocab_size = "
                f"{vocabulary}; take the tokenizer that belongs to this model"
            )
        named = {f"end-of-sequence id {each}": each for each in self.stop_token_ids}
        if self._tokenizer.pad_token_id is not None:
            named[f"padding id {self._tokenizer.pad_token_id}"] = self._tokenizer.pad_token_id
        faults += [
            f"{where}: {what} is outside of the vocabulary (vocab_size = {vocabulary}); correct it in config.json, "
            "generation_config.json or tokenizer_config.json"
            for what, each in named.items()
            if not 0 <= each < vocabulary
        ]
        return faults

    def encode(self, prompts: Sequence[str]) -> list[list[int]]:
        """Ids of each prompt, framed as one user turn where `data.chat_template` is set.

        Raises:
            DataError: the chat template refuses a prompt.
        """
        texts = [self._framed(prompt) for prompt in prompts]
        with self._lock:
            # a template writes the special tokens itself; without one the row does, and the tokenizer
            return self._chat.encode_all(texts) if self._data.chat_template else self._tokenizer(texts)["input_ids"]

    def encode_piece(self, text: str, special: bool) -> list[int]:
        """Ids of a text that stands in the middle of others; `special`: special tokens in it are such."""
        with self._lock:
            return self._tokenizer(text, add_special_tokens=False, split_special_tokens=not special)["input_ids"]

    def _framed(self, prompt: str) -> str:
        if not self._data.chat_template:
            return prompt
        return framed(self._chat, prompt, self._data.system_prompt, self._tools)

    def render(self, messages: list[dict[str, str]]) -> str:
        """By the chat template, up to where the next answer begins."""
        return self._chat.render(messages, self._tools)

    @property
    def has_turns(self) -> bool:
        """Prompts are turns of a conversation."""
        return self._data.chat_template

    @property
    def stop_texts(self) -> list[str]:
        """Of `stop_token_ids`."""
        return self._tokenizer.convert_ids_to_tokens(list(self.stop_token_ids))

    @property
    def library(self) -> Any:
        """The tokenizer of transformers that is behind it."""
        return self._tokenizer

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of a response without special tokens."""
        with self._lock:
            return self._tokenizer.decode(list(tokens), skip_special_tokens=True)


def stop_token_ids(model_path: Path, of_tokenizer: int | None) -> tuple[int, ...]:
    """Every end-of-sequence id that the tokenizer, `config.json` or `generation_config.json` names.

    Raises:
        TokenizerError: a file is no JSON object, or what it names are no ids.
    """
    ids = set() if of_tokenizer is None else {of_tokenizer}
    for name in ("config.json", "generation_config.json"):
        path = model_path / name
        if path.is_file():
            ids.update(_named_ids(path))
    return tuple(sorted(ids))


def _named_ids(path: Path) -> list[int]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"model.path: {path}: cannot be read ({error}); correct it") from None
    if not isinstance(tree, dict):
        raise TokenizerError(f"model.path: {path}: holds {type(tree).__name__}, not an object; correct it")
    named = tree.get("eos_token_id")
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if any(isinstance(each, bool) or not isinstance(each, int) for each in ids):
        raise TokenizerError(
            f"model.path: {path}: eos_token_id = {named!r} is neither a number nor a list of numbers; correct it"
        )
    return ids
