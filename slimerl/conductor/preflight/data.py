"""The data against the model: every row of every file, as the roles will read it.

Flows in: the spec, the parsed `config.json`. Flows out: faults by file and line.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slimerl.conductor.preflight.agent import announced_tools
from slimerl.rollout.prompts import scan_file, scan_prompts
from slimerl.rollout.tokenizer import PromptTokenizer, TokenizerError
from slimerl.samples.rows import DataError, shown_faults
from slimerl.spec import RunSpec
from slimerl.training.preference_rows import ANSWERS, read_pairs
from slimerl.training.sft_rows import load_tokenizer, read_samples


def data_faults(spec: RunSpec, config: Mapping[str, Any] | None) -> list[str]:
    """Faults of tokenizer and files; without a `config` the rows are read, but not tokenised."""
    tokenizer, faults = None, []
    if config is not None:
        try:
            tokenizer = PromptTokenizer(spec.model.path, spec.data, announced_tools(spec))
        except TokenizerError as error:
            faults.append(str(error))
        else:
            faults += tokenizer.vocabulary_faults(config["vocab_size"])
    for key, path in spec.input_paths.items():
        if key in ("data.train_path", "data.eval_path") or key.startswith("evaluation."):
            faults += _file_faults(key, path, spec, tokenizer)
    if not faults and not spec.uses_engines and config is not None:
        faults += _response_faults(spec, config["max_position_embeddings"])
    return faults


def _file_faults(key: str, path: Path, spec: RunSpec, tokenizer: PromptTokenizer | None) -> list[str]:
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        return [f"{key}: {path} {what}; name a JSONL file (a relative path starts at {Path.cwd()})"]
    targets = ANSWERS if spec.algorithm.trains_on_pairs else ("answer" if spec.uses_engines else "response",)
    rows, faults = scan_file(path, targets[0])
    faults += [fault for target in targets[1:] for fault in scan_file(path, target)[1] if fault not in faults]
    if tokenizer is not None:
        try:
            faults += scan_prompts(rows, tokenizer.encode, spec.data.max_prompt_tokens, str(path))[1]
        except DataError as error:
            faults.append(f"{path}: {error}")
    return shown_faults(faults)


def _response_faults(spec: RunSpec, longest: int) -> Iterator[str]:
    """What the trainer alone looks at: prompt and response together must fit into the model."""
    try:
        tokenizer = load_tokenizer(spec.model.path, spec.data)
    except DataError as error:
        yield f"model.path: {error}"
        return
    for path in (spec.data.train_path, spec.data.eval_path):
        if path is not None:
            try:
                read = read_pairs if spec.algorithm.trains_on_pairs else read_samples
                read(path, tokenizer, spec.data, longest)
            except DataError as error:
                yield from str(error).splitlines()
