"""The bound of a sync to engines on the trainer's own GPUs, against a count of every element of every rank."""

from typing import Any

import numpy as np
import pytest
import torch
from planner_models import BLOCK, DEEPSEEK, DENSE, MOE

from slimerl.resharding.families import family_of
from slimerl.resharding.families.family import PLAIN, Form
from slimerl.resharding.families.scales import BlockScales, scale_name
from slimerl.resharding.layouts import EngineLayout, MegatronLayout
from slimerl.resharding.planner import SyncShape, Topology, make_template
from slimerl.resharding.planner.bounds import colocated_ingress_bound
from slimerl.resharding.tensors import Placement

Masks = dict[str, np.ndarray]


def held(placements: list[Placement], shapes: dict[str, tuple[int, ...]], scales: BlockScales | None) -> Masks:
    """Which elements of which tensor a rank has; a trainer has the scales of its blocks, too."""
    masks: Masks = {}
    for place in placements:
        if place.is_padding:
            continue
        masks.setdefault(place.tensor, np.zeros(shapes[place.tensor], bool))[place.box.slices] = True
        scale = scale_name(place.tensor)
        if scales is not None and scale in shapes:
            box = tuple(slice(scales.blocks(part.start), scales.blocks(part.stop)) for part in place.box.slices)
            masks.setdefault(scale, np.zeros(shapes[scale], bool))[box] = True
    return masks


def merged(ranks: list[Masks]) -> Masks:
    found: Masks = {}
    for masks in ranks:
        for name, mask in masks.items():
            found[name] = found[name] | mask if name in found else mask
    return found


def counted(shape: SyncShape) -> float:
    """Bytes that the fullest node has to take in, over the speed of its NICs."""
    family, config, form = family_of(shape.config), shape.config, shape.form
    tensors = {t.name: t for t in family.logical_tensors(config, shape.dtype, form)}
    shapes = {name: t.shape for name, t in tensors.items()}
    train = [family.megatron_placements(config, shape.train, r, form) for r in range(shape.train.world_size)]
    engine = [family.engine_placements(config, shape.engine, r, form) for r in range(shape.engine.world_size)]
    gpus, per_node = shape.topology.engine_ranks * shape.topology.replicas, shape.topology.gpus_per_node
    most = 0
    for first in range(0, gpus, per_node):
        here = range(first, first + per_node)
        has = merged([held(train[g], shapes, form.scales) for g in here if g < len(train)])
        wants = merged([held(engine[g % len(engine)], shapes, None) for g in here if g < gpus])
        most = max(
            most,
            sum(
                int((mask & ~has.get(name, np.zeros_like(mask))).sum()) * tensors[name].dtype.itemsize
                for name, mask in wants.items()
            ),
        )
    return most / (per_node * shape.topology.nic_bytes_per_s)


SPREAD = EngineLayout(4, 4, 4, replicated_dense=True, replicated_shared=True)
CASES: dict[str, tuple[dict[str, Any], MegatronLayout, EngineLayout, int, int, Form]] = {
    "dense": (DENSE, MegatronLayout(tensor=4, data=2), EngineLayout(2), 4, 2, PLAIN),
    "engines of several nodes": (DENSE, MegatronLayout(pipeline=3, data=4), EngineLayout(4), 3, 2, PLAIN),
    "all in one node": (DENSE, MegatronLayout(tensor=2, data=2), EngineLayout(2), 2, 4, PLAIN),
    "fewer engines than GPUs": (DENSE, MegatronLayout(tensor=4, data=2), EngineLayout(2), 3, 4, PLAIN),
    "a last node that is half full": (DENSE, MegatronLayout(pipeline=3, data=4), EngineLayout(2), 5, 4, PLAIN),
    "experts": (MOE, MegatronLayout(tensor=2, data=4, expert=8, expert_tensor=1), SPREAD, 2, 4, PLAIN),
    "pipeline": (MOE, MegatronLayout(pipeline=3, data=4, expert=4), EngineLayout(4, 2), 3, 4, PLAIN),
    "fp8": (
        DEEPSEEK,
        MegatronLayout(tensor=2, data=4, expert=8, expert_tensor=1),
        SPREAD,
        2,
        2,
        Form(prediction=True, scales=BlockScales(BLOCK)),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_what_the_fullest_node_wants_and_does_not_have(case):
    config, train, engine, replicas, per_node, form = CASES[case]
    topology = Topology(train.world_size, engine.world_size, replicas, per_node)
    shape = SyncShape(config, train, engine, topology, torch.bfloat16, form)
    bound = colocated_ingress_bound(make_template(shape).atoms, topology)
    assert bound == pytest.approx(counted(shape))
    assert (bound > 0) == (case not in ("all in one node", "fewer engines than GPUs"))
