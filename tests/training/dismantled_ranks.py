"""What the test of a model that is let go runs on a rank."""

import gc
import weakref
from pathlib import Path

from checkpoint_ranks import Trained

from slimerl.spec.schema import ParallelSpec


def left_of_a_dismantled_model(model: Path) -> list[str]:
    """After two steps of training, by name."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from slimerl.training.model import dismantle

    trained = Trained(model, ParallelSpec())
    trained.train(1, 2)
    parts = {
        "wrapper": trained.state.chunks[0],
        "optimizer": trained.state.optimizer,
        "weights": next(trained.state.chunks[0].parameters()),
        "rotary module": next(each for each in trained.state.chunks[0].modules() if isinstance(each, RotaryEmbedding)),
    }
    kept = {name: weakref.ref(part) for name, part in parts.items()}
    dismantle(trained.state.chunks)
    del trained, parts
    gc.collect()
    return [name for name, part in kept.items() if part() is not None]
