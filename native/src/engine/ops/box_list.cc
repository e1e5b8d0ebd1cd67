// box_list.cc: see box_list.h.
#include "engine/ops/box_list.h"

namespace asyncfabric {
namespace {

constexpr size_t kSource = 0, kTarget = 1, kRunBytes = 2, kSizes = 3;  // of a row

}  // namespace

const int64_t* BoxList::row(size_t box) const { return rows_.data() + box * (kSizes + 2 * dimensions_); }

rows::Runs BoxList::runs_of(size_t box) const {
  const int64_t* sizes = row(box) + kSizes;
  return {boxes_[box].data,
          {sizes, dimensions_},
          {sizes + dimensions_, dimensions_},
          static_cast<size_t>(row(box)[kRunBytes])};
}

Status BoxList::fill(const BoxBatch& batch, const void* base, uint64_t source_bytes, uint64_t target_bytes) {
  if (batch.dimensions > rows::kMostDimensions || (batch.count != 0 && batch.sums == nullptr))
    return StatusCode::kInvalidArgument;
  dimensions_ = batch.dimensions;
  sums_ = batch.sums;
  rows_.assign(batch.rows, batch.rows + batch.count * (kSizes + 2 * dimensions_));
  boxes_.resize(batch.count);
  for (size_t i = 0; i < batch.count; ++i) {
    // Negative numbers turn into huge ones and fail the same comparisons.
    const auto source = static_cast<uint64_t>(row(i)[kSource]), target = static_cast<uint64_t>(row(i)[kTarget]);
    const auto run_bytes = static_cast<uint64_t>(row(i)[kRunBytes]);
    size_t bytes = 0, reach = 0;
    if (run_bytes % kBoxRunBytes != 0 || !runs_of(i).measure(&bytes, &reach) || bytes < kLeastBoxBytes)
      return StatusCode::kInvalidArgument;
    if (source > source_bytes || reach > source_bytes - source || target > target_bytes ||
        bytes > target_bytes - target)
      return StatusCode::kOutOfBounds;
    boxes_[i] = {static_cast<const uint8_t*>(base) + source, target, bytes, all_bytes_};
    all_bytes_ += bytes;
  }
  return {};
}

void BoxList::clear() {
  sum_.reset();
  if (boxes_.capacity() > kMostKept) {
    std::vector<Box>().swap(boxes_);
    std::vector<int64_t>().swap(rows_);
  }
  boxes_.clear();
  rows_.clear();
  at_ = 0;
  done_ = all_bytes_ = 0;
  sums_ = nullptr;
}

bool BoxList::is_next(uint64_t before) const { return at_ != boxes_.size() && before == boxes_[at_].before + done_; }

void BoxList::begin_box() {
  if (sum_) return;
  runs_ = runs_of(at_);
  sum_.emplace(runs_, boxes_[at_].bytes);
}

bool BoxList::copy(uint8_t* to, uint64_t before, uint64_t length) {
  if (!is_next(before)) return false;
  begin_box();
  sum_->copy(to, length, boxes_[at_].bytes >= kPastBytes);
  end_some(length);
  return true;
}

bool BoxList::begin_parts(uint64_t before, uint64_t length) {
  static_assert(kPartBytes % rows::GatheredSum::kBlockBytes == 0);
  if (!is_next(before)) return false;
  begin_box();
  part_ = length;
  return sum_->begin_parts(length);
}

void BoxList::copy_part(uint8_t* to, uint64_t at, uint64_t length) {
  sum_->copy_part(to, at, length, boxes_[at_].bytes >= kPastBytes);
}

void BoxList::end_parts() {
  sum_->end_parts();
  end_some(part_);
}

void BoxList::end_some(uint64_t length) {
  done_ += length;
  if (done_ != boxes_[at_].bytes) return;
  sums_[at_++] = sum_->sum();
  done_ = 0;
  sum_.reset();
}

}  // namespace asyncfabric
