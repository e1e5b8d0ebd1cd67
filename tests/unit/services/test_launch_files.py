"""What `asyncfabric up` prints, and which node a rank becomes: text and values, nothing is started."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from asyncfabric_services.cli import asyncfabric
from asyncfabric_services.launch.example import EXAMPLE
from asyncfabric_services.launch.plan import plan_nodes
from asyncfabric_services.launch.ranks import node_of, scheduler_around
from asyncfabric_services.launch.slurm_script import script_of
from asyncfabric_services.launch.spec import ClusterSpec, spec_of
from asyncfabric_services.settings.keys import SettingsError


def mixed(**slurm: object) -> ClusterSpec:
    large = {"cpus": 3.5, "gpus": 1, "memory": "16GiB"}
    nodes = {"directory": {}, "router": {}, "prefill": {"count": 2, "resources": large}, "decode": {"count": 1}}
    return spec_of({"name": "chat", "nodes": nodes, "launcher": {"slurm": slurm}})


def test_the_example_is_a_cluster() -> None:
    printed = CliRunner().invoke(asyncfabric, ["up", "--example"])
    assert printed.output == EXAMPLE
    assert [plan.name for plan in plan_nodes(spec_of(tomllib.loads(EXAMPLE)))] == [
        "directory-0",
        "prefill-0",
        "decode-0",
        "decode-1",
        "router-0",
    ]


def test_the_script_for_slurm_has_a_component_for_resources_and_a_step_for_each_node(
    tmp_path: Path,
) -> None:
    text = script_of(mixed(options=["--time=1:00"], setup=["module load x"]), tmp_path / "a b.toml")
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""
    options = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    first, second = options[: options.index("hetjob")], options[options.index("hetjob") + 1 :]
    assert {"--time=1:00", "--ntasks=3", "--cpus-per-task=1"} <= set(first)
    assert set(second) == {"--time=1:00", "--ntasks=2", "--cpus-per-task=4", "--gpus-per-task=1", "--mem-per-cpu=4096M"}
    steps = [line.split() for line in text.splitlines() if line.startswith("keep ")]
    assert [step[1] for step in steps] == ["directory-0", "prefill-0", "prefill-1", "decode-0", "router-0"]
    assert {step[1]: step[2] for step in steps}["prefill-1"] == "--het-group=1"
    assert '--nodelist="$SLURMD_NODENAME"' in steps[0]
    assert "module load x" in text
    assert "a b.toml'" in text


def test_a_rank_is_the_node_of_its_place_or_of_its_name() -> None:
    spec = mixed()
    assert [node_of(spec, "", rank, 5).name for rank in range(5)] == [plan.name for plan in plan_nodes(spec)]
    assert node_of(spec, "decode-0", 0, 1).role == "decode"
    with pytest.raises(SettingsError, match="chat has 5 nodes, and 4 ranks were started"):
        node_of(spec, "", 0, 4)
    with pytest.raises(SettingsError, match=r"no node 'decode-7'; did you mean decode-0\?"):
        node_of(spec, "decode-7", 0, 1)


def test_what_is_around_is_found_by_its_variables() -> None:
    assert scheduler_around({"SLURM_PROCID": "0"}) == "local"  # a batch script, which is no step
    assert scheduler_around({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}) == "slurm"
    assert scheduler_around({"RANK": "0", "TORCHELASTIC_RUN_ID": "x"}) == "torchrun"


def test_wrong_files_are_usage_errors(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('name = "chat"\n[nodes.directory]\n[launcher.slrum]\n')
    done = CliRunner().invoke(asyncfabric, ["up", str(file), "--print", "slurm"])
    assert done.exit_code == 2
    assert "launcher.slrum: there is no such launcher; did you mean slurm?" in done.output
    assert CliRunner().invoke(asyncfabric, ["up"]).exit_code == 2
