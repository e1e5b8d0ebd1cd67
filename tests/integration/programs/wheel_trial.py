"""Try an installed wheel: both packages come from it, the engine is in it, a transfer works, the command starts.

Run by `make wheel` with the interpreter of a fresh environment, away from the checkout. Needs nothing of the tests.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import trio

import asyncfabric as af
import asyncfabric_services
from asyncfabric import _native


async def one_transfer() -> str:
    """Write five bytes from one fabric to another and return what arrived."""
    async with af.open_fabric() as target, af.open_fabric() as source:
        inbox, outbox = await target.allocate(64), await source.allocate(64)
        counter = target.counter()
        memoryview(outbox)[:5] = b"hello"
        await source.connect(target.address)
        await source.write(outbox[0:5], inbox.key(access="write"), 10, imm=counter.imm)
        await counter.wait(1)
        return bytes(memoryview(inbox)[10:15]).decode()


def main() -> None:
    """Check everything, print one line."""
    home = Path(sys.prefix).resolve()
    for package in (af, asyncfabric_services, _native):
        assert package.__file__ is not None
        assert Path(package.__file__).resolve().is_relative_to(home), f"{package.__name__} came from {package.__file__}"
    assert (Path(af.__file__).parent / "py.typed").is_file()
    assert (Path(asyncfabric_services.__file__).parent / "dashboard" / "static" / "index.html").is_file()
    info = _native.build_info()
    assert info["version"] == metadata.version("asyncfabric")
    assert trio.run(one_transfer) == "hello"
    command = subprocess.run([home / "bin" / "asyncfabric", "--version"], capture_output=True, text=True)
    assert command.returncode == 0, command.stderr
    print(f"this wheel works: {command.stdout}", end="")


if __name__ == "__main__":
    main()
