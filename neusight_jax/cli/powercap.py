"""`neusight-jax powercap`: which cap or clock for this model?"""

from __future__ import annotations

from typing import Annotated

from neusight_jax.cli.console import answer, busy, plot_to
from neusight_jax.cli.options import (
    AsJson,
    JobOptions,
    MachineGpu,
    Model,
    PlotFile,
    ReportFile,
    WorkloadCheckpoint,
    WorkloadOptions,
    option,
    takes_workload,
)
from neusight_jax.errors import InputError


@takes_workload
def powercap(
    model: Model,
    gpu: MachineGpu = None,
    *,
    load: WorkloadOptions,
    job: JobOptions,
    caps: Annotated[str | None, option("Caps of a board, e.g. 200W:400W:11.", metavar="LO:HI:N")] = None,
    clocks: Annotated[str | None, option("Locked clocks, e.g. 1GHz:2GHz:6.", metavar="LO:HI:N")] = None,
    slo: Annotated[str | None, option("Most time: tpot, ttft or step, e.g. 'tpot<=50ms'.", metavar="TARGET")] = None,
    fleet_power: Annotated[str | None, option("Watts of a fleet, e.g. 100kW.", metavar="WATTS")] = None,
    most: Annotated[int, option("Machines of the fleet, 0 = any number.")] = 0,
    checkpoint: WorkloadCheckpoint = None,
    plot: PlotFile = None,
    report: ReportFile = None,
    as_json: AsJson = False,
) -> None:
    """Speed, watts and joules a token over caps of a GPU's power and over locked clocks, with the knee.

    The knee is the cap with the least joules a token. With --slo, the best is the cap or clock with the least joules
    that keeps the target; with --fleet-power, the one with the most tokens a second within so many watts.
    """
    from neusight_jax.cli.predict import used_for
    from neusight_jax.cli.workloads import machine_of, numbers, work_of
    from neusight_jax.hardware.cluster import gpu_of
    from neusight_jax.power_curves import power_curve

    if most < 0:
        raise InputError(f"--most is {most}, expected a whole number of machines, 0 = any number")
    if most and fleet_power is None:
        raise InputError("--most is of a fleet; give --fleet-power too")
    fleet_w = None if fleet_power is None else numbers("--fleet-power", fleet_power, [fleet_power], "power_w")[0]
    if fleet_w is not None and not 0.0 < fleet_w < float("inf"):
        raise InputError(f"--fleet-power is {fleet_power}, expected watts above 0, e.g. 100kW")
    work = work_of(model, load, job)
    name, machine = machine_of(work, gpu, job)
    used = used_for(work, gpu, name, gpu_of(machine), checkpoint)
    with busy("capping"):
        curve = power_curve(
            used.predictor,
            machine,
            work,
            caps_w=_spaced("--caps", caps, "power_limit_w"),
            clocks_hz=_spaced("--clocks", clocks, "clock_limit_hz"),
            target=_target(slo),
            fleet_w=fleet_w,
            most=most,
            gpu_name=name,
            notes=used.notes,
        )
    plot_to(plot, curve)
    answer(curve, as_json, report, checkpoint=used.checkpoint)


def _spaced(flag: str, text: str | None, name: str) -> list[float]:
    """`LO:HI:N` as N values, even; one value as it is; none where nothing is said."""
    import numpy as np

    from neusight_jax.cli.workloads import numbers

    if text is None:
        return []
    parts = text.split(":")
    if len(parts) not in (1, 3):
        raise InputError(f"{flag} {text!r}: expected LO:HI:N, such as 200W:400W:11, or one value")
    low, *rest = numbers(flag, text, parts[:2], name)
    if not rest:
        return [low]
    count = numbers(flag, text, parts[2:])[0]
    if count % 1 or not 2 <= count <= 1000:
        raise InputError(f"{flag} {text!r}: {parts[2]} values, expected a whole number from 2 to 1000")
    return [float(value) for value in np.linspace(low, rest[0], int(count))]


def _target(text: str | None) -> tuple[str, float] | None:
    from neusight_jax.cli.workloads import targets_of
    from neusight_jax.power_curves import TARGETS

    if text is None:
        return None
    expected = "one of tpot<=TIME, ttft<=TIME and step<=TIME, e.g. 'tpot<=50ms'"
    targets = targets_of(text, TARGETS, expected)
    if len(targets) != 1:
        raise InputError(f"--slo {text!r}: expected {expected}")
    [(name, seconds)] = targets.items()
    if not seconds > 0.0:
        raise InputError(f"--slo {text!r}: expected a time above 0, e.g. 'tpot<=50ms'")
    return name, seconds
