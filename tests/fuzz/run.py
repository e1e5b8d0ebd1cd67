"""Fuzzes the native decoders and the Python ones, each for half of the time; `make fuzz SECONDS=60`.

`run.py NATIVE_PROGRAM SECONDS` ends with 1 on a finding, whose bytes are in build/fuzz; before, both halves find a
planted bug. `run.py --python DECODER...` fuzzes some alone, `run.py --repeat DECODER FILE` repeats a finding,
`run.py --write-corpus NATIVE_PROGRAM` makes the first inputs anew.
"""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from traceback import print_exc
from types import FrameType

from decoders import DECODERS, Decoder
from mutation import changed

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).parent / "corpus"
FINDINGS = ROOT / "build" / "fuzz"
MOST_CPU_S = 5.0  # of one input
MOST_BYTES = 1 << 30  # that all inputs may add to the process's address space
MOST_KEPT = 512


class TookTooLongError(BaseException):
    """One input took more processor time than any may."""


class FindingError(Exception):
    """A decoder let something else out than its refusals.

    Attributes:
        data: the input.
    """

    def __init__(self, name: str, data: bytes) -> None:
        super().__init__(f"{name}: {len(data)} bytes")
        self.data = data


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TookTooLongError


@contextmanager
def bounded() -> Iterator[None]:
    """Bound the memory of what runs within, and end an input that takes too long."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGVTALRM, _too_long)
    resource.setrlimit(resource.RLIMIT_AS, (held + MOST_BYTES, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGVTALRM, before)


def read_once(name: str, decoder: Decoder, data: bytes) -> bool:
    """Read one input; return whether it was taken. Raises FindingError."""
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_CPU_S)
    try:
        decoder.read(data)
    except decoder.refusals:
        return False
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise FindingError(name, data) from error
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)  # it would end whatever runs next in this process
    return True


def inputs_of(name: str, decoder: Decoder) -> list[bytes]:
    """Return the first inputs: the files of the corpus, or what the encoders make where there are none."""
    return [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))] or decoder.seeds()


def fuzz(name: str, decoder: Decoder, seconds: float, seed: int) -> int:
    """Fuzz one decoder for a time; return how many inputs it took. Raises FindingError."""
    random = Random(f"{seed} {name}")
    kept = inputs_of(name, decoder)
    with bounded():
        for data in kept:
            read_once(name, decoder, data)
        executions, until = len(kept), time.monotonic() + seconds
        while time.monotonic() < until:
            for _ in range(32):
                data = changed(random, random.choice(kept), kept)
                # What is still taken is worth changing further, as long as it does not crowd out the rest.
                if read_once(name, decoder, data) and len(kept) < MOST_KEPT and random.randrange(8) == 0:
                    kept.append(data)
                executions += 1
    return executions


def fuzz_python(names: list[str], seconds: float, seed: int) -> int:
    """Fuzz decoders one after the other; return the exit status."""
    total, failed = 0, 0
    for name in names:
        began = time.monotonic()
        try:
            executions = fuzz(name, DECODERS[name], seconds / len(names), seed)
        except FindingError as finding:
            print_exc()
            FINDINGS.mkdir(parents=True, exist_ok=True)
            path = FINDINGS / f"{name}-{zlib.crc32(finding.data):08x}"
            path.write_bytes(finding.data)
            print(f"fuzz: FINDING in {finding}")
            print(f"fuzz: repeat it with: {sys.executable} {__file__} --repeat {name} {path}")
            failed += 1
            continue
        total += executions
        took_s = time.monotonic() - began
        print(f"fuzz python {name:22} {executions:11} executions {took_s:6.1f} s", flush=True)
    print(f"fuzz python, all: {total} executions of {len(names)} decoders, {failed} with a finding; seed {seed}")
    return min(failed, 1)


def planted_is_found(program: str) -> bool:
    """Return whether the native harness finds the over-read of its planted target."""
    command = [program, "--seconds", "30", "--seed", "1", "--findings", str(FINDINGS), "planted"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    for path in FINDINGS.glob("planted-*"):
        path.unlink()
    return found.returncode == 1 and "FINDING in planted" in found.stderr


def write_corpus(program: str) -> None:
    """Write the first inputs of all targets, as the encoders make them."""
    subprocess.run([program, "--write-corpus", CORPUS], check=True)
    for name, decoder in DECODERS.items():
        (CORPUS / name).mkdir(parents=True, exist_ok=True)
        for number, data in enumerate(decoder.seeds()):
            (CORPUS / name / f"{number}.bin").write_bytes(data)


def main(words: list[str]) -> int:
    """Do what the command line asks; return the exit status."""
    seed = time.time_ns()
    if words[0] == "--repeat":
        with bounded():
            read_once(words[1], DECODERS[words[1]], Path(words[2]).read_bytes())
        return 0
    if words[0] == "--write-corpus":
        write_corpus(words[1])
        return 0
    if words[0] == "--python":
        return fuzz_python(words[2:] or list(DECODERS), float(words[1]), seed)
    program, seconds = words[0], float(words[1])
    FINDINGS.mkdir(parents=True, exist_ok=True)
    if not planted_is_found(program):
        print("fuzz: the native harness does not find the planted bug: it would find no other either")
        return 1
    native = subprocess.run(
        [program, "--seconds", f"{seconds / 2}", "--corpus", CORPUS, "--findings", FINDINGS], check=False
    )
    return max(fuzz_python(list(DECODERS), seconds / 2, seed), min(native.returncode, 1))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
