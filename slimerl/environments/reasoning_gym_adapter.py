"""Tasks of reasoning-gym, each a question with a verifier of its own: `environment: reasoning_gym`.

Flows in: rows whose answer is `{"dataset": …, "index": …}` with the options the data set was made with, as `rows`
writes them. Flows out: an `Environment` of one step: the answer is scored, and the episode is done.
"""

import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from reasoning_gym import create_dataset
from reasoning_gym.utils import extract_answer

from slimerl.environments.environment import Environment, OneByOne, Step, Task

REMEMBERED = 64
"""Data sets; making one takes milliseconds."""


def make() -> Environment:
    return OneByOne(_Question)


def rows(dataset: str, size: int, seed: int, **options: Any) -> Iterator[dict[str, str]]:
    """Rows of a data file: the question as prompt."""
    made = create_dataset(dataset, size=size, seed=seed, **options)
    for index in range(size):
        answer = {"dataset": dataset, "index": index, "size": size, "seed": seed, **options}
        yield {"id": f"{dataset}-{seed}-{index}", "prompt": made[index]["question"], "answer": json.dumps(answer)}


class _Question:
    def reset(self, task: Task) -> str:
        options = json.loads(task.answer)
        index = options.pop("index")
        self._dataset = _dataset(json.dumps(options, sort_keys=True))
        self._entry = self._dataset[index]
        return ""

    def step(self, action: str) -> Step:
        """The text in <answer> tags, else all of it."""
        answer = extract_answer(action)
        score = float(self._dataset.score_answer(action.strip() if answer is None else answer, self._entry))
        return Step(reward=score, done=True, correct=score >= 1.0)


@lru_cache(maxsize=REMEMBERED)
def _dataset(options: str) -> Any:
    given = json.loads(options)
    return create_dataset(given.pop("dataset"), **given)
