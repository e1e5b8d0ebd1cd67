"""Which nodes a command asks: those named by `--node`, and those that the directory behind `--directory` knows.

Options of the command line and what they mean; the asking is in `asking`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import click

from asyncfabric_services.exits import EnvironmentUnfit
from asyncfabric_services.look.asking import NoAnswer, ask, ask_all, checked_url
from asyncfabric_services.quantities import DurationType
from asyncfabric_services.terminal import plain


@dataclass(frozen=True, slots=True)
class Places:
    """Where to ask.

    Attributes:
        nodes: HTTP addresses that were named.
        directory: the one of a directory, or empty.
        patience_s: how long a node may take to answer.
    """

    nodes: tuple[str, ...]
    directory: str
    patience_s: float

    async def named(self) -> dict[str, str]:
        """Return the addresses of all nodes with their names, empty where nobody gave them.

        Raises EnvironmentUnfit when the directory does not answer.

        Cancellation: nothing is left over.
        """
        if not self.directory:
            return dict.fromkeys(self.nodes, "")
        try:
            rows = (await ask(self.directory, "/nodes", self.patience_s))["nodes"]
            found = [(row["name"], row["http"]) for row in rows]
        except NoAnswer as trouble:
            if trouble.status == 404:
                raise click.UsageError(
                    f"{self.directory} is no directory: give the HTTP address that `asyncfabric serve directory` prints"
                ) from None
            raise EnvironmentUnfit(f"the directory at {self.directory} does not answer: {trouble}") from None
        except (KeyError, TypeError):
            raise click.UsageError(f"{self.directory} is no directory: it does not list its nodes") from None
        for name, url in found:
            if not url:
                click.echo(
                    f"{plain(str(name))} did not report where its HTTP endpoint is, so it is not asked", err=True
                )
        return dict.fromkeys(self.nodes, "") | {url: name for name, url in found if url}

    async def ask(self, path: str) -> list[dict[str, Any]]:
        """Return the JSON that the nodes answer; otherwise as `ask_each`.

        Cancellation: as there.
        """
        return await self.ask_each(lambda url: ask(url, path, self.patience_s))

    async def ask_each(self, asking: Callable[[str], Awaitable[Any]]) -> list[Any]:
        """Return what `asking(url)` returns for the nodes that answer; the others are reported on standard error.

        Raises EnvironmentUnfit when none answers.

        Cancellation: nothing is left over.
        """
        named = await self.named()
        reported = []
        for answer in await ask_all(named, asking):
            if answer.trouble:
                name = named[answer.url] or "the node"
                click.echo(plain(f"{name} at {answer.url} does not answer: {answer.trouble}"), err=True)
            else:
                reported.append(answer.reported)
        if not reported:
            raise EnvironmentUnfit("no node answers: are they running, and are these their HTTP addresses?")
        return reported


def places_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `--node`, `--directory` and `--patience`; it is called with `places` in their stead."""

    @wraps(command)
    def with_places(*positional: Any, node: tuple[str, ...], directory: str, patience: float, **options: Any) -> Any:
        if not node and not directory:
            raise click.UsageError("name the nodes to ask: --node URL for each of them, or --directory URL for all")
        try:
            urls = tuple(checked_url(one) for one in node)
            asked = checked_url(directory) if directory else ""
        except ValueError as error:
            raise click.UsageError(str(error)) from None
        return command(*positional, places=Places(urls, asked, patience), **options)

    wrapped: Callable[..., Any] = with_places
    for option in (
        click.option("--patience", type=DurationType(), default="5s", help="How long a node may take (default: 5s)."),
        click.option(
            "--directory", default="", metavar="URL", help="HTTP address of the directory: ask all its nodes."
        ),
        click.option("--node", multiple=True, metavar="URL", help="HTTP address of a node; may be given again."),
    ):
        wrapped = option(wrapped)
    return wrapped
