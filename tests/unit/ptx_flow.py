"""Kernels as text, read: instructions, where each may go next, and which fields of a parameter an address is made of.

Knows nothing of any kernel. Registers are followed through all that defines them, whatever the order; what was loaded
from memory is a beginning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

_REGISTER = re.compile(r"%[a-z]+\d+")
_BRANCH = re.compile(r"bra(?:\.uni)?\s+(\$\w+)")
_NO_TARGET = ("st", "bra", "ret", "bar", "membar", "fence", "cp.", "mbarrier.init", "mbarrier.arrive", "red.")
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
MOST_CONDITIONS = 6


@dataclass(frozen=True)
class Instruction:
    """One of them; `guard` is the register that decides on it, and the value that it needs."""

    text: str
    guard: tuple[str, bool] | None

    @property
    def name(self) -> str:
        """Opcode with its suffixes."""
        return self.text.split()[0]

    @property
    def targets(self) -> list[str]:
        """Registers that it defines."""
        if self.name.startswith(_NO_TARGET):
            return []
        rest = self.text.removeprefix(self.name).strip()
        first = rest[: rest.index("}") + 1] if rest.startswith("{") else rest.split(",")[0]
        return _REGISTER.findall(first)

    @property
    def sources(self) -> list[str]:
        """Registers that it reads, its guard left out."""
        found = _REGISTER.findall(self.text)
        return found[len(self.targets) :]

    @property
    def address(self) -> str | None:
        """What stands in its first brackets."""
        found = re.search(r"\[([^\]]+)\]", self.text)
        return found.group(1) if found else None


@dataclass(frozen=True)
class KernelText:
    """A kernel; parameter 0 is the struct whose fields are asked for."""

    name: str
    instructions: list[Instruction]
    labels: dict[str, int]
    _known: dict[str, frozenset[int]] = field(default_factory=dict)

    @cached_property
    def definitions(self) -> dict[str, list[Instruction]]:
        """All instructions that define a register."""
        found: dict[str, list[Instruction]] = {}
        for each in self.instructions:
            for register in each.targets:
                found.setdefault(register, []).append(each)
        return found

    def parameter_at(self, address: str) -> int | None:
        """Return which byte of parameter 0 an address names, if that is known."""
        base, _, offset = address.partition("+")
        if base == f"{self.name}_param_0":
            return int(offset or 0)
        defined = self.definitions.get(base, [])
        if len(defined) != 1:
            return None
        made = defined[0]
        operands = [each.strip() for each in made.text.removeprefix(made.name).split(",")][1:]
        if made.name.startswith(("mov.", "cvta.")) and len(operands) == 1:
            found = self.parameter_at(operands[0])
        elif made.name.startswith("add.s64") and operands[1].lstrip("-").isdigit():
            found = self.parameter_at(operands[0])
            found = None if found is None else found + int(operands[1])
        else:
            return None
        return None if found is None else found + int(offset or 0)

    def loaded_from(self, load: Instruction, register: str) -> int | None:
        """Return which byte of parameter 0 a register is loaded from."""
        if not load.name.startswith("ld.param") or load.address is None:
            return None
        at = self.parameter_at(load.address)
        return None if at is None else at + load.targets.index(register) * (int(load.name[-2:]) // 8)

    def fields_of(self, address: str) -> frozenset[int]:
        """Return the bytes of parameter 0 that an address is made of."""
        base = address.partition("+")[0]
        if base not in self._known:
            found, seen, left = set(), {base}, [base]
            while left:
                register = left.pop()
                for made in self.definitions.get(register, []):
                    if (at := self.loaded_from(made, register)) is not None:
                        found.add(at)
                    elif not made.name.startswith(("ld", "atom", "shfl")):
                        fresh = set(made.sources) - seen
                        seen |= fresh
                        left.extend(fresh)
            self._known[base] = frozenset(found)
        return self._known[base]

    def predicates(self, at: int, value: int) -> dict[str, bool]:
        """Return the predicates that are known where the field of parameter 0 at `at` has this value."""
        found = {}
        for register, defined in self.definitions.items():
            if len(defined) != 1 or not defined[0].name.startswith("setp."):
                continue
            operands = [each.strip() for each in defined[0].text.split(None, 1)[1].split(",")][1:]
            loads = self.definitions.get(operands[0], [])
            if operands[1].isdigit() and len(loads) == 1 and self.loaded_from(loads[0], operands[0]) == at:
                found[register] = _COMPARE[defined[0].name.split(".")[1]](value, int(operands[1]))
        return found

    def _steps(self, at: int) -> Iterator[tuple[int, tuple[str, bool] | None]]:
        """Where control may go from an instruction, and what has to hold for that."""
        here = self.instructions[at]
        if (jump := _BRANCH.match(here.text)) is not None:
            yield self.labels[jump.group(1)], here.guard
            if here.guard is not None:
                yield at + 1, (here.guard[0], not here.guard[1])
        elif not (here.text == "ret" and here.guard is None) and at + 1 < len(self.instructions):
            yield at + 1, None

    @cached_property
    def _before(self) -> dict[int, list[tuple[int, tuple[str, bool] | None]]]:
        found: dict[int, list[tuple[int, tuple[str, bool] | None]]] = {}
        for at in range(len(self.instructions)):
            for then, condition in self._steps(at):
                found.setdefault(then, []).append((at, condition))
        return found

    def reached(self, known: dict[str, bool]) -> set[int]:
        """Return the instructions that can run at all where predicates have these values."""
        found, left = {0}, [0]
        while left:
            for then, condition in self._steps(left.pop()):
                if condition is not None and known.get(condition[0], condition[1]) != condition[1]:
                    continue
                if then not in found:
                    found.add(then)
                    left.append(then)
        return found

    def met_before(
        self, at: int, known: dict[str, bool], stop: Callable[[Instruction], bool], look: Callable[[Instruction], bool]
    ) -> list[Instruction]:
        """Return what `look` finds on ways that lead to an instruction, each followed back to where `stop` asks for it.

        Ways on which a predicate would have two values are none: `known` holds everywhere, others until defined.
        """
        found: list[Instruction] = []
        left: list[tuple[int, frozenset[tuple[str, bool]]]] = [(at, frozenset())]
        seen, reached = set(left), self.reached(known)
        while left:
            place, conditions = left.pop()
            for before, condition in self._before.get(place, []):
                if before not in reached:
                    continue
                held = dict(conditions)
                if condition is not None:
                    register, value = condition
                    if known.get(register, held.get(register, value)) != value:
                        continue
                    if len(held) < MOST_CONDITIONS:
                        held[register] = value
                each = self.instructions[before]
                if look(each):
                    found.append(each)
                    continue
                if stop(each):
                    continue
                for register in each.targets:
                    held.pop(register, None)
                state = before, frozenset(held.items())
                if state not in seen:
                    seen.add(state)
                    left.append(state)
        return found


def kernels_of(text: str) -> dict[str, KernelText]:
    """Return the kernels of a text by name."""
    found = {}
    for part in re.split(r"^\.visible \.entry ", text, flags=re.MULTILINE)[1:]:
        name, body = part[: part.index("(")], part[part.index("\n{") + 2 : part.rindex("\n}")]
        instructions, labels = [], {}
        for line in body.splitlines():
            line = line.split("//")[0].strip().strip("{} \t")
            if line.startswith("$") and line.endswith(":"):
                labels[line[:-1]] = len(instructions)
                continue
            for piece in filter(None, (each.strip() for each in line.split(";"))):
                if piece.startswith("."):
                    continue
                guard = re.match(r"@(!?)(%p\d+)\s+", piece)
                instructions.append(
                    Instruction(
                        " ".join(piece[guard.end() if guard else 0 :].split()),
                        (guard.group(2), not guard.group(1)) if guard else None,
                    )
                )
        found[name] = KernelText(name, instructions, labels)
    return found
