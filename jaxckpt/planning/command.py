"""What `python -m jaxckpt plan` prints."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.table import Table

if TYPE_CHECKING:
    from jaxckpt.planning.report import PlanReport


def run(path: str, overrides: Sequence[str], wanted: Sequence[Any], *, as_json: bool) -> dict[str, Any]:
    """Plans the run of the configuration in `path` and prints that, unless `as_json`; the plan in values of JSON.

    `wanted`: the fields of `jaxckpt.planning.planner.Wanted`. Where no placement fits a budget, there is only why.
    """
    # Before JAX and XLA are loaded: an accelerator that is there stays free, and the compiler keeps its remarks to itself.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from jaxckpt.config import load_config
    from jaxckpt.planning.budget import DoesNotFit
    from jaxckpt.planning.planner import Wanted, make_plan_report

    config = load_config(path, overrides)
    try:
        plan = make_plan_report(config, Wanted(*wanted))
    except DoesNotFit as e:
        if not as_json:
            print(e)
        return {"fits": False, "problems": str(e).splitlines()}
    if not as_json:
        show(plan)
    return plan.to_dict()


def show(plan: "PlanReport", console: Console | None = None) -> None:
    """Prints the plan for a reader."""
    console = console or Console()
    what = f"{plan.devices} x {plan.target}" + (f" in {plan.processes} processes" if plan.processes > 1 else "")
    console.print(f"plan for {what}", highlight=False)
    console.print(memory_table_of(plan))
    console.print(Group(*_lines(plan)), highlight=False, soft_wrap=True)


def memory_table_of(plan: "PlanReport") -> Table:
    """Every memory: what it must hold, and what there is."""
    from jaxckpt.planning.report import size

    table = Table("memory", "for", "bytes", "there is", title="What the run needs")
    each = {"device": "each device", "host": "each process", "snapshots": "run_dir", "nvme": "each process's disks"}
    for use in plan.uses:
        for i, (part, count) in enumerate(use.parts.items()):
            table.add_row(each.get(use.name, use.name) if i == 0 else "", part, size(count), "")
        limit = "" if use.limit is None else f"{size(use.limit)} ({use.limit_source})"
        table.add_row("", "all", ("at least " if use.is_lower_bound else "") + size(use.total), limit, end_section=True)
    return table


def _lines(plan: "PlanReport") -> list[str]:
    from jaxckpt.planning.report import size

    step, rates = plan.step, plan.rates
    seconds = lambda s: "?" if s is None else f"{s:.3g} s"
    rate = lambda r: "unknown" if r is None else f"{r.per_s / 1e9:.4g} G/s, {r.source}"
    t = plan.traffic
    lines = [
        f"a step moves {size(t.h2d)} to each device and {size(t.d2h)} from it"
        + (f", {size(t.disk_read)} from disks and {size(t.disk_write)} to them" if t.disk_read else "")
        + f"; {size(t.exposed_h2d + t.exposed_d2h)} of it beside no computation",
        f"a step takes {seconds(step.step_s)}: computing {seconds(step.compute_s)}, to the device {seconds(step.h2d_s)}, "
        f"from it {seconds(step.d2h_s)}, disks {seconds(step.disk_s)}"
        + (f"; {plan.steps} steps: {plan.steps * step.step_s / 3600:.3g} h" if step.step_s else ""),
        "rates: "
        + "; ".join(f"{name} {rate(getattr(rates, name))}" for name in ("h2d", "d2h", "flops"))
        + ("" if rates.disk_read is None else f"; disks {rate(rates.disk_read)} and {rate(rates.disk_write)}"),
    ]
    lines += [f"note: {note}" for note in plan.notes]
    lines += [f"does not fit: {problem}" for problem in plan.problems]
    if plan.nearest:
        lines += ["nearest:", *(f"  {line}" for line in plan.nearest)]
    return lines
