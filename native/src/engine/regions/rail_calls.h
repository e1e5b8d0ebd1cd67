// rail_calls.h: a call of several rails that may wait for peers, as releasing and revoking do. Such a wait has no thread to itself: each rail
// is asked for a moment, and again later, and in between the control thread serves everybody else.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "provider/provider.h"

namespace asyncfabric {

struct RailCalls {
  static constexpr uint64_t kFirstPauseNs = 200'000;
  static constexpr uint64_t kLongestPauseNs = 20'000'000;

  std::vector<uint32_t> rails;  // that have not answered
  std::function<Status(uint32_t rail, Rail& at, uint64_t patience_ns)> call;
  std::function<void(Status)> done;  // [control] when all have answered, or the deadline is over: kDrainTimeout then
  uint64_t until_ns = 0;
  uint64_t pause_ns = 0;  // before the latest try; 0: there was none
  Status worst;

  uint64_t next_pause() {
    pause_ns = pause_ns == 0 ? kFirstPauseNs : std::min(pause_ns * 2, kLongestPauseNs);
    return pause_ns;
  }
};

}  // namespace asyncfabric
