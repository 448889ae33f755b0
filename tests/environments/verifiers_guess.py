"""An environment of verifiers, as its users write one: a number to be guessed."""

import verifiers as vf
from datasets import Dataset


class Guess(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        said = int(messages[-1]["content"])
        return [{"role": "user", "content": "higher" if said < int(state["answer"]) else "lower"}]

    @vf.stop
    async def guessed(self, state):
        turns = state["trajectory"]
        return bool(turns) and turns[-1]["completion"][-1]["content"] == state["answer"]


def found(completion, answer, **kwargs):
    return float(completion[-1]["content"] == answer)


def load_environment(max_turns=3):
    examples = [{"question": f"Guess number {number}", "answer": str(10 * number)} for number in range(8)]
    rubric = vf.Rubric(funcs=[found], weights=[1.0])
    return Guess(max_turns=max_turns, dataset=Dataset.from_list(examples), rubric=rubric)
