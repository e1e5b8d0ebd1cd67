"""What no run of the MoE kernels shows for sure, read in their text: data before words, words stored with release.

A word that overtakes its data is a matter of nanoseconds between GPUs. So here every store to a place of words, by
the fields of `moe::Exchange` that its address is made of, has to be a release at system scope, every load an acquire;
and on every way to a word the copies before it have ended. The text is that which is launched.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from ptx_flow import Instruction, KernelText, kernels_of

pytest.importorskip("torch")

ROOT = Path(__file__).parents[3]
DTYPES = ("bfloat16", "float16", "float32")
WEIGHS = [f"moe_weigh_{dtype}" for dtype in DTYPES]
COMBINES = [*(f"moe_combine_{dtype}" for dtype in DTYPES), *WEIGHS]
WORDS = {"moe_dispatch": ["record_words", "token_words"], **{name: ["head_word", "back_words"] for name in COMBINES}}
WAITING = ["moe_gate", *WORDS]
LEAST_PAUSE_NS = 1_000_000
DATA = {"moe_dispatch": ("slots", "token_words"), **dict.fromkeys(COMBINES, ("back", "back_words"))}
PARTS = (1, 8)


@pytest.fixture(scope="module")
def kernels() -> dict[str, KernelText]:
    from asyncfabric.moe.gpu import launch

    return kernels_of(launch.kernel_text().decode())


def offset(name: str) -> int:
    """Return where a field is in moe::Exchange."""
    from asyncfabric.moe.gpu.launch import ExchangeWords

    return int(getattr(ExchangeWords, name).offset)


def accesses(kernel: KernelText, what: str, name: str) -> list[int]:
    """Return the places of stores (`st`) or loads (`ld`) whose addresses are made of a field."""
    return [
        place
        for place, each in enumerate(kernel.instructions)
        if each.name.startswith(f"{what}.")
        and ".shared" not in each.name
        and ".param" not in each.name
        and each.address is not None
        and offset(name) in kernel.fields_of(each.address)
    ]


@pytest.mark.parametrize("name", WORDS)
def test_words_are_stored_with_release_and_loaded_with_acquire(kernels: dict[str, KernelText], name: str) -> None:
    kernel = kernels[name]
    for word in WORDS[name]:
        stores = [kernel.instructions[place].name for place in accesses(kernel, "st", word)]
        loads = [kernel.instructions[place].name for place in accesses(kernel, "ld", word)]
        # Behind a proxy the place of a token is no word that anybody waits for: its arrival is counted.
        packed = ["st.u32"] if word == "token_words" else []
        assert sorted(stores) == ["st.release.sys.global.u32", *packed], f"{name}, {word}"
        assert loads and set(loads) <= {"ld.acquire.sys.global.u32", *(["ld.u32"] if packed else [])}, f"{name}, {word}"
        assert any(each.startswith("ld.acquire") for each in loads), f"{name}, {word}: nobody waits"


def verdict_looks(kernel: KernelText) -> list[int]:
    """Return the places of loads of the verdicts of other ranks: their addresses are a field that lanes index."""
    field = f"+{offset('verdict_in')}"
    words = {
        register
        for each in kernel.instructions
        if each.name == "ld.param.u64" and (each.address or "").endswith(field)
        for register in each.targets
    }
    return [
        place
        for place, each in enumerate(kernel.instructions)
        if each.name.startswith("ld.acquire") and each.address in words
    ]


@pytest.mark.parametrize("name", WAITING)
def test_a_warp_that_waits_looks_at_verdicts_now_and_then_only(kernels: dict[str, KernelText], name: str) -> None:
    """They may lie in host memory, which each look asks over PCIe; between two looks lies a comparison of times."""
    found = re.search(r"kVerdictNs = ([\d']+);", (ROOT / "native/cuda/moe/words.cuh").read_text())
    assert found is not None
    pause_ns = int(found[1].replace("'", ""))
    assert pause_ns >= LEAST_PAUSE_NS
    kernel, compared = kernels[name], (f", {pause_ns}", f", {pause_ns + 1}")
    looks = verdict_looks(kernel)
    assert looks, "nobody looks at verdicts"
    for place in looks:
        before = kernel.met_before(
            place,
            {},
            lambda each: each.name.startswith("setp.") and each.text.endswith(compared),
            lambda each: each.name.startswith("ld.acquire"),
        )
        assert not before, "a word that is waited for is looked at, and then the verdicts at once"


def released(kernel: KernelText, word: str) -> int:
    """Return the place of the one store that releases a word."""
    (place,) = [
        each for each in accesses(kernel, "st", word) if kernel.instructions[each].name.startswith("st.release")
    ]
    return place


def is_copy(each: Instruction) -> bool:
    return each.name.startswith("cp.async.bulk.global.shared")


def named(text: str) -> Callable[[Instruction], bool]:
    return lambda each: each.text == text


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("name", WORDS)
def test_copies_have_landed_and_are_fenced_before_the_word_of_their_row(
    kernels: dict[str, KernelText], name: str, parts: int
) -> None:
    kernel, word = kernels[name], DATA[name][1]
    known, place = kernel.predicates(offset("parts"), parts), released(kernel, word)
    ended, fenced = named("cp.async.bulk.wait_group 0"), named("fence.proxy.async.global")
    assert any(map(is_copy, kernel.instructions)), "no copies were found at all"
    assert not kernel.met_before(place, known, ended, is_copy), "a copy may be on its way when the word goes"
    assert not kernel.met_before(place, known, fenced, lambda each: ended(each) or is_copy(each)), "no fence"


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("name", WORDS)
def test_what_other_lanes_stored_is_met_before_the_word(kernels: dict[str, KernelText], name: str, parts: int) -> None:
    kernel, (data, word) = kernels[name], DATA[name]
    stores = {id(kernel.instructions[place]) for place in accesses(kernel, "st", data)}
    assert stores, "no stores were found at all"
    known = kernel.predicates(offset("parts"), parts)
    found = kernel.met_before(released(kernel, word), known, named("bar.warp.sync -1"), lambda each: id(each) in stores)
    assert not found


@pytest.mark.parametrize("name", WEIGHS)
def test_a_weight_and_its_step_are_one_word(kernels: dict[str, KernelText], name: str) -> None:
    """Stored and loaded at once, they need no order; the step that comes with a weight is compared with this one."""
    kernel = kernels[name]
    stores = {kernel.instructions[place].name for place in accesses(kernel, "st", "late_weights")}
    loads = [kernel.instructions[place] for place in accesses(kernel, "ld", "late_weights")]
    assert stores == {"st.relaxed.sys.global.u64"}
    assert {each.name for each in loads} == {"ld.relaxed.sys.global.u64"}
    for load in loads:
        (word,) = load.targets
        steps = [
            each.targets[0]
            for each in kernel.instructions
            if each.name == "shr.u64" and each.text.endswith(f", {word}, 32")
        ]
        compared = [
            each
            for each in kernel.instructions
            if each.name in ("setp.eq.s64", "setp.ne.s64") and each.sources and each.sources[0] in steps
        ]
        assert compared and all(len(each.sources) == 2 for each in compared), f"{word}: any step's weight will do"


def gone_through(kernel: KernelText, place: int) -> dict[str, bool]:
    """Return the predicate of the last branch that leads around an instruction, where it is not taken."""
    around = [
        each.guard
        for each in kernel.instructions[:place]
        if each.guard is not None and each.name == "bra" and kernel.labels[each.text.split()[1]] > place
    ]
    register, taken = around[-1]
    return {register: not taken}


def test_warps_that_cast_a_token_together_meet_before_its_word(kernels: dict[str, KernelText]) -> None:
    """Each lane that copies a part waits until it has landed, then all meet, then the first of them stores the word."""
    kernel, ended = kernels["moe_dispatch"], named("cp.async.bulk.wait_group 0")
    meetings = [
        place for place, each in enumerate(kernel.instructions) if each.name == "bar.sync" and len(each.sources) == 2
    ]
    assert len(meetings) == 1, "no barrier of some warps"
    (meeting,), met = meetings, kernel.instructions[meetings[0]]
    together = gone_through(kernel, meeting)
    (asked,) = kernel.definitions[next(iter(together))]
    assert asked.name == "setp.lt.u32" and asked.text.endswith(", 2"), asked.text
    place = released(kernel, "token_words")
    assert not kernel.met_before(place, together, lambda each: each is met, is_copy), "the word may precede a part"
    wait = max(place for place, each in enumerate(kernel.instructions[:meeting]) if ended(each))
    copies = gone_through(kernel, wait)
    last = max(place for place, each in enumerate(kernel.instructions[:wait]) if is_copy(each))
    assert gone_through(kernel, last) == copies, "not each lane that copies waits"
    assert not kernel.met_before(meeting, copies, ended, is_copy), "a part may be on its way when all have met"
