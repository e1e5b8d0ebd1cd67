# ruff: noqa: RUF009  # key() returns a dataclasses.field, made anew at each call
"""Every key of the configuration, with its type, default and range: one dataclass of sections. Reads nothing.

At most 51 keys: a test counts. A key is added here when a service reads it, and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

MOST_KEYS = 51
DURATION, SIZE, KEYS = "duration", "size", "keys"
Duration = Annotated[float, DURATION]
"""Seconds; written `30s`, `250ms`."""
Size = Annotated[int, SIZE]
"""Bytes; written `64KiB`, `1.5GiB`."""
Keys = Annotated[tuple[str, ...], KEYS]
"""Secrets: a list, or text joined by commas; never shown."""


def key(default: Any, text: str, least: float | None = None, most: float | None = None) -> Any:
    """Return a field with its description and, for numbers, its range."""
    return field(default=default, metadata={"text": text, "least": least, "most": most})


@dataclass(frozen=True, slots=True)
class NodeSection:
    """Who this node is."""

    name: str = key("", "name of this node; empty: host name and process id")


@dataclass(frozen=True, slots=True)
class HttpSection:
    """The HTTP endpoint."""

    host: str = key("127.0.0.1", "address to listen on; 0.0.0.0 or :: for all interfaces")
    port: int = key(8000, "port to listen on; 0 picks a free one", 0, 65535)
    drain: Duration = key(30.0, "how long running requests may go on after SIGTERM", 0.1, 3600)
    stall: Duration = key(30.0, "a client that takes no bytes for this long is disconnected", 0.1, 3600)
    names: str = key("", "further names, joined by commas, that clients may put into Host; *: any")


@dataclass(frozen=True, slots=True)
class ApiSection:
    """Who may use the OpenAI API."""

    key: Keys = key((), "key that requests have to come with; may be given again; none: no key is asked for")


@dataclass(frozen=True, slots=True)
class TlsSection:
    """TLS of the OpenAI API; plain HTTP without."""

    certificate: Path | None = key(None, "file with the chain of certificates (PEM); with it TLS only")
    key: Path | None = key(None, "file with the private key of the certificate (PEM), without a passphrase")


@dataclass(frozen=True, slots=True)
class ModelSection:
    """The model to run: a checkpoint, or a seeded random model when `path` is empty."""

    path: Path | None = key(None, "folder of a checkpoint with safetensors")
    name: str = key("", "what requests call the model; empty: name of the folder")
    layers: int = key(8, "layers of the random model", 1, 256)
    hidden: int = key(512, "width of the random model, in elements", 16, 16384)
    query_heads: int = key(16, "query heads of the random model", 1, 256)
    kv_heads: int = key(8, "key/value heads of the random model", 1, 256)
    experts: int = key(8, "experts of each layer of the random model of expert nodes", 1, 4096)
    max_tokens: int = key(32768, "tokens of the longest prompt and answer together of the random model", 2, 1 << 20)
    seed: int = key(0, "seed of the random model's weights", 0, (1 << 63) - 1)
    threads: int = key(1, "threads that compute", 1, 1024)


@dataclass(frozen=True, slots=True)
class EngineSection:
    """What computes in prefill and decode nodes."""

    kind: Literal["reference", "vllm"] = key(
        "reference", "what computes in prefill and decode nodes; the router is given the same"
    )
    args: str = key(
        "", "further arguments of vLLM's engine: its command line, or a JSON object of its engine arguments"
    )


@dataclass(frozen=True, slots=True)
class CacheSection:
    """The paged cache."""

    memory: Size = key(256 << 20, "memory for pages", 1)
    page_tokens: int = key(16, "tokens of one page", 1, 1024)
    prefixes: Literal["keep", "drop"] = key(
        "keep", "pages of computed prompts: keep them while there is room, for prompts that begin alike, or drop them"
    )


@dataclass(frozen=True, slots=True)
class BatchSection:
    """Continuous batching."""

    chunk_tokens: int = key(256, "prompt tokens of one pass; more of them delay the answers beside it", 1, 1 << 16)
    most_running: int = key(32, "requests computed together", 1, 4096)
    most_waiting: int = key(256, "requests that wait for pages; one more is answered 429", 0, 1 << 16)


@dataclass(frozen=True, slots=True)
class RouterSection:
    """What the router allows."""

    most_requests: int = key(512, "requests that are being answered; others wait", 1, 1 << 16)
    most_waiting: int = key(256, "requests that wait; one more is answered 429", 0, 1 << 16)
    longest_wait: Duration = key(30.0, "a request that waits longer is answered 429", 0.001, 86400)
    routing: Literal["prefix", "load"] = key(
        "prefix", "prefix: to the node that computed the beginning of a prompt, unless it is overloaded; load: never"
    )
    default_tokens: int = key(256, "tokens of an answer when the request does not set them", 1, 1 << 20)
    deadline: Duration = key(120.0, "longest time of a request; a header can shorten it", 0.001, 86400)


@dataclass(frozen=True, slots=True)
class ClusterSection:
    """How nodes find and reach each other."""

    directory: str = key(
        "", "link address of the directory, which it prints when it starts; of several directories, joined by commas"
    )
    bind: str = key(
        "ipc",
        "where this node is reached: ipc, ipc:///folder/ (a socket of its own in it), ipc:///folder/name.sock, tcp or "
        "tcp://host:port",
    )
    advertise: str = key("", "host name that others use when `bind` is all interfaces")
    keys: Path | None = key(None, "key file for tcp, see `asyncfabric keys`")
    plain_tcp: Literal["refuse", "allow"] = key("refuse", "tcp without keys: refuse, or allow, which protects nothing")
    rails: str = key(
        "local", "rails of the fabric, joined by commas: auto, local, tcp, ...; `asyncfabric doctor` lists them"
    )
    patience: Duration = key(10.0, "how long a request waits for a node that can take it", 0, 3600)


@dataclass(frozen=True, slots=True)
class DirectorySection:
    """What a directory shares with the others of its cluster."""

    store: str = key(
        "memory",
        "where its table is: memory, or what all directories share: etcd://host:port/prefix, torch://host:port",
    )


@dataclass(frozen=True, slots=True)
class TrainSection:
    """The training whose weights are served; its ranks are those of torchrun's variables."""

    every: int = key(4, "steps between two versions that are published", 1, 1 << 20)
    checkpoints: Path | None = key(
        None, "folder that keeps the published versions as safetensors; a start goes on from the last"
    )


@dataclass(frozen=True, slots=True)
class WeightsSection:
    """How weights are served: `ranks`, `tp` and `form` are set by the trainer, the others receive them."""

    ranks: int = key(1, "ranks of a replica; they share the experts", 1, 1024)
    tp: int = key(1, "tensor parallelism of a replica", 1, 1024)
    form: Literal["bfloat16", "float8"] = key(
        "bfloat16", "what a replica keeps: bfloat16, or float8 in blocks with scales"
    )
    log: Path | None = key(None, "file that the coordinator keeps its decisions in")
    memory: Literal["shadow", "in-place"] = key(
        "shadow",
        "shadow: two copies of the weights, a version serves while the next one arrives; in-place: one copy, "
        "generation waits while the next one is written over it",
    )
    codings: Literal["none", "delta", "exponent", "all"] = key(
        "none",
        "lossless codings, used between a trainer and a rollout that both have it, where measured to pay; delta: bits "
        "that changed; exponent: packed exponents of bfloat16",
    )

    @property
    def coding_names(self) -> tuple[str, ...]:
        """Return the codings by name."""
        return {"none": (), "all": ("delta", "exponent")}.get(self.codings, (self.codings,))


@dataclass(frozen=True, slots=True)
class LogSection:
    """The log, on standard error."""

    level: Literal["debug", "info", "warning", "error"] = key("info", "least level that is logged")
    form: Literal["text", "json"] = key("text", "text, or json: one object per line")


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of a node."""

    node: NodeSection = field(default_factory=NodeSection)
    http: HttpSection = field(default_factory=HttpSection)
    api: ApiSection = field(default_factory=ApiSection)
    tls: TlsSection = field(default_factory=TlsSection)
    model: ModelSection = field(default_factory=ModelSection)
    engine: EngineSection = field(default_factory=EngineSection)
    cache: CacheSection = field(default_factory=CacheSection)
    batch: BatchSection = field(default_factory=BatchSection)
    router: RouterSection = field(default_factory=RouterSection)
    cluster: ClusterSection = field(default_factory=ClusterSection)
    directory: DirectorySection = field(default_factory=DirectorySection)
    train: TrainSection = field(default_factory=TrainSection)
    weights: WeightsSection = field(default_factory=WeightsSection)
    log: LogSection = field(default_factory=LogSection)
