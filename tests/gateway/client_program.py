"""An agent program as anybody has it: it knows the `openai` package and two environment variables."""

import json
import os
from typing import Any

import openai

TOOLS = [{"type": "function", "function": {"name": "count", "parameters": {"type": "object", "properties": {}}}}]


def main(question: str, turns: int) -> list[str]:
    """Ask, stream the reply, run the tools that it calls, go on. Returns the replies."""
    client = openai.OpenAI(base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    messages: list[Any] = [{"role": "user", "content": question}]
    replies = []
    for turn in range(turns):
        text, calls = "", []
        stream = client.chat.completions.create(
            model="gpt-4o", messages=messages, tools=TOOLS, max_tokens=24, stream=turn % 2 == 0
        )
        if turn % 2 == 0:
            for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                calls += [call.model_dump() for call in chunk.choices[0].delta.tool_calls or []]
        else:
            text = stream.choices[0].message.content or ""
            calls = [call.model_dump() for call in stream.choices[0].message.tool_calls or []]
        messages.append({"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})})
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "1"} for call in calls]
        messages.append({"role": "user", "content": f"And then? {turn}"})
        replies.append(text)
    return replies


if __name__ == "__main__":
    import sys

    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
