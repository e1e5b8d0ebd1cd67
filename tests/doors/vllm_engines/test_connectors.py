"""What holds for each connector, the stock ones that pull and push, and ours: right text, blocks that come back.

Each engine is a process with vLLM's scheduler and both roles of its connector; text is right exactly if all bytes are.
"""

from __future__ import annotations

from nodes import ASK, PUSH, Node, prompt


def test_text_equals_that_of_one_engine_for_prompts_of_any_length(pair: tuple[Node, Node]) -> None:
    first, second = pair
    for number, length in enumerate((1, 15, 16, 17, 100, 300)):
        tokens, name = prompt(length, number), f"length {length}"
        second.computed()
        second.add(name, tokens, 4, first.prefill(name, tokens))
        assert second.result(name)["tokens"] == first.alone(tokens, 4), length
        assert second.computed() == 4, "of the prompt its last token alone"
    first.emptied(), second.emptied()


def test_requests_side_by_side_do_not_mix_their_blocks(pair: tuple[Node, Node]) -> None:
    first, second = pair
    second.computed()
    names = {f"side {number}": prompt(90 + number, 50 + number) for number in range(5)}
    for name, tokens in names.items():
        second.add(name, tokens, 3, first.prefill(name, tokens))
    found = {name: second.result(name)["tokens"] for name in names}
    assert second.computed() == 3 * len(names)
    assert found == {name: first.alone(tokens, 3) for name, tokens in names.items()}
    first.emptied(), second.emptied()


def test_an_abort_at_either_engine_gives_all_blocks_back(pair: tuple[Node, Node]) -> None:
    first, second = pair
    second.add("met", prompt(20), 1, first.prefill("met", prompt(20)))
    second.result("met")  # a stock engine that never met the other one reports no abort to it
    first.post("abort_at", "early", 128)
    first.post("add", "early", prompt(700, 3), 1, dict(ASK))
    assert first.answers(2) == [None, None]
    first.emptied()
    if second.connector != PUSH:  # of a push that was never registered vLLM waits for the lease
        params = first.prefill("late", prompt(100, 4))
        second.freeze()
        second.post("add", "late", prompt(100, 4), 3, params)
        second.post("abort", "late")
        second.thaw()
        assert second.answers(2) == [None, None]
        second.emptied(), first.emptied()
