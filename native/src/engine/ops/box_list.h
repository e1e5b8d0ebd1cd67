// box_list.h: the boxes of one op, which the submitting thread writes down once, and how far the lock's holder has copied them: one behind the
// other, each summed while it is copied. Threads: whoever has the op.
#pragma once

#include <optional>
#include <vector>

#include "asyncfabric/status.h"
#include "asyncfabric/types.h"
#include "provider/gatherer.h"
#include "rows/gathered_sum.h"

namespace asyncfabric {

class BoxList final : public Gatherer {
 public:
  // Of an empty list. kInvalidArgument: not boxes; kOutOfBounds: one leaves the region or the key.
  Status fill(const BoxBatch& batch, const void* base, uint64_t source_bytes, uint64_t target_bytes);
  void clear();

  uint64_t size() const { return boxes_.size(); }
  uint64_t bytes(uint64_t box) const { return boxes_[box].bytes; }
  uint64_t target(uint64_t box) const { return boxes_[box].target; }
  uint64_t before(uint64_t box) const { return boxes_[box].before; }  // bytes of the boxes before it
  uint64_t all_bytes() const { return all_bytes_; }

  // Never over the end of a box.
  bool copy(uint8_t* to, uint64_t before, uint64_t length) override;
  bool begin_parts(uint64_t before, uint64_t length) override;
  void copy_part(uint8_t* to, uint64_t at, uint64_t length) override;
  void end_parts() override;

 private:
  static constexpr size_t kMostKept = 1024;  // boxes whose memory stays for the next op of this slot
  // Smaller ones are still in the caches when the receiver looks at them.
  static constexpr uint64_t kPastBytes = 2048;

  struct Box {
    const uint8_t* data = nullptr;
    uint64_t target = 0, bytes = 0, before = 0;
  };

  const int64_t* row(size_t box) const;
  rows::Runs runs_of(size_t box) const;
  bool is_next(uint64_t before) const;
  void begin_box();
  void end_some(uint64_t length);

  std::vector<int64_t> rows_;
  std::vector<Box> boxes_;
  size_t dimensions_ = 0;
  uint64_t all_bytes_ = 0;
  uint64_t* sums_ = nullptr;

  size_t at_ = 0;      // the box that is being copied
  uint64_t done_ = 0;  // bytes of it
  uint64_t part_ = 0;  // bytes of it that are copied in parts now
  rows::Runs runs_;    // of it, while `sum_` is there
  std::optional<rows::GatheredSum> sum_;
};

}  // namespace asyncfabric
