"""transformers' models with their routers told which experts to take, and random records of such choices."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tiny import Step
from torch.nn import functional


def gates(model: Any) -> dict[int, torch.nn.Module]:
    """The routers, by layer."""
    layers = enumerate(model.model.layers)
    return {number: layer.mlp.gate for number, layer in layers if hasattr(layer.mlp, "gate")}


def chosen(model: Any, tokens: np.ndarray, layers: int, topk: int) -> np.ndarray:
    """[tokens, layers, topk] int16: what the model's own routers choose; zeros in dense layers, as SGLang has them."""
    found = np.zeros((len(tokens), layers, topk), dtype=np.int16)
    handles = [
        gate.register_forward_hook(
            lambda _module, _given, out, layer=layer: found.__setitem__((slice(None), layer), out[2].numpy())
        )
        for layer, gate in gates(model).items()
    ]
    with torch.no_grad():
        model(torch.from_numpy(tokens).long()[None])
    for handle in handles:
        handle.remove()
    return found


def logits_of(model: Any, tokens: np.ndarray, routing: np.ndarray | None) -> torch.Tensor:
    """[tokens, vocabulary], with gradient. `routing` [tokens, layers, topk]: below 0 the router chooses; None: always.

    g_i = I_i·e^{s_i} / Σ_j I_j·e^{s_j}, of DeepSeek's router σ(s_i) in the place of e^{s_i}.
    """
    handles = []
    for layer, gate in gates(model).items():
        wanted = None if routing is None else torch.from_numpy(routing[:, layer].astype(np.int64))
        handles.append(gate.register_forward_hook(_forcing(wanted)))
    out = model(torch.from_numpy(tokens).long()[None]).logits[0]
    for handle in handles:
        handle.remove()
    return out


def _forcing(wanted: torch.Tensor | None) -> Any:
    def forced(gate: Any, given: tuple[torch.Tensor], out: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        own = out[2]
        experts = own if wanted is None else torch.where(wanted < 0, own, wanted)
        hidden = given[0].reshape(-1, given[0].shape[-1])
        scores = functional.linear(hidden, gate.weight).gather(1, experts)
        if hasattr(gate, "e_score_correction_bias"):
            weights = scores.sigmoid() / scores.sigmoid().sum(-1, keepdim=True) * gate.routed_scaling_factor
        else:
            weights = scores.softmax(-1)
        return out[0], weights, experts

    return forced


def with_routing(step: Step, routing: Sequence[np.ndarray | None]) -> Step:
    """The samples with these records [tokens, layers, topk]."""
    return Step(
        [
            replace(sample, routing=None if each is None else each.reshape(len(each), -1))
            for sample, each in zip(step.samples, routing, strict=True)
        ]
    )


def random_routing(step: Step, layers: int, experts: int, topk: int, seed: int = 0) -> list[np.ndarray]:
    """Any experts, for most tokens; the same for the prompt of all samples of a group."""
    random = np.random.default_rng(seed)
    made: list[np.ndarray] = []
    for number, sample in enumerate(step.samples):
        count = len(sample.tokens)
        ids = random.permuted(np.broadcast_to(np.arange(experts), (count, layers, experts)), axis=-1)[..., :topk]
        rows = ids.astype(np.int16)
        rows[random.random(count) < 0.25] = -1
        rows[-1] = -1
        before = made[number - 1] if number else None
        if before is not None and np.array_equal(prompt(sample), prompt(step.samples[number - 1])):
            rows[: sample.prompt_length] = before[: sample.prompt_length]
        made.append(rows)
    return made


def prompt(sample: Any) -> np.ndarray:
    return sample.tokens[: sample.prompt_length]
