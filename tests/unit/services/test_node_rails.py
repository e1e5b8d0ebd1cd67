"""A node whose rails or checkpoint cannot be opened fails with a sentence about its settings, before it serves."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from asyncfabric import DeviceError
from asyncfabric_services.nodes.rails import open_rails
from asyncfabric_services.router.server import StartError
from asyncfabric_services.settings.schema import ClusterSection, Settings


async def _open(rails: str) -> None:
    async with open_rails(Settings(cluster=ClusterSection(rails=rails))) as fabric:
        assert fabric.rails


@pytest.mark.parametrize("rails", ["auto", "auto,fault+local"])
def test_a_node_takes_what_the_machine_offers(rails: str) -> None:
    trio.run(_open, rails)


@pytest.mark.parametrize("rails", ["nope", "local?what=1", "tcp?address=nonsense", "", "local,,local"])
def test_rails_that_cannot_be_opened_are_a_sentence_about_the_setting(rails: str) -> None:
    with pytest.raises(StartError, match=r"^cluster\.rails: "):
        trio.run(_open, rails)


def test_what_breaks_later_is_no_matter_of_starting() -> None:
    async def fixture() -> None:
        async with open_rails(Settings()):
            raise DeviceError("a rail went down")

    with pytest.raises(DeviceError, match="a rail went down"):
        trio.run(fixture)


def test_a_folder_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="checkpoints are transformers'")
    from asyncfabric_services.nodes.router_service import card_of
    from asyncfabric_services.settings.schema import ModelSection

    with pytest.raises(StartError, match=f"there is no folder {tmp_path / 'nowhere'}$"):
        card_of(ModelSection(path=tmp_path / "nowhere"))
    with pytest.raises(StartError, match=f"{tmp_path} has no config.json"):
        card_of(ModelSection(path=tmp_path))
