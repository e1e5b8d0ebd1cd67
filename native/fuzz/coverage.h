// coverage.h: how many different blocks of the decoders have run since forget_blocks(). An input that makes the number grow is kept, and
// further inputs are made of it. One thread.
#pragma once

#include <cstdint>

namespace asyncfabric::fuzz {

uint64_t blocks_seen();
void forget_blocks();

}  // namespace asyncfabric::fuzz
