// options.h: the options of a local rail: how RailSpec words become values. Opening thread.
#pragma once

#include <string>

#include "asyncfabric/types.h"
#include "providers/local/peers/neighbours.h"
#include "providers/local/transfers/copy.h"

namespace asyncfabric::local {

enum class ForeignChoice { kAuto, kCma, kBounce };

struct Options {
  CopyMode copy = CopyMode::kAuto;               // copy=auto|plain|nt: stores used for mapped memory
  ForeignChoice foreign = ForeignChoice::kAuto;  // foreign=auto|cma|bounce: the way to memory that no engine allocated
  TracerPolicy tracer = TracerPolicy::kFirst;    // tracer=first|any|off: PR_SET_PTRACER, where Yama is active
  uint32_t copiers =
      0;  // copiers=<1 to 16>: threads that copy large payloads into mapped memory together; 0: by the cores
  uint32_t ring_entries = 2048;  // ring=<entries>, a power of two: per connection, up to 12 notices in one
};

Status parse_options(const RailSpec& spec, Options* out, std::string* detail);

}  // namespace asyncfabric::local
