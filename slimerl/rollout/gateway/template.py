"""From messages to the text that is new in a conversation. Pure: renders by a function that it is given.

Flows in: messages, a chat template as a function. Flows out: the text of a whole conversation, or of what stands
between a reply and the next one.

A template is a function of all messages, and some write the earlier ones otherwise once later ones are there. What was
generated must not change: so only what follows a reply is taken from the template. It renders a short conversation in
which a mark stands for the reply, and what it writes behind the mark is what is new; the length of the real
conversation does not matter.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slimerl.rollout.gateway.conversation import Message

Render = Callable[[Sequence[Message], Sequence[Mapping[str, Any]] | None, bool, Mapping[str, Any]], str]
"""(messages, tools, whether the next reply is begun, options of the template) → text."""

_MARK = "qzREPLYqz"
_QUESTION: Message = {"role": "user", "content": "?"}


class TemplateError(RuntimeError):
    """The model's chat template cannot render this; the message is the template's own where it has one."""


@dataclass
class ChatFrame:
    """`stop_texts`: how the tokens that end a reply are written."""

    render: Render
    stop_texts: Mapping[int, str]
    _closings: dict[str, str] = field(default_factory=dict)
    """By template options: what ends a reply."""

    def check(self) -> None:
        """Raises TemplateError: the template changes what a reply says."""
        self.following({"role": "assistant", "content": _MARK}, [_QUESTION], {}, None)

    def opening(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, options: Mapping[str, Any]
    ) -> str:
        """A whole conversation, up to where its next reply begins."""
        return self._rendered(messages, tools, True, options)

    def following(
        self, reply: Message, new: Sequence[Message], options: Mapping[str, Any], ended_by: int | None
    ) -> str:
        """What stands between the last token of a reply and the first of the next one.

        Args:
            reply: as it was told.
            new: messages after it.
            ended_by: the last token of the reply; what it stands for is not written again.
        """
        marked: Message = {"role": "assistant", "content": _MARK}
        calls = reply.get("tool_calls")
        if calls:
            marked["tool_calls"] = calls
        behind = self._behind_mark([_QUESTION, marked, *new], True, options)
        closing = self._closing(options)
        # behind the mark first come the calls, which the reply's own tokens hold already
        told = self._behind_mark([_QUESTION, marked], False, options) if calls else closing
        if not behind.startswith(told):
            raise TemplateError("the chat template writes the end of a reply otherwise once messages follow it")
        stop = self.stop_texts.get(ended_by, "") if ended_by is not None else ""
        rest = closing[len(stop) :] if stop and closing.startswith(stop) else closing
        return rest + behind[len(told) :]

    def _closing(self, options: Mapping[str, Any]) -> str:
        key = repr(sorted(options.items()))
        if key not in self._closings:
            if len(self._closings) > 64:
                self._closings.clear()  # options are the clients' to choose
            plain: Message = {"role": "assistant", "content": _MARK}
            self._closings[key] = self._behind_mark([_QUESTION, plain], False, options)
        return self._closings[key]

    def _behind_mark(self, messages: Sequence[Message], begun: bool, options: Mapping[str, Any]) -> str:
        text = self._rendered(messages, None, begun, options)
        if text.count(_MARK) != 1:
            raise TemplateError("the chat template does not write what a reply says as it stands")
        return text.partition(_MARK)[2]

    def _rendered(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        begun: bool,
        options: Mapping[str, Any],
    ) -> str:
        try:
            return self.render(messages, tools, begun, options)
        except Exception as error:
            raise TemplateError(f"the chat template: {' '.join(str(error).split())}") from error
