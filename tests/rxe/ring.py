"""Ring 6: prepare a soft-RoCE machine, boot it, run the tests in it, and end with their closing lines and status.

`ring.py [--limit S] [pytest arguments]` runs tests/rxe/ring.sh; `ring.py --shell 'CMD'` runs anything else there.
Exits with the guest's status; 3 when this machine cannot run the ring, 124 at the limit, 125 when the guest died.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import time
from pathlib import Path

from initramfs import find_initramfs
from kernel import CannotRunError, find_kernel, unpacked_kernel
from machine import Machine

ROOT = Path(__file__).resolve().parents[2]
CANNOT_RUN = 3
# pytest's last line; with -q it has no rules around it
CLOSING = re.compile(r"^(=+ )?(\d+ (passed|failed|error|skipped)|no tests ran).* in [\d.]+s.*$")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cache", type=Path, default=ROOT / "build" / "rxe", help="where kernel and initramfs are kept"
    )
    parser.add_argument("--kernel", type=Path, help="an unpacked kernel package to use instead of the cached one")
    parser.add_argument("--limit", type=float, default=1200.0, help="seconds after which the guest is ended")
    parser.add_argument("--memory", type=int, default=2048, help="MiB of the guest")
    parser.add_argument("--cpus", type=int, default=2, help="processors of the guest")
    parser.add_argument("--shell", help="run this command of bash instead of the tests")
    parser.add_argument("--prepare", action="store_true", help="only fetch the kernel and build the initramfs")
    options, rest = parser.parse_known_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    closings: list[str] = []

    def print_line(line: str) -> None:
        print(line, flush=True)
        if CLOSING.match(line):
            closings.append(line)

    try:
        kernel = unpacked_kernel(options.kernel) if options.kernel else find_kernel(options.cache)
        initramfs = find_initramfs(options.cache, kernel)
        if options.prepare:
            return 0
        machine = Machine(kernel, initramfs, options.memory, options.cpus, options.limit)
        command = options.shell or f"tests/rxe/ring.sh {shlex.join(rest)}"
        status = machine.run(f"cd {shlex.quote(str(ROOT))} && {command}", options.cache, print_line)
    except CannotRunError as error:
        print(f"rxe: cannot run here: {error}", file=sys.stderr)
        return CANNOT_RUN
    print(f"rxe: kernel {kernel.release}, status {status}, {time.monotonic() - started:.0f} s")
    print(*closings, sep="\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
