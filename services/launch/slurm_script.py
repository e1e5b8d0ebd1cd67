"""The script that `sbatch` takes for a cluster. Pure: text from a spec.

Nodes of equal resources are one component of a heterogeneous job. Each node is a step of its own, in a loop that starts
it again when it dies: Slurm's own restart of a step, while the job goes on.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from asyncfabric_services.launch.plan import NodePlan, plan_nodes
from asyncfabric_services.launch.slurm import SlurmSection
from asyncfabric_services.launch.spec import ClusterSpec, Resources

_HEAD = """\
#!/bin/bash
# The cluster {name}, printed by `asyncfabric up --print slurm`. To start it: sbatch --parsable THIS-FILE
# Each node is a step that is started again when it dies, at most 10 times in 60 s. scancel drains and ends them all.
"""
_BODY = """
cd "$SLURM_SUBMIT_DIR"
folder="$PWD/{name}-$SLURM_JOB_ID"  # on storage that all hosts share: addresses, keys, logs
mkdir -p -m 700 "$folder"
{setup}
keep() {{  # NAME OPTIONS...: run a node as a step until it ends in good order
  local name=$1 tries=0 began=$SECONDS ending="" status; shift
  trap 'ending=1; kill -TERM $step' TERM
  while :; do
    srun --job-name="$name" --nodes=1 --ntasks=1 --exact --kill-on-bad-exit=0 --open-mode=append \\
      --output="$folder/$name.log" "$@" asyncfabric up {file} --launcher slurm --folder "$folder" --node "$name" &
    step=$!
    wait $step; status=$?
    [ -z "$ending" ] || {{ wait $step; return; }}
    [ $status != 0 ] || return 0
    (( SECONDS - began < 60 )) || {{ tries=0; began=$SECONDS; }}
    (( ++tries <= 10 )) || {{ echo "$name ended with status $status, and too often" >&2; return $status; }}
    sleep 1
  done
}}
trap 'kill -TERM $(jobs -p); wait' TERM
{steps}
wait
"""


def script_of(spec: ClusterSpec, file: Path) -> str:
    """Return the script for a cluster whose file is at this path; raises SettingsError for a wrong [launcher.slurm]."""
    section = spec.launcher_section("slurm", SlurmSection)
    plans = plan_nodes(spec)
    components: list[Resources] = []
    for plan in plans:
        if plan.resources not in components:
            components.append(plan.resources)
    lines = ["#SBATCH --requeue", "#SBATCH --signal=B:TERM@60", *(f"#SBATCH {option}" for option in section.options)]
    for index, resources in enumerate(components):
        count = sum(plan.resources == resources for plan in plans)
        options = [*_component(resources, count), *(section.options if index else [])]
        lines += ["#SBATCH hetjob"] * bool(index) + [f"#SBATCH {option}" for option in options]
    steps = "\n".join(
        " ".join(["keep", plan.name, *_step(plan, components.index(plan.resources), len(components)), "&"])
        for plan in plans
    )
    head = _HEAD.format(name=spec.name) + "\n".join([f"#SBATCH --job-name={spec.name}", *lines])
    setup = "\n".join(section.setup)
    return head + _BODY.format(name=spec.name, setup=setup, steps=steps, file=shlex.quote(str(file.absolute())))


def _component(resources: Resources, count: int) -> Iterator[str]:
    yield f"--ntasks={count}"
    yield from _asked(resources, "--gpus-per-task")
    if resources.memory:
        yield f"--mem-per-cpu={-(-resources.memory_bytes // (1 << 20) // _cores(resources))}M"


def _step(plan: NodePlan, component: int, components: int) -> Iterator[str]:
    if components > 1:
        yield f"--het-group={component}"
    yield from _asked(plan.resources, "--gpus")
    if not plan.resources.memory:
        yield "--mem=0"  # shares what the job has
    if plan.role == "directory":  # comes back on the host that the others know
        yield '--nodelist="$SLURMD_NODENAME"'


def _asked(resources: Resources, gpus: str) -> Iterator[str]:
    yield f"--cpus-per-task={_cores(resources)}"
    if resources.gpus:
        yield f"{gpus}={resources.gpus}"


def _cores(resources: Resources) -> int:
    """Return whole cores, at least one."""
    return max(1, -int(-resources.cpus // 1))
