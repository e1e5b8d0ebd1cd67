"""Plans of clusters: every node once, in order, with its own name and port, and settings that `serve` reads back."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfabric_services.launch.launcher import LaunchedNode
from asyncfabric_services.launch.plan import START_ORDER, plan_nodes, scale_changes, stop_order
from asyncfabric_services.launch.record import ClusterRecord, load_record, make_folder, save_record
from asyncfabric_services.launch.spec import ROLES, ClusterSpec, NodeGroup, Resources, SettingsTable, read_spec, spec_of
from asyncfabric_services.settings.keys import SettingsError
from asyncfabric_services.settings.sources import load_settings

NAMES = st.sampled_from(["a", "a-1", "a-1-1", "b9", "decode", "router", "trainer"])
GROUPS = st.builds(
    NodeGroup,
    count=st.integers(0, 5),
    role=st.sampled_from([role for role in ROLES if role != "directory"]),
    engine=st.sampled_from(["", "reference", "vllm"]),
    settings=st.fixed_dictionaries({}, optional={"batch": st.fixed_dictionaries({"chunk_tokens": st.integers(1, 99)})}),
    environment=st.dictionaries(st.sampled_from(["CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"]), st.just("1")),
)
SPECS = st.builds(
    ClusterSpec,
    name=NAMES,
    nodes=st.dictionaries(NAMES, GROUPS, max_size=6).map(lambda groups: {**groups, "directory": NodeGroup()}),
    settings=st.just({"model": {"layers": 3, "name": "small"}, "http": {"drain": "5s"}}),
)


@settings(max_examples=40)
@given(SPECS)
def test_each_node_is_planned_once_and_in_order(spec: ClusterSpec) -> None:
    plans = plan_nodes(spec)
    assert len({plan.name for plan in plans}) == len(plans) == sum(group.count for group in spec.nodes.values())
    order = [START_ORDER.index(plan.role) for plan in plans]
    assert order == sorted(order)
    assert plans[0].role == "directory"
    ends = stop_order({plan.name: plan.role for plan in plans})
    assert [START_ORDER.index(spec.role_of(name.rpartition("-")[0])) for name in ends] == order[::-1]


@settings(max_examples=40)
@given(SPECS)
def test_a_node_reads_its_settings_from_its_plan(spec: ClusterSpec) -> None:
    for plan in plan_nodes(spec):
        node = plan.joined("ipc:///run/directory.sock")
        read = load_settings(environment=node.environment).settings
        group = spec.nodes[plan.group]
        assert (read.model.layers, read.model.name, read.http.drain) == (3, "small", 5.0)
        assert read.batch.chunk_tokens == group.settings.get("batch", {}).get("chunk_tokens", 256)
        assert read.cluster.directory == ("" if plan.role == "directory" else "ipc:///run/directory.sock")
        assert group.environment.items() <= node.environment.items()
        if group.engine and plan.role in ("prefill", "decode", "router"):
            assert read.engine.kind == group.engine
        assert (read.http.port == 0) == (plan.role != "router")
        if plan.role == "trainer":
            assert node.environment["WORLD_SIZE"] == str(group.count)


@pytest.mark.parametrize(("settings", "first"), [({}, 8000), ({"http": {"port": 9000}}, 9000)])
def test_routers_of_one_host_count_up_from_the_first_port(settings: SettingsTable, first: int) -> None:
    spec = ClusterSpec("a", {"directory": NodeGroup(), "router": NodeGroup(count=3, settings=settings)})
    ports = [load_settings(environment=plan.environment).settings.http.port for plan in plan_nodes(spec)]
    assert ports == [0, first, first + 1, first + 2]


@settings(max_examples=40)
@given(SPECS, st.data())
def test_scaling_keeps_who_runs_fills_gaps_and_stops_the_last_first(spec: ClusterSpec, data: st.DataObject) -> None:
    group = data.draw(st.sampled_from(sorted(set(spec.nodes) - {"directory"}) or ["directory"]))
    numbers = data.draw(st.sets(st.integers(0, 7)))  # with gaps where nodes were drained
    running = [f"{group}-{number}" for number in numbers]
    count = 1 if group == "directory" else data.draw(st.integers(0, 7))
    plans, ending = scale_changes(running, spec.scaled(group, count), group)
    starting = [plan.name for plan in plans]
    assert len({*running, *starting} - set(ending)) == count
    assert not starting or not ending
    assert ending == sorted(running, key=lambda name: -int(name.rpartition("-")[2]))[: len(ending)]
    free = [f"{group}-{number}" for number in range(20) if number not in numbers]
    assert starting == free[: len(starting)]
    assert all((plan.group, plan.role) == (group, spec.role_of(group)) for plan in plans)


@settings(max_examples=40)
@given(SPECS)
def test_a_spec_and_its_record_are_read_back_as_written(spec: ClusterSpec) -> None:
    assert spec_of(msgspec.to_builtins(spec)) == spec
    directory = LaunchedNode("directory-0", "directory", "directory", "running")
    record = ClusterRecord("local", spec, [directory], {"at": "x"})
    assert msgspec.json.decode(msgspec.json.encode(record), type=ClusterRecord) == record


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[nodes.directory]\ncoutn = 1", "nodes.directory.coutn: there is no such key; did you mean count?"),
        ("[node.directory]", "node: there is no such key; did you mean nodes?"),
        ("[nodes.decod]", "nodes.decod: 'decod' is no role of a node; did you mean decode?"),
        ("[nodes.decode]\ncount = 1", "a cluster has a node of role directory, got 0: add [nodes.directory]"),
        ("[nodes.directory]\ncount = 2", "2 nodes of role directory have one table when they have the same"),
        (
            "[nodes.directory]\nsettings.directory.store = 'etcd://a:1/x'\n"
            "[nodes.spare]\nrole = 'directory'\nsettings.directory.store = 'etcd://b:1/x'",
            "got etcd://a:1/x, etcd://b:1/x",
        ),
        ("[nodes.directory]\ncount = -1", "nodes.directory.count is -1, expected 0 to 4096"),
        (
            "[nodes.directory.resources]\ncpu = 1",
            "directory.resources.cpu: there is no such key; did you mean cpus?",
        ),
        ("[nodes.directory.resources]\nmemory = '1 elephant'", "'1 elephant' is not a size"),
        (
            "[nodes.directory]\n[settings.model]\nlayer = 1",
            "model.layer: there is no such setting; did you mean model.layers",
        ),
        ("[nodes.directory]\n[settings.http]\nport = 'x'", "settings.http.port: expected an integer, got 'x'"),
        ("[nodes.directory]\n[settings.cluster]\nbind = 'tcp'", "settings.cluster.bind is not for the file"),
        ("[nodes.Directory]\nrole = 'directory'", "nodes.Directory: 'Directory' is no name"),
        ("[nodes.directory", "is not TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_the_name_of_what_is_wrong(text: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(f"name = 'chat'\n{text}\n")
    with pytest.raises(SettingsError) as caught:
        read_spec(file)
    assert str(caught.value).startswith(str(file))
    assert expected in str(caught.value)


def test_the_section_of_a_launcher_is_checked_by_its_own_struct() -> None:
    class Section(msgspec.Struct):
        image: str = "x"

    spec = spec_of({"name": "a", "nodes": {"directory": {}}, "launcher": {"k": {"imag": "y"}}})
    with pytest.raises(SettingsError, match=r"launcher.k.imag: there is no such key; did you mean image\?"):
        spec.launcher_section("k", Section)
    assert spec.launcher_section("other", Section) == Section()


def test_the_record_is_found_by_another_process_and_is_of_this_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "chat"
    keys = make_folder(folder)
    assert make_folder(folder) == keys  # a second start keeps the keys
    spec = ClusterSpec("chat", {"directory": NodeGroup(resources=Resources(memory="1GiB"))})
    record = ClusterRecord("local", spec, [LaunchedNode("directory-0", "directory", "directory", "running")])
    save_record(folder, record)
    assert load_record(folder) == record
    assert folder.stat().st_mode & 0o77 == keys.stat().st_mode & 0o77 == 0
