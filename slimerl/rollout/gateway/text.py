"""The model's tokenizer and chat template, as the gateway needs them.

Flows in: a loaded tokenizer. Flows out: text to ids and back, whole or token by token; the template as a function.
Text of a client becomes ids once, when it first comes; what engines sampled never does.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from slimerl.rollout.gateway.conversation import Message
from slimerl.rollout.gateway.replies import Step
from slimerl.rollout.gateway.template import ChatFrame
from slimerl.samples.framing import ChatTemplate

LONG_TEXT = 8192
"""Characters."""


class ModelText:
    """`tokenizer`: a fast one of transformers; may be used from several threads at a time."""

    def __init__(self, tokenizer: Any, stop_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        # The library's own object takes half the time of its wrapper.
        self._fast = tokenizer.backend_tokenizer
        self._reserved = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters)
        self._chat = ChatTemplate(tokenizer)
        self.frame: ChatFrame | None = None
        """None: the model has no chat template."""
        if tokenizer.chat_template:
            stops = {each: tokenizer.convert_ids_to_tokens(each) or "" for each in stop_token_ids}
            self.frame = ChatFrame(self._render, stops)

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Of what `frame` wrote, where messages have no special tokens; or of a client's own text, where it writes them
        itself. `special`: with the tokens that the tokenizer puts around a text."""
        return self._fast.encode(text, add_special_tokens=True).ids if special else self._chat.encode(text)

    def takes_long(self, text: str) -> bool:
        """To encode: more than a few milliseconds."""
        return len(text) >= LONG_TEXT or self._chat.is_masked(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._fast.decode(list(tokens), skip_special_tokens=True)

    def steps(self) -> Step:
        """Decodes one reply token by token: text comes with the token that completes its last character."""
        stream = DecodeStream(skip_special_tokens=True)
        return lambda token: stream.step(self._fast, token) or ""

    def spelt(self, token: int) -> str:
        """One token as text."""
        return self._fast.decode([token], skip_special_tokens=False)

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        begun: bool,
        options: Mapping[str, Any],
    ) -> str:
        wrong = sorted(self._reserved & set(options))
        if wrong:
            raise ValueError(f"{', '.join(wrong)} of chat_template_kwargs is not an option of the template")
        return self._chat.render(messages, tools, begun, options)
