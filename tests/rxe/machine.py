"""One throw-away virtual machine: boots, runs one command, streams what it prints, returns its status, leaves nothing.

Emulation (TCG) only, so it needs no /dev/kvm and no privilege. The machine dies with the harness, and at its limit.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kernel import CannotRunError, Kernel

GUEST = Path(__file__).parent / "guest"
STATUS_LIMIT = 124  # as of timeout(1)
STATUS_DIED = 125
# Nehalem is x86-64-v2, which numpy needs. Richer models are slower here: string moves and AVX are emulated badly.
CPU = "Nehalem"
KERNEL_LINE = (
    "console=ttyS0 quiet panic=-1 mitigations=off nopti tsc=reliable no_timer_check random.trust_cpu=on"
    " 8250.nr_uarts=1 i8042.noaux i8042.nokbd"
)


@dataclass(frozen=True)
class Machine:
    """What to boot and how much of the host it may take."""

    kernel: Kernel
    initramfs: Path
    memory_mib: int = 2048
    cpus: int = 2
    limit_s: float = 540.0

    def run(self, command: str, cache: Path, print_line: Callable[[str], None]) -> int:
        """Run a command of bash in a new machine; each of its lines goes to `print_line`."""
        emulator = shutil.which("qemu-system-x86_64")
        if emulator is None:
            raise CannotRunError("qemu-system-x86_64 is missing (apt-get install qemu-system-x86)")
        with tempfile.TemporaryDirectory(prefix="run-", dir=cache) as folder:
            share = Path(folder).resolve()
            for script in ("start", "network"):
                shutil.copy(GUEST / script, share / script)
            (share / "command").write_text(command + "\n")
            if not self._boot(emulator, share, print_line):
                print_line(f"rxe: the limit of {self.limit_s:.0f} s is over")
                _last_words(share, print_line)
                return STATUS_LIMIT
            status = share / "status"
            if not status.exists():
                print_line("rxe: the machine ended without a status")
                _last_words(share, print_line)
                return STATUS_DIED
            return int(status.read_text())

    def _boot(self, emulator: str, share: Path, print_line: Callable[[str], None]) -> bool:
        """Run the machine to its end; false when the limit came first."""
        with (share / "emulator").open("wb") as errors:
            child = subprocess.Popen(
                [emulator, *self._arguments(share)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                preexec_fn=_die_with_parent,  # noqa: PLW1509  # no threads here
            )
        try:
            return _stream(child, time.monotonic() + self.limit_s, print_line)
        finally:
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()

    def _arguments(self, share: Path) -> list[str]:
        return [
            "-M",
            "q35",
            "-accel",
            "tcg,thread=multi",
            "-cpu",
            CPU,
            "-smp",
            str(self.cpus),
            "-m",
            str(self.memory_mib),
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-no-reboot",
            "-kernel",
            str(self.kernel.image),
            "-initrd",
            str(self.initramfs),
            "-append",
            f"{KERNEL_LINE} share={share}",
            "-serial",
            f"file:{share / 'console'}",
            "-fsdev",
            "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap",
            "-device",
            "virtio-9p-pci,fsdev=host,mount_tag=host",
            "-fsdev",
            f"local,id=share,path={share},security_model=none",
            "-device",
            "virtio-9p-pci,fsdev=share,mount_tag=share",
            "-device",
            "virtio-rng-pci",
            "-device",
            "virtio-serial-pci",
            "-chardev",
            "file,id=out,path=/dev/stdout,append=on",  # not stdio: its end of input hangs the port up
            "-device",
            "virtserialport,chardev=out,name=out",
        ]


def _stream(child: subprocess.Popen[bytes], deadline: float, print_line: Callable[[str], None]) -> bool:
    """Pass lines on until the machine ends; false when the deadline came first."""
    assert child.stdout is not None
    descriptor = child.stdout.fileno()
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            if not selector.select(left):
                continue
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                return True
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                print_line(line.decode(errors="replace").rstrip("\r"))
    return False


def _last_words(share: Path, print_line: Callable[[str], None]) -> None:
    for name in ("emulator", "console"):
        path = share / name
        for line in path.read_text(errors="replace").splitlines()[-20:] if path.exists() else ():
            print_line(f"rxe: {name}: {line}")


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
