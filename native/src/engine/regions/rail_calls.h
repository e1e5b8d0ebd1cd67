// rail_calls.h: a call of several rails that may wait for peers, as releasing and revoking do. Such a wait has no thread to itself: each rail
// is asked for a moment, and again later, and in between the control thread serves everybody else.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "engine/control.h"
#include "provider/provider.h"

namespace asyncfabric {

struct RailCalls {
  std::vector<uint32_t> rails;  // that have not answered
  std::function<Status(uint32_t rail, Rail& at, uint64_t patience_ns)> call;
  std::function<void(Status)> done;  // [control] when all have answered, or the deadline is over: kDrainTimeout then
  uint64_t until_ns = 0;
  Pauses pauses;
  Status worst;
};

}  // namespace asyncfabric
