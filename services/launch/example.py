"""The file that `asyncfabric up --example` prints: a cluster of one machine without a model to download. A text."""

EXAMPLE = """\
# A cluster of asyncfabric: asyncfabric up cluster.toml
name = "chat"

[settings]                            # of all nodes, as in the configuration file of a node: asyncfabric config show
cluster.rails = "local"               # between hosts: "tcp:eth0", "verbs", "efa" ...
model.name = "chat"                   # what requests call the model
# model.path = "/models/my-llama"     # a checkpoint; without it all nodes run the same small random model

[nodes.directory]                     # a group; its nodes are directory-0, directory-1 ...

[nodes.router]
settings.http.port = 8000             # the OpenAI API; of further routers 8001, 8002 ...

[nodes.prefill]
count = 1
resources = { cpus = 1 }              # gpus = 1, memory = "16GiB", rdma = { "rdma/hca_shared_devices_a" = 1 }

[nodes.decode]
count = 2
# engine = "vllm"                     # pip install 'asyncfabric[vllm]'
# settings.batch.most_running = 64    # of this group alone
# environment = { OMP_NUM_THREADS = "1" }
resources = { cpus = 1 }

# [launcher.local]                    # sections of single launchers
# restarts = 10                       # a node that dies more often within 60s stays dead
"""
