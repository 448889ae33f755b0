"""Units: what a pipeline stage holds as a whole.

Unit 0 stands before the layers (embedding), 1 to n are the layers, and three more stand behind them: what comes last
(head), the final norm (with multi-token prediction it may be in another stage than the head), and the prediction layer.
"""

from slimerl.resharding.families.table import Block, Table

FIRST = 0


def layer_unit(layer: int) -> int:
    return layer + 1


def last_unit(layers: int) -> int:
    return layers + 1


def norm_unit(layers: int) -> int:
    return layers + 2


def prediction_unit(layers: int) -> int:
    return layers + 3


def unit_count(layers: int) -> int:
    return layers + 4


def blocks_of(table: Table) -> list[tuple[Block, tuple[int, ...]]]:
    """Each distinct block with the units that share it."""
    layers = len(table.layers)
    shared: dict[int, list[int]] = {}
    for layer, block in enumerate(table.layers):
        shared.setdefault(id(block), []).append(layer_unit(layer))
    found: list[tuple[Block, tuple[int, ...]]] = [(table.first, (FIRST,))]
    found += [(table.layers[units[0] - 1], tuple(units)) for units in shared.values()]
    found.append((table.last, (last_unit(layers),)))
    if table.prediction is not None:
        found.append((table.prediction, (prediction_unit(layers),)))
    return found
