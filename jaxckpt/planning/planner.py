"""Makes the plan of a configured run, on CPU, without allocating any of it."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxckpt import config as cf
from jaxckpt.build import build_unopened
from jaxckpt.errors import PlanError
from jaxckpt.planning import bandwidth, guards, report
from jaxckpt.planning.bandwidth import Rate, Rates
from jaxckpt.planning.budget import COPIES_ON_DISK, Budget, Choice, bounded, refine
from jaxckpt.planning.choosing import choose, device_parts, device_use, gradient_bytes, least_staging, process_bytes
from jaxckpt.planning.flops import count_flops
from jaxckpt.planning.gpu import GpuPlan, compile_for, read_plan
from jaxckpt.planning.limits import budget_of, device_limit, file_system, host_limit, nvme_limit, snapshot_limit
from jaxckpt.planning.nearest import placement_settings, saving_settings, snapshots_that_fit
from jaxckpt.planning.report import PlanReport, Use, tier_bytes
from jaxckpt.planning.subject import Subject, outline_of, subject_of
from jaxckpt.planning.targets import Target, target_named
from jaxckpt.state import tree
from jaxckpt.state.memory import GroupSize
from jaxckpt.state.plan import Placement
from jaxckpt.state.train_state import TrainState
from jaxckpt.update.choose import compiler_options
from jaxckpt.update.moved import stored

_NOT_COMPILED = "the step was not compiled: activations are not counted; give --target"


@dataclass(frozen=True)
class Wanted:
    """What the plan is for, beside the configuration."""

    target: str | None = None
    """None: arithmetic alone, without a compiler"""
    devices: int | None = None
    """of all processes together; None: mesh.cpu_devices, or 1"""
    device_memory: str | None = None
    host_memory: str | None = None
    rates: Mapping[str, str | None] = field(default_factory=dict)
    """of the fields of Rates: texts such as 25GB/s"""


def make_plan_report(config: cf.RunConfig, wanted: Wanted) -> PlanReport:
    """The plan of the run that `config` describes; neither its run directory nor any accelerator is touched.

    Raises PlanError (or another JaxckptError) where there is nothing to plan: a model that cannot be laid out, a
    compiler that is not there. What does not fit is no error: the report's `problems` say it.
    """
    logging.getLogger("jax").setLevel(logging.ERROR)
    target = None if wanted.target in (None, "cpu") else target_named(wanted.target or "")
    processes = config.distributed.num_processes or 1
    devices = wanted.devices or (config.mesh.cpu_devices or 1) * processes
    if devices % processes:
        raise PlanError(f"--devices {devices}: must be a multiple of distributed.num_processes, {processes}")
    local = config.model_copy(
        update={
            "mesh": config.mesh.model_copy(update={"cpu_devices": devices}),
            "distributed": cf.Distributed(),
            "resume": "latest",
        }
    )
    return _Planner(local, wanted, target, devices, processes).make()


class _Planner:
    def __init__(
        self, config: cf.RunConfig, wanted: Wanted, target: Target | None, devices: int, processes: int
    ) -> None:
        self.config, self.wanted, self.target = config, wanted, target
        self.devices, self.processes = devices, processes
        self.local_devices = devices // processes
        self.compiled: dict[Placement, dict[str, GpuPlan]] = {}
        self.process_bytes = process_bytes()
        self.budget = budget_of(config)
        self.device_limit, self.device_source = device_limit(self.budget, wanted.device_memory, target)
        is_here = wanted.target == "cpu"
        self.host_limit, self.host_source = host_limit(
            self.budget, wanted.host_memory, is_here=is_here, local_devices=self.local_devices
        )
        self.nvme_limit, self.nvme_source = nvme_limit(config)
        self.notes: list[str] = []

    def make(self) -> PlanReport:
        subject = self._subject()
        groups = report.state_groups(subject.plan)
        programs = self._compile(subject)
        uses = self._uses(subject, groups, programs)
        problems = report.problems_of(uses, programs)
        is_marking = self.wanted.target != "cpu"  # as NvmeStep has it
        traffic = report.traffic_of(
            groups,
            programs if self.target else {},
            {name: part.times for name, part in subject.programs.items()},
            gradient_bytes=subject.buffers.gradients,
            disk=replace(
                subject.disk_bytes,
                read=subject.disk_bytes.read // self.processes,
                written=subject.disk_bytes.written // self.processes,
            ),
            microbatches=self.config.optimizer.accumulation_steps,
            is_marking=is_marking,
        )
        rates = self._rates(subject.placement)
        flops = sum(part.times * count_flops(part.traced.jaxpr) for part in subject.programs.values())
        return PlanReport(
            target=self.wanted.target or "any device",
            devices=self.devices,
            processes=self.processes,
            placement=subject.placement,
            groups=groups,
            uses=uses,
            programs=programs,
            traffic=traffic,
            rates=rates,
            step=report.step_time(flops, self.devices, traffic, rates),
            steps=self.config.steps,
            problems=problems,
            nearest=self._nearest(subject, uses) if any(not use.fits for use in uses) else (),
            notes=[*self._notes(uses, programs, tier_bytes(stored(groups), "nvme") * is_marking), *self.notes],
        )

    # ------------------------------------------------------------------------------------------------ the subject

    def _subject(self) -> Subject:
        budget = self.budget
        if budget is None:
            return self._build(self.config.placement)
        with build_unopened(self.config.model_copy(update={"placement": cf.Placement()})) as on_device:
            outline = outline_of(on_device)
        choose_for = lambda working: self._choose(outline, budget, working)
        build = lambda placement: self._build(_as_config(placement, self.config.placement))
        if self.target is None or budget.device is None:
            return build(choose_for(0).placement)
        choice, _ = refine(choose_for, lambda placement: self._peak(build(placement)), budget.device)
        return build(choice.placement)

    def _build(self, placement: Any) -> Subject:
        with build_unopened(self.config.model_copy(update={"placement": placement})) as run:
            return subject_of(run)

    def _choose(self, outline: tuple[TrainState, Any], budget: Budget, working: int) -> Choice:
        return choose(
            self.config,
            *outline,
            budget,
            host_bytes=self.process_bytes,
            working_bytes=working,
            local_devices=self.local_devices,
        )

    # ------------------------------------------------------------------------------------------------ the compiler

    def _compile(self, subject: Subject) -> dict[str, GpuPlan]:
        if self.wanted.target is None:
            return {}
        if subject.placement not in self.compiled:
            self.compiled[subject.placement] = {
                name: self._compile_one(part.traced, subject.plan) for name, part in subject.programs.items()
            }
        return self.compiled[subject.placement]

    def _compile_one(self, traced: Any, plan: TrainState) -> GpuPlan:
        if self.target is None:
            compiled = traced.lower().compile()
            return read_plan(compiled, target="cpu", devices=self.devices)
        options = compiler_options(plan, "gpu")
        return compile_for(self.target, traced, devices=self.devices, memory_bytes=self.device_limit, options=options)

    def _peak(self, subject: Subject) -> int:
        return sum(device_parts(subject, self._compile(subject)).values())

    # ------------------------------------------------------------------------------------------------ the sums

    def _uses(self, subject: Subject, groups: Sequence[GroupSize], programs: Mapping[str, GpuPlan]) -> list[Use]:
        where = {"local_devices": self.local_devices}
        host = report.host_use(
            groups,
            subject.buffers,
            self._saving(),
            process_bytes=self.process_bytes,
            programs=programs if self.target else {},
            limit=self.host_limit,
            limit_source=self.host_source,
            **where,
        )
        device = device_use(self.config, subject, programs, self.device_limit, self.device_source)
        if self.wanted.target == "cpu":  # one memory for both
            parts = {k: v for k, v in host.parts.items() if k not in ("state", "gradients")}
            device, host = (
                None,
                Use("host", {"devices": device.total * self.local_devices, **parts}, host.limit, host.limit_source),
            )
        generations = COPIES_ON_DISK["state, two generations"] * report.on_disk_bytes(groups, self.local_devices)
        snapshot_room, snapshot_source = snapshot_limit(self.config, generations)
        disks = report.disk_uses(
            groups,
            self._saving(),
            snapshot_room=snapshot_room,
            snapshot_source=snapshot_source,
            nvme_room=self.nvme_limit,
            nvme_source=self.nvme_source,
            **where,
        )
        return [*([device] if device else []), host, *disks]

    def _saving(self) -> report.Saving:
        s = self.config.snapshots
        return report.Saving(s.staging_bytes, s.restore_bytes, s.keep + s.keep_best)

    def _rates(self, placement: Placement) -> Rates:
        option = lambda name: f"--{name.replace('_', '-')}"
        given = {k: bandwidth.parse_rate(option(k), text) for k, text in self.wanted.rates.items() if text}
        if self.target is not None:
            rates = bandwidth.published(self.target)
        else:
            rates = bandwidth.measured_here(self.devices) if self.wanted.target == "cpu" else Rates()
        if placement.nvme_dir and not (given.get("disk_read") and given.get("disk_write")):
            rates = bandwidth.with_given(rates, self._disk_rates(placement.nvme_dir))
        return bandwidth.with_given(rates, given)

    def _disk_rates(self, directories: Sequence[str]) -> dict[str, Rate | None]:
        """Those of one of the directories, times their number; a note, and none, where it cannot be measured."""
        if absent := [d for d in directories if not Path(d).is_dir()]:
            self.notes.append(
                f"{', '.join(absent)}: not there now; give --disk-read and --disk-write for the time of a step"
            )
            return {}
        try:
            measured = bandwidth.measure_disk(directories[0])
        except PlanError as e:
            self.notes.append(str(e))
            return {}
        count = len({file_system(d) for d in directories})
        source = f"measured, times {count}" if count > 1 else "measured"
        read, write = (Rate(rate.per_s * count, source) for rate in measured)
        return {"disk_read": read, "disk_write": write}

    # ------------------------------------------------------------------------------------------------ ways out

    def _nearest(self, subject: Subject, uses: Sequence[Use]) -> list[str]:
        """Settings with which the run would fit, by arithmetic and with what the compiler has said of the rest, or why there
        are none. Only what is another setting than the one given."""
        device = next((u for u in uses if u.name == "device"), None)
        if self.wanted.target == "cpu" or device is None:
            return []
        groups, least = report.state_groups(subject.plan), least_staging(subject.plan)
        wrong = {u.name: u for u in uses if not u.fits}
        keep = snapshots_that_fit(wrong.pop("snapshots", None), self.config.snapshots.keep)
        if not wrong:
            return keep
        if list(wrong) == ["host"]:
            host, (_, whole) = wrong["host"], report.saved_bytes(groups, self.local_devices)
            # That costs less than to move any more of the state. Another process may be a little larger than this one.
            host = replace(host, limit=(host.limit or 0) - (16 << 20))
            if found := saving_settings(host, bounded(whole, self.config.snapshots.restore_bytes), least):
                return found + keep
        lasting = tier_bytes(groups, "device") + gradient_bytes(self.config, groups)
        working = 0 if device.is_lower_bound else max(0, device.total - lasting)
        budget = Budget(device.limit, self.host_limit, self.nvme_limit if self.config.placement.nvme_dir else 0)
        try:
            choice = self._choose((subject.plan, subject.batch), budget, working)
        except PlanError as e:
            return str(e).splitlines() + keep
        new, old = (tiers_of(placement, subject.plan) for placement in (choice.placement, subject.placement))
        if self.budget is not None or new == old:
            return keep
        return placement_settings(choice.placement, subject.placement) + keep

    def _notes(self, uses: Sequence[Use], programs: Mapping[str, GpuPlan], marked_bytes: int) -> list[str]:
        notes = []
        if not programs:
            notes.append(_NOT_COMPILED)
        pinned = next((u.parts.get("state", 0) + u.parts.get("gradients", 0) for u in uses if u.name == "host"), 0)
        if self.target is not None and (gib := guards.pool_gib(pinned, {})) is not None:
            notes.append(f"the run sets {guards.POOL}={gib}; XLA's default is 64")
        if marked_bytes:
            notes.append(
                f"{report.size(marked_bytes)} of what a step moves to each device is there once more for its fingerprints; "
                "CPUs do that only for a save"
            )
        return notes


def tiers_of(placement: Placement, plan: TrainState) -> list[str]:
    """The tier of each leaf, which two placements may say in different words, and how they stream."""
    return [placement.tier(path, x) for path, x in tree.flatten(plan).items()] + [str(placement.bucket_bytes)]


def _as_config(placement: Placement, section: Any) -> Any:
    return cf.Placement(
        params=placement.params,
        master=placement.master,
        opt_state=placement.opt_state,
        grads=placement.grads,
        paths=dict(placement.paths),
        nvme_dir=list(placement.nvme_dir) or None,
        nvme_cache_bytes=section.nvme_cache_bytes if placement.nvme_dir else None,
        bucket_bytes=placement.bucket_bytes,
    )
