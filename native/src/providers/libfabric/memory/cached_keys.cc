// cached_keys.cc: see cached_keys.h.
#include "providers/libfabric/memory/cached_keys.h"

#include "providers/libfabric/memory/memory.h"

namespace asyncfabric::libfabric {

bool hands_out_cached_keys(const Device& device) {
  alignas(4096) uint8_t page[4096] = {};
  const Memory memory{page, sizeof page, kHostDevice, -1, kAccessRemoteWrite};
  MrPtr first, second;
  if (!register_range(device, memory, &first).ok() || !register_range(device, memory, &second).ok())
    return false;  // whatever is wrong here stops the opening a moment later, with its own words
  return fi_mr_key(first.get()) == fi_mr_key(second.get());
}

}  // namespace asyncfabric::libfabric
