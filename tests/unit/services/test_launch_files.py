"""What `asyncfabric up` prints, and which node a rank becomes: text and values, nothing is started."""

from __future__ import annotations

import subprocess
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner

from asyncfabric_services.cli import asyncfabric
from asyncfabric_services.launch import torchrun
from asyncfabric_services.launch.example import EXAMPLE
from asyncfabric_services.launch.kubernetes.objects import cluster_objects
from asyncfabric_services.launch.plan import DIRECTORY_VARIABLE, plan_nodes
from asyncfabric_services.launch.ranks import node_of, scheduler_around
from asyncfabric_services.launch.record import load_record
from asyncfabric_services.launch.slurm import own_node
from asyncfabric_services.launch.slurm_script import script_of
from asyncfabric_services.launch.spec import ClusterSpec, spec_of
from asyncfabric_services.settings.keys import SettingsError, all_keys

BIND = all_keys()["cluster.bind"].variable


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


def test_tasks_of_slurm_meet_at_all_directories_and_come_back_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = {"directory": {"store": "etcd://a:1/chat"}}
    spec = spec_of({"name": "chat", "settings": store, "nodes": {"directory": {"count": 2}, "router": {}}})
    job = {"JOB_ID": "7", "PROCID": "0", "NTASKS": "1", "JOB_NUM_NODES": "1", "SUBMIT_DIR": str(tmp_path)}
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    names = ["router-0", "directory-1", "directory-0"]  # whoever comes first waits for the others
    with ThreadPoolExecutor(len(names)) as tasks:
        nodes = dict(zip(names, tasks.map(lambda name: own_node(spec, tmp_path / "job", name), names), strict=True))
    places = [nodes[name].environment[BIND] for name in ("directory-0", "directory-1")]
    assert len(set(places)) == 2
    links = nodes["router-0"].environment[DIRECTORY_VARIABLE].split(",")
    assert [link.partition("#")[0] for link in links] == places
    assert load_record(tmp_path / "job").links.split(",") == links
    for name in ("directory-1", "directory-0"):  # started again, one at a time
        assert own_node(spec, tmp_path / "job", name) == nodes[name]
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")  # the job is queued again: what it left before does not count
    assert own_node(spec.scaled("directory", 1), tmp_path / "job", "directory-0") != nodes["directory-0"]


def test_torchrun_refuses_directories_that_could_not_share_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    store = {"directory": {"store": "etcd://a:1/chat"}}
    spec = spec_of({"name": "chat", "settings": store, "nodes": {"directory": {"count": 2}}})
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match="chat has several directories, which share one key: under torchrun"):
        torchrun.own_node(spec, None, "")


def test_on_kubernetes_each_directory_has_a_service_of_its_own() -> None:
    groups = {"dir-a": {"role": "directory"}, "dir-b": {"role": "directory"}, "decode": {}}
    document = {
        "name": "chat",
        "settings": {"directory": {"store": "etcd://a:1/chat"}},
        "nodes": groups,
        "launcher": {"kubernetes": {"image": "x"}},
    }
    objects = cluster_objects(spec_of(document))
    services = {each["metadata"]["name"] for each in objects if each["kind"] == "Service"}
    (decode,) = (one for one in objects if one["kind"] == "Deployment" and one["metadata"]["name"] == "chat-decode")
    variables = {one["name"]: one.get("value") for one in decode["spec"]["template"]["spec"]["containers"][0]["env"]}
    hosts = [part.removeprefix("tcp://").partition(":")[0] for part in variables[DIRECTORY_VARIABLE].split(",")]
    assert hosts == ["chat-dir-a", "chat-dir-b"]
    assert set(hosts) <= services
    groups["dir-a"]["count"] = 2
    with pytest.raises(SettingsError, match=r"nodes.dir-a has 2 directories.*write groups of one node each"):
        cluster_objects(spec_of(document))


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
