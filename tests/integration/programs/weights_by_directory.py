"""A directory, a training of one rank, or an engine that knows the directory's address alone.

`weights_by_directory.py directory PLACE FOLDER`, `... trainer PLACE SEED FOLDER`, `... engine PLACE FOLDER`. Commands
come as JSON lines, each is answered by one; a training and an engine write each version into FOLDER.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import trio
from safetensors.torch import save_file

from asyncfabric import ClosedError, FabricConfig
from asyncfabric.control import open_link, serve_directory
from asyncfabric.weights.blocking import open_receiver, open_sender

LOCAL = FabricConfig(rails=("local",))


def answer(**values: Any) -> None:
    print(json.dumps(values), flush=True)


async def serve(place: str) -> None:
    async with open_link("directory", bind=place) as link, serve_directory(link):
        answer(address=link.address)
        await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)


def train(place: str, seed: int, folder: Path) -> None:
    torch.manual_seed(seed)
    weight = torch.zeros(300, 40)
    with open_sender({"w": weight}, place, config=LOCAL) as sender:
        answer(ready=True)
        for line in sys.stdin:
            command = json.loads(line)
            if "end" in command:
                break
            weight.copy_(torch.randn(300, 40))
            save_file({"w": weight}, folder / f"trainer-{command['version']}.safetensors")
            report = sender.publish(command["version"])
            assert report is not None
            answer(published=command["version"], receivers=sorted(report.receivers))
    answer(left=True)


def receive(place: str, folder: Path) -> None:
    own = {"w": torch.full((300, 40), -1.0)}
    with open_receiver(own, place, config=LOCAL) as receiver:
        answer(ready=True)
        try:
            while True:
                receiver.wait()
                version = receiver.apply()
                save_file(own, folder / f"engine-{version}.safetensors")
                answer(applied=version)
        except ClosedError as error:
            answer(ended=str(error))


def main() -> None:
    role, place, folder = sys.argv[1], sys.argv[2], Path(sys.argv[-1])
    if role == "directory":
        trio.run(serve, place)
    elif role == "trainer":
        train(place, int(sys.argv[3]), folder)
    else:
        receive(place, folder)


if __name__ == "__main__":
    main()
