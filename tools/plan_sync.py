"""Plans a weight sync without running anything: bytes of every NIC, lower bound, expected time, as table and picture.

    python tools/plan_sync.py configs/deepseek_v3_671b.yaml
    python tools/plan_sync.py configs/models/deepseek_v3_671b.json --replicas 16 --picture sync.svg \\
        --trainer tensor=4,pipeline=8,data=8,expert=32,expert_tensor=1,stage_layers=8/8/8/8/8/8/7/6 \\
        --engine tensor=32,expert=32,data_attention=32,replicated_dense=true,replicated_shared=true

The first form takes models and layouts from a run spec (a checkpoint that is not here has its config.json in
models/NAME.json beside the spec, as for `slimerl check --plan-only`), the second from a config.json and the options.
"""

import json
import os
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from slimerl.conductor.plan_only import published_configs, sync_shape
from slimerl.resharding.coverage import CoverageError
from slimerl.resharding.families import ConfigError
from slimerl.resharding.families.family import Form
from slimerl.resharding.families.scales import BlockScales
from slimerl.resharding.layouts import EngineLayout, LayoutError, MegatronLayout, ModuleNames
from slimerl.resharding.planner import Plan, SyncShape, Topology, make_plan
from slimerl.simulation.network_sync import Conditions, SyncTime, simulate_sync
from slimerl.spec import SpecError, load_spec
from slimerl.training.capabilities import detect
from slimerl.training.engine_layout import engine_config
from slimerl.training.model_config import UnsupportedModel, read_config

console = Console()
errors = Console(stderr=True)


def parsed(text: str, kind: type) -> dict[str, Any]:
    """`key=value` pairs, separated by commas, as arguments of a layout. Raises BadParameter naming the keys it has."""
    allowed = {field.name for field in fields(kind)}
    found: dict[str, Any] = {}
    for pair in filter(None, text.split(",")):
        key, _, value = pair.partition("=")
        if key not in allowed:
            raise typer.BadParameter(f"{key!r} is no key of {kind.__name__}; it has {', '.join(sorted(allowed))}")
        if key in found:
            raise typer.BadParameter(f"{key} is given twice; leave one out")
        try:
            found[key] = _value(key, value, kind)
        except (ValueError, KeyError):
            raise typer.BadParameter(
                f"{key}={value}: {_FORMS.get(key, 'it is a whole number, true or false')}"
            ) from None
    return found


_FORMS = {
    "stage_layers": "it is the layers of each stage, with / between stages and | between chunks: 3/2|2/1",
    "names": f"it is one of {', '.join(ModuleNames)}",
    "expert_map": "a map of experts cannot be given here",
}


def _value(key: str, text: str, kind: type) -> Any:
    """Raises ValueError or KeyError."""
    if key == "stage_layers":
        chunks = tuple(tuple(map(int, chunk.split("/"))) for chunk in text.split("|"))
        if min(map(min, chunks)) < 0:
            raise ValueError
        return chunks
    if key == "names":
        return ModuleNames(text)
    if key == "expert_map":
        raise ValueError
    switch = isinstance(next(field.default for field in fields(kind) if field.name == key), bool)
    return {"true": True, "false": False}[text] if switch else int(text)


def shape_from_config(
    path: Path, trainer: str, engine: str, replicas: int, prediction: bool, gpus_per_node: int, nic: float
) -> SyncShape:
    """What a config.json and options say. Raises ConfigError or LayoutError."""
    train = MegatronLayout(**parsed(trainer, MegatronLayout))
    server = EngineLayout(**parsed(engine, EngineLayout))
    topology = Topology(train.world_size, server.world_size, replicas, gpus_per_node, nic)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds {type(config).__name__}, not an object")
    return SyncShape(config, train, server, topology, form=Form(prediction, BlockScales.of(config)))


def shape_from_spec(path: Path, gpus_per_node: int | None, nic: float) -> SyncShape:
    """What a run spec says, as the sync planner wants it; for colocated engines as if they stood apart."""
    spec = load_spec(path)
    if (spec.model.path / "config.json").exists():
        config = read_config(spec.model.path)
        shape = sync_shape(spec, config, engine_config(spec, config), detect())
    else:
        shape = sync_shape(spec, *published_configs(spec, path.parent))
    per_node = shape.topology.gpus_per_node if gpus_per_node is None else gpus_per_node
    return replace(shape, topology=replace(shape.topology, gpus_per_node=per_node, nic_bytes_per_s=nic))


def describe(plan: Plan, plan_s: float, healthy: SyncTime, jittery: SyncTime) -> Table:
    """The numbers that decide."""
    trainer, bounds = plan.topology.trainer_ranks, plan.template.bounds
    sent, received = plan.nic_bytes
    operations = np.add(*plan.nic_operations)
    table = Table("", "trainer", "engine", title=f"plan {plan.shape.key}")

    def row(
        name: str, trainer_values: NDArray[np.int64] | None, engine_values: NDArray[np.int64], scale: float
    ) -> None:
        cells = []
        for values in (trainer_values, engine_values):
            cells.append("" if values is None else " / ".join(f"{v / scale:.4g}" for v in _range(values)))
        table.add_row(name, *cells)

    table.add_row(
        "GPUs", str(trainer), f"{plan.topology.engine_ranks} × {plan.topology.replicas - len(plan.topology.dead)}"
    )
    row("GB sent by a NIC, least / mean / most", sent[:trainer], sent[trainer:], 1e9)
    row("GB received by a NIC", None, received[trainer:], 1e9)
    row("operations of a NIC", operations[:trainer], operations[trainer:], 1)
    table.add_row("bound, s", f"{bounds.egress_s:.4f}", f"{bounds.ingress_s:.4f} (NVLink {bounds.fan_out_s:.4f})")
    table.add_section()
    table.add_row("one copy of the model, GB", f"{plan.template.model.wire_bytes / 1e9:.3f}")
    table.add_row("parcels, rounds", f"{len(plan.parcels)}, {plan.rounds}")
    table.add_row("bound, s", f"{bounds.seconds:.4f}", f"by the {bounds.binding}")
    table.add_row("simulated, s", f"{healthy.seconds:.4f}", f"{healthy.ratio:.3f} × bound")
    table.add_row("simulated with 4 % jitter, s", f"{jittery.seconds:.4f}", f"{jittery.ratio:.3f} × bound")
    table.add_row("time to plan, s", f"{plan_s:.3f}")
    return table


def _range(values: NDArray[np.int64]) -> tuple[float, float, float]:
    return float(values.min()), float(values.mean()), float(values.max())


WIDTH, HEIGHT, MARGIN = 960, 150, 40


def picture(plan: Plan) -> str:
    """An SVG: a column for every NIC, what it sends and what it receives, and the bound as a line."""
    trainer = plan.topology.trainer_ranks
    sent, received = plan.nic_bytes
    limit = plan.template.bounds.seconds * plan.topology.nic_bytes_per_s
    top = max(float(sent.max()), float(received.max()), limit)
    panels = [
        ("trainer sends", sent[:trainer]),
        ("engines receive", received[trainer:]),
        ("engines pass on", sent[trainer:]),
    ]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + 2 * MARGIN}" '
        f'height="{len(panels) * (HEIGHT + MARGIN) + MARGIN}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, (title, values) in enumerate(panels):
        base = (number + 1) * (HEIGHT + MARGIN)
        step = WIDTH / len(values)
        parts.append(f'<text x="{MARGIN}" y="{base - HEIGHT - 8}">{title}: most {values.max() / 1e9:.3f} GB</text>')
        for index, value in enumerate(values.tolist()):
            height = HEIGHT * value / top
            parts.append(
                f'<rect x="{MARGIN + index * step:.2f}" y="{base - height:.2f}" width="{max(step * 0.85, 0.5):.2f}" '
                f'height="{height:.2f}" fill="{("#4878a8", "#5a9e6f", "#c0804a")[number]}"/>'
            )
        line = base - HEIGHT * limit / top
        parts.append(
            f'<path d="M{MARGIN} {line:.2f}H{MARGIN + WIDTH}" stroke="#a03030" stroke-dasharray="6 3"/>'
            f'<text x="{MARGIN + WIDTH - 150}" y="{line - 4:.2f}" fill="#a03030">bound {limit / 1e9:.3f} GB</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def main(
    target: Annotated[Path, typer.Argument(metavar="SPEC", help="Run spec (YAML), or a model's config.json.")],
    trainer: Annotated[str, typer.Option(help="With a config.json: sizes of the trainer.")] = "",
    engine: Annotated[str, typer.Option(help="With a config.json: sizes of one engine.")] = "",
    replicas: Annotated[int | None, typer.Option(min=1, help="With a config.json: engines; default 1.")] = None,
    prediction: Annotated[bool, typer.Option(help="With a config.json: send the prediction layer too.")] = False,
    gpus_per_node: Annotated[int | None, typer.Option(min=1, help="Default: the spec's, with a config.json 8.")] = None,
    nic_gb_s: Annotated[float, typer.Option(min=0.001, max=1e6, help="Speed of a NIC, one per GPU, each way.")] = 50.0,
    picture_path: Annotated[Path | None, typer.Option("--picture", help="Write an SVG of every NIC's bytes.")] = None,
) -> None:
    """Print the plan of a sync: bytes per sender and receiver, operations, bound, expected time."""
    of_config = {"--trainer": trainer, "--engine": engine, "--replicas": replicas, "--prediction": prediction}
    if target.suffix != ".json" and (given := [option for option, value in of_config.items() if value]):
        raise typer.BadParameter(f"{', '.join(given)}: with a run spec its own sizes count; set them in {target}")
    if picture_path is not None and (picture_path.is_dir() or not os.access(picture_path.parent, os.W_OK)):
        raise typer.BadParameter(f"--picture {picture_path}: no file can be written there; make its directory first")
    nic = nic_gb_s * 1e9
    try:
        if target.suffix == ".json":
            shape = shape_from_config(target, trainer, engine, replicas or 1, prediction, gpus_per_node or 8, nic)
        else:
            shape = shape_from_spec(target, gpus_per_node, nic)
        start = time.perf_counter()
        plan = make_plan(shape)
        plan_s = time.perf_counter() - start
        console.print(describe(plan, plan_s, simulate_sync(plan), simulate_sync(plan, Conditions(jitter=0.04))))
        if picture_path is not None:
            picture_path.write_text(picture(plan))
            console.print(f"picture: {picture_path}")
    except (ConfigError, CoverageError, LayoutError, OSError, SpecError, UnsupportedModel) as error:
        errors.print(f"not planned: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None


if __name__ == "__main__":
    typer.run(main)
