"""The trainer's log-probabilities of one answer of an engine, with and without its record; runs on a rank."""

from pathlib import Path

import numpy as np
import torch

from slimerl.spec.schema import AlgorithmSpec, OptimizerSpec, ParallelSpec
from slimerl.training.training_sample import TrainingSample


def logprobs_with_and_without(model_path: Path, sample: TrainingSample) -> list[np.ndarray]:
    """[with the record, without], each [sampled tokens]."""
    import megatron_patches

    megatron_patches.apply()
    from slimerl.algorithms import algorithm_of
    from slimerl.training import batches, batching, capabilities, model, model_config, optimizer, weights
    from slimerl.training import parallel as grids
    from slimerl.training.routing_replay import RoutingReplay
    from slimerl.training.step import PolicyTrainer

    here, sizes = capabilities.detect(), ParallelSpec()
    grid = grids.start(sizes, here, here.device(0), timeout_s=60, seed=1)
    hf = model_config.read_config(model_path)
    arguments = model_config.model_arguments(hf)
    config = model_config.transformer_config(arguments, sizes, "fp32", here, replays_routing=True)
    where = weights.model_map(hf, sizes, here)
    bare = model.build_chunks(arguments, config, here, where.vocabulary_rows(arguments.vocab_size))
    weights.load_weights(bare, model_path, where, grid.rank)
    chunks = model.wrap_for_training(bare, config)
    adam = optimizer.build_optimizer(OptimizerSpec(), chunks, torch.float32)
    schedule = optimizer.build_schedule(OptimizerSpec(), 1, adam)
    routing = RoutingReplay(chunks, "r3")
    trainer = PolicyTrainer(chunks, adam, schedule, algorithm_of(AlgorithmSpec()), grid, routing=routing)
    shape = batching.routed_shape(arguments)
    packs = [batches.pack([sample], 1.0, batches.PackForm(routed=each)) for each in (shape, None)]
    return [trainer.logprobs([each])[0].numpy() for each in packs]
