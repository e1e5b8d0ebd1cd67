// copy_queue.h: copies wait here until they are launched together, in streams of our own, and a word in pinned memory that the
// GPU itself writes shows which launches have landed: looking costs a load, not a driver call. [engine lock]
// Large copies go to the copy engines and use no multiprocessor. A list of small ones goes to one kernel launch, or to the copy
// engines as a batch where the driver has that. A new launch waits while two are under way, so that lists grow meanwhile. With several
// lanes launches go to streams in turn: one begins while the one before it ends. They are reported in order all the same.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "provider/provider.h"
#include "providers/cuda/device.h"

namespace asyncfabric::cuda {

enum class Way : uint8_t { kOut = 0, kUp = 1, kDown = 2 };  // between GPUs (or within one), from the host, to the host
constexpr size_t kWays = 3;

enum class ListMode : uint8_t { kKernel, kBatch, kSingle };  // how lists of small copies are made

struct Piece {  // as copy_pieces.cu reads it
  uint64_t target;
  uint64_t source;
  uint64_t bytes;
};

// Pages of one size that lie in pinned memory as the engine wrote them down, as copy_pieces.cu reads them.
struct PageStretch {
  uint64_t pages;
  uint64_t target;
  uint64_t source;
  uint64_t count;
  uint64_t page_bytes;
};
// Which memory a copy is of. The driver refuses one copy over two allocations, also where their addresses follow each other.
struct Ends {
  const LocalMemory* local = nullptr;
  const RemoteMemory* remote = nullptr;
  bool operator==(const Ends&) const = default;
};

constexpr uint32_t kStretches = 16;  // of one launch
struct Stretches {
  PageStretch stretch[kStretches];
};

class CopyQueue {
 public:
  static Status open(std::shared_ptr<Device> device, ListMode mode, uint32_t lanes, std::unique_ptr<CopyQueue>* out,
                     std::string* detail);
  ~CopyQueue();
  CopyQueue(const CopyQueue&) = delete;
  CopyQueue& operator=(const CopyQueue&) = delete;

  // The ticket that will have landed when the copy has; 0: no room now, look again after a while. What continues the copy before it, in
  // the same memory at both ends, becomes one with it.
  uint64_t add(Way way, uint64_t target, uint64_t source, uint64_t bytes, const Ends& ends);
  // The same for pages of one size; `count` is at most kListPages.
  uint64_t add_list(Way way, const PageStretch& stretch, const Page* pages);
  // The same for pages that the GPU reads where they lie, which they do until the ticket has landed: no processor looks at them.
  uint64_t add_stretch(Way way, const PageStretch& stretch);
  bool takes(Way way, const PageStretch& stretch, uint64_t page_bits) const {
    return kernels_ && way == Way::kOut && stretch.count >= kListFrom && stretch.page_bytes <= kListLimit &&
           ((stretch.target | stretch.source | stretch.page_bytes | page_bits) & 15) == 0;
  }
  void launch();  // what may go now
  bool landed(Way way, uint64_t ticket) const { return queues_[index(way)].landed >= ticket; }
  void look();  // how far the GPU is
  bool idle() const;
  Status trouble();  // why nothing lands any more; ok when all is well. Looks at the driver at most every 10 ms.

  // [control] Everything that was launched so far has landed.
  void drain();

  static constexpr uint32_t kListPages = 1024;             // of one request
  static constexpr uint32_t kListPieces = 16384;           // of one launch
  static constexpr uint64_t kMaxFlyingBytes = 1ull << 30;  // how long a flush may take, at a few hundred GB/s

 private:
  static constexpr uint32_t kLists = 4;
  static constexpr uint32_t kMaxLanes = 4;
  static constexpr uint64_t kEagerBytes = 16ull << 20;  // so much is launched at once
  static constexpr uint64_t kListLimit = 256ull << 10;  // longer copies are never worth a place in a list
  static constexpr uint32_t kListFrom = 4;              // fewer copies are not worth a kernel

  struct Launch {
    uint64_t ticket;
    uint64_t bytes;
    uint32_t lane;
  };
  struct WayQueue {
    std::array<CUstream, kMaxLanes> streams{};
    std::array<std::atomic<uint64_t>*, kMaxLanes> flags{};  // partner: the GPU stores tickets, the lock's holder loads
    uint32_t lane = 0;                                      // of the next launch
    std::vector<Piece> pending;
    Ends last_ends;         // of the last of them; none of a list's pages
    uint32_t listable = 0;  // of them, how many fit a list
    Stretches stretches;
    uint32_t stretch_count = 0;
    uint64_t pending_bytes = 0;
    uint64_t issued = 0;
    uint64_t landed = 0;
    uint64_t flying_bytes = 0;
    std::vector<Launch> flying;  // oldest first
    std::array<uint64_t, kLists> list_tickets{};
    Piece* lists = nullptr;
    uint32_t next_list = 0;
  };

  CopyQueue(std::shared_ptr<Device> device, ListMode mode, uint32_t lanes)
      : device_(std::move(device)), mode_(mode), lanes_(lanes) {}
  static size_t index(Way way) { return static_cast<size_t>(way); }
  bool may_launch(const WayQueue& queue) const;
  void launch(WayQueue& queue, Way way);
  bool has_room(const WayQueue& queue, uint64_t bytes) const;
  static bool waits(const WayQueue& queue) { return !queue.pending.empty() || queue.stretch_count != 0; }
  static bool fits_list(const Piece& piece) {
    return piece.bytes <= kListLimit && ((piece.target | piece.source | piece.bytes) & 15) == 0;
  }
  CUresult copy_one_by_one(WayQueue& queue, bool all);
  CUresult launch_kernel(WayQueue& queue);
  CUresult launch_stretches(WayQueue& queue);
  CUresult launch_batch(WayQueue& queue);

  std::shared_ptr<Device> device_;
  ListMode mode_;
  uint32_t lanes_;
  std::array<WayQueue, kWays> queues_;
  void* words_ = nullptr;
  void* lists_ = nullptr;
  CUmodule module_ = nullptr;
  CUfunction copy_pieces_ = nullptr;
  CUfunction copy_pages_ = nullptr;
  bool kernels_ = false;
  unsigned blocks_ = 0;
  std::vector<CUdeviceptr> batch_targets_, batch_sources_;  // kept for their capacity
  std::vector<size_t> batch_bytes_;
  CUresult failed_ = kSuccess;
  uint64_t checked_ns_ = 0;
};

}  // namespace asyncfabric::cuda
