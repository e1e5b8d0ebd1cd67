"""Faults of the MoE kernels, for `planted.py`: where each is put, and the tests that have to see it."""

from __future__ import annotations

from typing import NamedTuple

NVLINK, PROXIED = "tests/gpu/test_nvlink_moe.py", "tests/gpu/test_proxied_moe.py"
NODES = "tests/gpu/test_node_moe.py"
ORDER = "tests/unit/moe/test_moe_kernel_order.py"
"""Reads the text of kernels: what goes wrong for nanoseconds only is seen there."""


class Fault(NamedTuple):
    """A line of a kernel that is made wrong, and the tests that look for it."""

    name: str
    file: str
    right: str
    wrong: str
    tests: str
    chosen: str


FAULTS = (
    Fault(
        "the last token of all is not taken",
        "dispatch.cuh",
        "number < most * ex.ranks;",
        "number + 1 < most * ex.ranks;",
        NVLINK,
        "plain or one_expert or without_tokens",
    ),
    Fault(
        "a token is loaded before it has come",
        "dispatch.cuh",
        "const bool came = !far || packed || load_acquire(word) == step;",
        "const bool came = true;",
        NVLINK,
        "slow or 7168",
    ),
    Fault(
        "any step's word will do",
        "words.cuh",
        "return load_acquire(word) == step;",
        "return load_acquire(word) != 0;",
        NVLINK,
        "many_steps or graph or slow",
    ),
    Fault(
        "a token is read from its neighbour's slot",
        "dispatch.cuh",
        "in<char>(ex, item.source, step, ex.slots) + static_cast<uint64_t>(place) * ex.slot_bytes",
        "in<char>(ex, item.source, step, ex.slots) + static_cast<uint64_t>(place ^ 1) * ex.slot_bytes",
        NVLINK,
        "plain or one_expert or without_tokens",
    ),
    Fault(
        "weights of two choices change places",
        "combine.cuh",
        "__shfl_sync(kAll, pair.weight, choices[i])",
        "__shfl_sync(kAll, pair.weight, choices[i] ^ 1)",
        NVLINK,
        "plain or one_expert or without_tokens",
    ),
    Fault(
        "sums are added up the other way round the circle",
        "combine.cuh",
        "const uint32_t rank = (ex.rank + far) % ex.ranks;",
        "const uint32_t rank = (ex.rank + ex.ranks - far) % ex.ranks;",
        NVLINK,
        "float32",
    ),
    Fault(
        "products are not rounded before they are added",
        "combine.cuh",
        "__fadd_rn(sums[c][e], __fmul_rn(values[e], weight))",
        "__fmaf_rn(values[e], weight, sums[c][e])",
        NVLINK,
        "plain or many_steps",
    ),
    Fault(
        "nobody waits for those who read late",
        "combine.cuh",
        "if (blockIdx.x == 0 && number == 0)\n      await(",
        "if (blockIdx.x == 0 && number == 99)\n      await(",
        NVLINK,
        "nobody_sends",
    ),
    Fault(
        "padding is left as it was",
        "dispatch.cuh",
        "  clear_padding(ex, go, steps[1], first, stride, places);\n",
        "",
        NVLINK,
        "alignment",
    ),
    Fault("the count is not read", "route.cuh", "if (go.count == nullptr) return", "return", NVLINK, "count_is_read"),
    Fault(
        "scales of the token before",
        "dispatch.cuh",
        "go.scales[static_cast<uint64_t>(token) * ex.scales + i]",
        "go.scales[static_cast<uint64_t>(token ^ (token + 1 < tokens)) * ex.scales + i]",
        NVLINK,
        "scale_block or many_steps",
    ),
    Fault(
        "a sum's word is stored without a fence",
        "combine.cuh",
        "store_release(out<uint32_t>(ex, source, step, ex.back_words) + token * ex.parts + number, step);",
        "static_cast<volatile uint32_t*>(out<uint32_t>(ex, source, step, ex.back_words))"
        "[token * ex.parts + number] = step;",
        ORDER,
        "release",
    ),
    Fault(
        "a token's word is stored without a fence",
        "dispatch.cuh",
        "store_release(out<uint32_t>(ex, lane, step, ex.token_words) + token, step);",
        "static_cast<volatile uint32_t*>(out<uint32_t>(ex, lane, step, ex.token_words))[token] = step;",
        ORDER,
        "release",
    ),
    Fault(
        "words are loaded without acquire",
        "words.cuh",
        "return load_acquire(word) == step;",
        "return *static_cast<const volatile uint32_t*>(word) == step;",
        ORDER,
        "acquire",
    ),
    Fault(
        "each look at a word is one at the verdicts too",
        "words.cuh",
        "if (late || now - looked > kVerdictNs) {",
        "if (late || now >= looked) {",
        ORDER,
        "now_and_then",
    ),
    Fault(
        "lanes do not meet before a token's word",
        "dispatch.cuh",
        "    __syncwarp();  // the scales that other lanes stored go with the word that this lane releases\n",
        "",
        ORDER,
        "lanes",
    ),
    Fault(
        "lanes do not meet before a sum's word",
        "combine.cuh",
        "    __syncwarp();  // what other lanes stored goes with the word that the first releases\n",
        "",
        ORDER,
        "lanes",
    ),
    Fault(
        "a sum's word leaves before copies have landed",
        "combine.cuh",
        "        wait_stores();\n",
        "",
        ORDER,
        "copies",
    ),
    Fault(
        "a sum's word leaves long before the sum",
        "combine.cuh",
        "    for (uint32_t at = span.begin; at < span.end; at += kColumns * 32) {\n      float sums",
        "    if (lane == 0 && !packed)\n"
        "      store_release(out<uint32_t>(ex, source, step, ex.back_words) + token * ex.parts + number, step);\n"
        "    __nanosleep(30000);\n"
        "    for (uint32_t at = span.begin; at < span.end; at += kColumns * 32) {\n      float sums",
        NVLINK,
        "plain or one_expert or 7168",
    ),
    Fault(
        "a token's word leaves long before the token",
        "dispatch.cuh",
        "    for (uint32_t at = low; at < high; at += chunk) {\n",
        "    if (sends && !packs) store_release(out<uint32_t>(ex, lane, step, ex.token_words) + token, step);\n"
        "    __nanosleep(30000);\n"
        "    for (uint32_t at = low; at < high; at += chunk) {\n",
        NVLINK,
        "plain or one_expert or 7168",
    ),
    Fault(
        "the gate does not wait for rows that came apart",
        "gate.cuh",
        "if (!await_arrival(ex, more, kRest,",
        "if (!await_arrival(ex, false, kRest,",
        PROXIED,
        "private_tokens",
    ),
    Fault(
        "packed rows are counted on from step to step",
        "gate.cuh",
        "      ex.state->packed[rank] = 0;\n",
        "",
        PROXIED,
        "many_steps or graph or plain",
    ),
    Fault(
        "the proxy is reported before all is packed",
        "gate.cuh",
        "store_release(ex.reported[go.back], step);",
        "store_release(ex.reported[go.back], step + 1);",
        PROXIED,
        "many_steps or graph or private_tokens",
    ),
    Fault(
        "sums are packed in the order of tokens",
        "combine.cuh",
        "packed ? go.places[static_cast<uint64_t>(ex.ranks) * ex.max_tokens + slot] : token;",
        "token;",
        PROXIED,
        "many_steps or private_tokens or without_tokens",
    ),
    Fault(
        "a token's word leaves before the token",
        "dispatch.cuh",
        "    if (sends) {\n      wait_stores();\n      fence_global_copies();\n    }\n",
        "",
        ORDER,
        "copies",
    ),
    Fault(
        "a token crosses to the node of its neighbour's experts",
        "nodes.cuh",
        "bit = rank == kNone ? 0 : 1u << rank / go.node_size;",
        "bit = rank == kNone ? 0 : 1u << (rank / go.node_size ^ 1);",
        NODES,
        "grouped",
    ),
    Fault(
        "what crosses with a token is that of the token before",
        "nodes.cuh",
        "const uint32_t expert = words[go.scale_words + lane], local",
        "const uint32_t expert = *(words + go.scale_words + lane - (row ? crossing_words(go) : 0)), local",
        NODES,
        "grouped",
    ),
    Fault(
        "a row does not know where it began",
        "nodes.cuh",
        "words[go.scale_words] % go.max_tokens",
        "words[go.scale_words] / go.max_tokens",
        NODES,
        "grouped",
    ),
    Fault(
        "a verdict is not reported in the other lane",
        "words.cuh",
        "if (lane < kMaxRanks && ex.verdict_out[lane] != nullptr)",
        "if (lane < kMaxRanks && ex.verdict_out[lane] != nullptr && (lane - ex.first_rank) % ex.rank_stride == 0)",
        NODES,
        "does_not_come",
    ),
    Fault(
        "a weight of any step will do",
        "combine.cuh",
        "    return came >> 32 == step;",
        "    return came >> 32 != 0;",
        ORDER,
        "one_word",
    ),
    Fault(
        "a weight is stored apart from its step",
        "combine.cuh",
        "store_relaxed(target + i, static_cast<uint64_t>(step) << 32 | __float_as_uint(go.weights[i]));",
        "target[i] = static_cast<uint64_t>(step) << 32 | __float_as_uint(go.weights[i]);",
        ORDER,
        "one_word",
    ),
    Fault(
        "warps that cast a token together do not meet before its word",
        "dispatch.cuh",
        'asm volatile("bar.sync %0, %1;" ::"r"(kSendBarrier + group), "r"(together * 32) : "memory");',
        "",
        ORDER,
        "together",
    ),
    Fault(
        "warps that cast a token together meet before its parts have landed",
        "dispatch.cuh",
        "    if (sends) {\n      wait_stores();\n      fence_global_copies();\n    }\n",
        "    if (sends && together == 1) {\n      wait_stores();\n      fence_global_copies();\n    }\n",
        ORDER,
        "together",
    ),
)
