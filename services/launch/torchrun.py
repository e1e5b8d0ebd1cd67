"""Under torchrun: a rank becomes one node. Nodes meet in the store of torchrun's agent.

Each rank makes a key of its own and puts the public half there, so no secret travels; all trust each other's. When a
rank dies, torchrun starts all anew (`--max-restarts`), in another part of the store. Blocking, before any event loop.
"""

from __future__ import annotations

import os
from pathlib import Path

from asyncfabric.control import read_keys
from asyncfabric.control.ipc_folder import make_private
from asyncfabric.control.keys import trust_file
from asyncfabric_services.exits import EnvironmentUnfit
from asyncfabric_services.launch.launcher import LaunchedNode
from asyncfabric_services.launch.local import free_port
from asyncfabric_services.launch.plan import DIRECTORY, NodePlan, plan_nodes
from asyncfabric_services.launch.ranks import ELSEWHERE, LOOPBACK, attach_launcher, node_of, own_address
from asyncfabric_services.launch.record import ClusterRecord, clusters_folder, make_folder, save_record
from asyncfabric_services.launch.spec import ClusterSpec
from asyncfabric_services.settings.keys import SettingsError, all_keys

__all__ = ["attach_launcher", "own_node"]


def own_node(spec: ClusterSpec, folder: Path | None, name: str) -> NodePlan:
    """Return the node that this rank is, with all that it needs to join; waits for the keys of all ranks.

    Raises SettingsError when there is no such node or there are several directories, EnvironmentUnfit without a store.
    """
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    plan = node_of(spec, name, rank, ranks)
    if sum(one.role == DIRECTORY for one in plan_nodes(spec)) > 1:
        raise SettingsError(
            f"{spec.name} has several directories, which share one key: under torchrun each rank has a key of its own, "
            "and all start anew when one ends, so state one directory"
        )
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise EnvironmentUnfit("torchrun serves no store here: start it with --rdzv-backend=c10d")
    from torch.distributed.distributed_c10d import PrefixStore  # the one use of torch here
    from torch.distributed.rendezvous import rendezvous

    shared, _, _ = next(rendezvous("env://", rank, ranks))
    # The agent's store outlives a restart of all ranks, and so would addresses of the earlier ones.
    store = PrefixStore(f"asyncfabric/{os.environ['TORCHELASTIC_RESTART_COUNT']}", shared)
    place = folder or clusters_folder() / spec.name
    make_private(place)
    keys = make_folder(place / f"rank-{rank}")
    public = read_keys(keys).public
    store.set(f"key/{rank}", f"{public} role={plan.role}")
    trusted = [store.get(f"key/{other}").decode() for other in range(ranks)]
    trust_file(keys).write_text("\n".join(trusted))
    alone = os.environ.get("LOCAL_WORLD_SIZE") == str(ranks)
    host = LOOPBACK if alone else own_address(os.environ.get("MASTER_ADDR", ELSEWHERE))
    bind = all_keys()["cluster.bind"].variable
    variables = {bind: f"tcp://{host}:0", all_keys()["cluster.keys"].variable: str(keys)}
    if plan.role == DIRECTORY:
        variables[bind] = f"tcp://{host}:{free_port(host)}"
        http = free_port(host)
        variables[all_keys()["http.port"].variable] = str(http)
        link = f"{variables[bind]}#curve={public}"
        mine = LaunchedNode(plan.name, plan.group, plan.role, "running", f"http://{host}:{http}", link)
        store.set("directory", link)
        how = "end torchrun, or start it with as many ranks as another file has nodes"
        save_record(place, ClusterRecord("torchrun", spec, [mine], {"how": how}))
    return plan.given(variables).joined(store.get("directory").decode())
