// post_batch.h: the requests of one pass of post(), and what has to be known of each when its rail does not take it. [engine lock]
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/ops/op.h"
#include "provider/work.h"

namespace asyncfabric {

struct PostBatch {
  struct Made {
    Leg* leg = nullptr;
    uint64_t cursor_before = 0;
    uint64_t page_done_before = 0;
    uint64_t bytes = 0;
    uint32_t worth = 0;  // logical arrivals that its immediate carries
  };

  std::vector<WorkRequest> requests;  // these two keep their room from pass to pass
  std::vector<Made> made;

  void make_room(size_t count) {
    if (requests.size() >= count) return;
    requests.resize(count);
    made.resize(count);
  }
};

}  // namespace asyncfabric
