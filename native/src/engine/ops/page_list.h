// page_list.h: the pages of one op, which the submitting thread writes down once and which are read where they lie: by rails, and by
// kernels of a GPU, for which they lie in a room that each rail was shown when the engine started. Then no other core touches them:
// they stay in the cache of the thread that writes the next list there.
// Threads: a list belongs to whoever has the op; the room is for any thread.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <mutex>

#include "provider/work.h"

namespace asyncfabric {

class PageRoom {
 public:
  static constexpr uint64_t kBytes = 8ull << 20;
  static constexpr uint64_t kUnit = 4096 / sizeof(Page);  // pages

  PageRoom() = default;
  ~PageRoom() {
    if (base_ != nullptr) munmap(base_, kBytes);
  }
  PageRoom(const PageRoom&) = delete;
  PageRoom& operator=(const PageRoom&) = delete;

  // Before the worker runs, where a rail takes lists. Without it nothing is ever taken from here.
  bool open() {
    void* pages = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    base_ = pages == MAP_FAILED ? nullptr : static_cast<Page*>(pages);
    return base_ != nullptr;
  }
  void* base() const { return base_; }

  // The lowest place that is free, so that one list after the other lies where the caches know it. Null: none is.
  Page* take(uint64_t count) {
    const uint64_t units = (count + kUnit - 1) / kUnit;
    if (base_ == nullptr || units > kUnits) return nullptr;
    const std::lock_guard lock(mutex_);
    uint64_t run = 0;
    for (uint64_t at = 0; at < kUnits; ++at) {
      run = used_[at] ? 0 : run + 1;
      if (run < units) continue;
      std::fill_n(used_.begin() + static_cast<ptrdiff_t>(at + 1 - units), units, true);
      return base_ + (at + 1 - units) * kUnit;
    }
    return nullptr;
  }
  void give_back(const Page* pages, uint64_t count) {
    const std::lock_guard lock(mutex_);
    std::fill_n(used_.begin() + (pages - base_) / static_cast<ptrdiff_t>(kUnit), (count + kUnit - 1) / kUnit, false);
  }

 private:
  static constexpr uint64_t kUnits = kBytes / sizeof(Page) / kUnit;

  Page* base_ = nullptr;
  std::mutex mutex_;
  std::array<bool, kUnits> used_{};
};

class PageList {
 public:
  PageList() = default;
  ~PageList() { clear(); }
  PageList(const PageList&) = delete;
  PageList& operator=(const PageList&) = delete;

  // Of an empty list: room for so many pages, not written yet.
  void make(uint64_t count, PageRoom& room) {
    size_ = count;
    if ((pages_ = room.take(count)) != nullptr) {
      room_ = &room;
      return;
    }
    if (capacity_ < count) {
      own_ = std::make_unique_for_overwrite<Page[]>(count);
      capacity_ = count;
    }
    pages_ = own_.get();
  }
  void clear() {
    if (room_ != nullptr) room_->give_back(pages_, size_);
    room_ = nullptr;
    pages_ = nullptr;
    size_ = 0;
    most_ = bits_ = 0;
    if (capacity_ <= kMostKept) return;
    own_.reset();
    capacity_ = 0;
  }

  uint64_t size() const { return size_; }
  const Page& operator[](uint64_t index) const { return pages_[index]; }
  uint64_t most() const { return most_; }  // the largest offset behind the key
  uint64_t bits() const { return bits_; }  // all offsets, or'ed: what they are multiples of

  // Numbers to offsets. `reads`: the sources are behind the key, otherwise the targets are. False: a number is larger than its bound;
  // negative ones turn into huge ones and fail the same comparison.
  bool fill(const int64_t* sources, const int64_t* targets, const Page& start, const Page& stride, const Page& last,
            bool reads) {
    uint64_t source_most = 0, target_most = 0, bits = 0;
    for (uint64_t i = 0; i < size_; ++i) {
      const auto source = static_cast<uint64_t>(sources[i]), target = static_cast<uint64_t>(targets[i]);
      source_most = std::max(source_most, source);
      target_most = std::max(target_most, target);
      pages_[i] = {start.source + source * stride.source, start.target + target * stride.target};
      bits |= pages_[i].source | pages_[i].target;
    }
    bits_ = bits;
    most_ = reads ? start.source + source_most * stride.source : start.target + target_most * stride.target;
    return source_most <= last.source && target_most <= last.target;
  }

 private:
  static constexpr uint64_t kMostKept = 65536;

  Page* pages_ = nullptr;
  uint64_t size_ = 0;
  uint64_t most_ = 0, bits_ = 0;
  PageRoom* room_ = nullptr;  // null: the memory is our own
  std::unique_ptr<Page[]> own_;
  uint64_t capacity_ = 0;
};

}  // namespace asyncfabric
