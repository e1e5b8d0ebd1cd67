// memory_room.h: how much more memory this process may have. Any thread; reads a few small files.
#pragma once

#include <cstdint>
#include <string>

namespace asyncfabric {

// Of the machine and of each control group on the way up (version 1 or 2): the bound, less what is taken and cannot be dropped, and
// with swap. Whoever takes more is refused by the machine, but killed by a control group.
// `root`: of another machine's /proc and /sys, in tests.
uint64_t memory_room_bytes(const std::string& root = {});

}  // namespace asyncfabric
