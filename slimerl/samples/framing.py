"""A conversation in the words of the model's chat template, and its tokens: the one way to either.

Flows in: a tokenizer of transformers, messages. Flows out: the text that the template writes, and its ids.
Invariants: special tokens stand where the template writes them and nowhere else: what a message says is text, also
where it reads like a special token (`<|im_end|>`); without such a message the ids are those of the template's text as
it stands; whatever goes wrong inside the template, which is a program of the checkpoint, is told as a fault of it.

How: what reads like a special token in a message is masked before the template sees it. In the template's text all
special tokens are therefore its own. They are marked, the masks are lifted, and a twin of the tokenizer that takes
special tokens for text, but knows the marks, encodes the whole. Masks and marks are random: nobody can write them.
"""

import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slimerl.samples.rows import DataError

_SHOWN = 60
"""Characters of a prompt in an error."""

Message = Mapping[str, Any]


@dataclass(frozen=True)
class _Twin:
    """`own`: ids of marks → of the special tokens that they stand for."""

    tokenizer: Any
    own: Mapping[int, int]


class ChatTemplate:
    """`tokenizer`: of transformers, with a chat template. May be used from several threads if that may."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = {each.content: each for each in tokenizer.added_tokens_decoder.values() if each.special}
        self._added = [added[text] for text in sorted(added, key=len, reverse=True)]
        self._numbers = {each.content: number for number, each in enumerate(self._added)}
        # of texts that begin alike the longest, as tokenizers find them
        self._special = re.compile("|".join(re.escape(each.content) for each in self._added) or r"(?!)")
        self._mask, self._mark = f"qm{secrets.token_hex(8)}x", f"qr{secrets.token_hex(8)}x"
        self._masked = re.compile(self._mask + r"(\d+)z")
        self._lock = threading.Lock()
        self._found: _Twin | None = None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        begun: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation, for `encode` alone: masks may stand in it.

        Args:
            tools: as JSON schemas, which the template may tell of.
            begun: up to where the next answer begins, not to the end of the last one.
            options: of the template.

        Raises:
            Exception: whatever the template raises.
            ValueError: it changes what a message says where that reads like a special token.
        """
        text = self._tokenizer.apply_chat_template(
            self._guarded(messages),
            tools=self._guarded(tools) if tools else None,
            add_generation_prompt=begun,
            tokenize=False,
            **self._guarded(options or {}),
        )
        if text.lower().count(self._mask) != text.count(self._mask):
            raise ValueError("it writes in capitals what reads like a special token; leave that out of the messages")
        return text

    def is_masked(self, text: str) -> bool:
        """Does a message say something in it that reads like a special token? It takes longer to encode then."""
        return self._mask in text

    def encode(self, text: str) -> list[int]:
        """Ids of what `render` gave, or of a part of it."""
        if not self.is_masked(text):
            return self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        twin = self._twin()
        marked = self._special.sub(lambda found: f"{self._mark}{self._numbers[found[0]]}z", text)
        whole = self._masked.sub(lambda found: self._added[int(found[1])].content, marked)
        return [twin.own.get(each, each) for each in twin.tokenizer.encode(whole, add_special_tokens=False).ids]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """As `encode`, of many: tokenizers are fast in bulk alone."""
        encoded = self._tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return [self.encode(text) if self.is_masked(text) else ids for text, ids in zip(texts, encoded, strict=True)]

    def _guarded(self, said: Any) -> Any:
        if isinstance(said, str):
            return self._special.sub(lambda found: f"{self._mask}{self._numbers[found[0]]}z", said)
        if isinstance(said, Mapping):
            return {self._guarded(key): self._guarded(value) for key, value in said.items()}
        return [self._guarded(each) for each in said] if isinstance(said, list | tuple) else said

    def _twin(self) -> _Twin:
        with self._lock:
            if self._found is None:
                self._found = self._made_twin()
            return self._found

    def _made_twin(self) -> _Twin:
        # Imported here: few conversations need it.
        from tokenizers import AddedToken, Tokenizer

        twin = Tokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
        twin.no_padding()
        twin.no_truncation()
        twin.encode_special_tokens = True
        own = {}
        for number, each in enumerate(self._added):
            mark = f"{self._mark}{number}z"
            twin.add_tokens([AddedToken(mark, lstrip=each.lstrip, rstrip=each.rstrip, normalized=False)])
            own[int(twin.token_to_id(mark) or 0)] = self._tokenizer.convert_tokens_to_ids(each.content)
        return _Twin(twin, own)


def framed(chat: ChatTemplate, prompt: str, system_prompt: str | None, tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """One user turn, behind a system turn where there is one, as `ChatTemplate.render` gives it.

    Args:
        tools: as JSON schemas, which the template may tell of.

    Raises:
        DataError: the template is not valid, or refuses these turns.
    """
    turns = [{"role": "user", "content": prompt}]
    if system_prompt is not None:
        turns.insert(0, {"role": "system", "content": system_prompt})
    try:
        return chat.render(turns, tools)
    except Exception as error:
        begin = prompt if len(prompt) <= _SHOWN else f"{prompt[:_SHOWN]}…"
        turned = "with data.system_prompt and the prompt" if system_prompt is not None else "with the prompt"
        said = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            f"the chat template fails {turned} {begin!r}: {said}; correct the checkpoint's chat_template.jinja, "
            f"{'drop data.system_prompt, ' if system_prompt is not None else ''}or set data.chat_template: false"
        ) from error
