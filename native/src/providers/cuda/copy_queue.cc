// copy_queue.cc: see copy_queue.h.
#include "providers/cuda/copy_queue.h"

#include <algorithm>

#include "base/clock.h"
#include "providers/cuda/_generated/kernel_text.h"

namespace asyncfabric::cuda {
namespace {

constexpr int kAttributeMultiprocessors = 16;
constexpr unsigned kThreads = 512;
constexpr uint64_t kLineBytes = 64;
constexpr uint64_t kCheckNs = 10'000'000;
// Of streams: the driver takes the highest that there is. A kernel of ours is short, and what follows it on its stream must not wait
// until the multiprocessors have done everything that others launched before it.
constexpr int kFirst = -1000;

}  // namespace

Status CopyQueue::open(std::shared_ptr<Device> device, ListMode mode, uint32_t lanes, std::unique_ptr<CopyQueue>* out,
                       std::string* detail) {
  const Driver& driver = device->driver();
  const Scope scope(*device);
  std::unique_ptr<CopyQueue> queue(new CopyQueue(device, mode, std::clamp(lanes, 1u, kMaxLanes)));
  const char* call = "cuMemHostAlloc";
  CUresult result =
      driver.cuMemHostAlloc(&queue->words_, kWays * kMaxLanes * kLineBytes, kHostPortable | kHostDeviceMap);
  if (result == kSuccess)
    result = driver.cuMemHostAlloc(&queue->lists_, kWays * kLists * kListPieces * sizeof(Piece),
                                   kHostPortable | kHostDeviceMap);
  for (size_t way = 0; way < kWays && result == kSuccess; ++way) {
    WayQueue& at = queue->queues_[way];
    at.lists = static_cast<Piece*>(queue->lists_) + way * kLists * kListPieces;
    at.pending.reserve(kListPieces);
    at.flying.reserve(64);
    call = "cuStreamCreateWithPriority";
    for (uint32_t lane = 0; lane < queue->lanes_ && result == kSuccess; ++lane) {
      char* const word = static_cast<char*>(queue->words_) + (way * kMaxLanes + lane) * kLineBytes;
      at.flags[lane] = reinterpret_cast<std::atomic<uint64_t>*>(word);
      at.flags[lane]->store(0, std::memory_order_relaxed);
      result = driver.cuStreamCreateWithPriority(&at.streams[lane], kStreamNonBlocking, kFirst);
    }
  }
  if (result != kSuccess) {
    *detail = "cuda: " + driver.complaint(call, result);
    return Device::status(result);
  }
  if (mode == ListMode::kKernel) {
    result = driver.cuModuleLoadData(&queue->module_, kKernelText);
    if (result == kSuccess) result = driver.cuModuleGetFunction(&queue->copy_pieces_, queue->module_, "copy_pieces");
    if (result == kSuccess) result = driver.cuModuleGetFunction(&queue->copy_pages_, queue->module_, "copy_pages");
    queue->kernels_ = result == kSuccess;
    if (!queue->kernels_) queue->mode_ = ListMode::kSingle;  // a driver that compiles no PTX: one call per copy
    queue->blocks_ = static_cast<unsigned>(std::max(device->attribute(kAttributeMultiprocessors), 1)) * 2;
  }
  if (mode == ListMode::kBatch && driver.cuMemcpyBatchAsync_v2 == nullptr) {
    *detail = "cuda: pages=batch needs a driver for CUDA 13";
    return StatusCode::kNoProvider;
  }
  *out = std::move(queue);
  return {};
}

CopyQueue::~CopyQueue() {
  drain();
  const Driver& driver = device_->driver();
  const Scope scope(*device_);
  for (WayQueue& queue : queues_)
    for (uint32_t lane = 0; lane < lanes_; ++lane)
      if (queue.streams[lane] != nullptr) driver.cuStreamDestroy_v2(queue.streams[lane]);
  if (module_ != nullptr) driver.cuModuleUnload(module_);
  if (words_ != nullptr) driver.cuMemFreeHost(words_);
  if (lists_ != nullptr) driver.cuMemFreeHost(lists_);
}

void CopyQueue::drain() {
  const Scope scope(*device_);
  for (const WayQueue& queue : queues_)
    for (uint32_t lane = 0; lane < lanes_; ++lane)
      if (queue.streams[lane] != nullptr) device_->driver().cuStreamSynchronize(queue.streams[lane]);
}

bool CopyQueue::has_room(const WayQueue& queue, uint64_t bytes) const {
  const uint64_t held = queue.flying_bytes + queue.pending_bytes;
  return held == 0 || held + bytes <= kMaxFlyingBytes;
}

uint64_t CopyQueue::add(Way way, uint64_t target, uint64_t source, uint64_t bytes, const Ends& ends) {
  WayQueue& queue = queues_[index(way)];
  if (failed_ != kSuccess) return queue.issued + 1;  // trouble() reports it to the owner
  if (!has_room(queue, bytes)) return 0;
  if (!queue.pending.empty()) {
    Piece& last = queue.pending.back();
    if (queue.last_ends == ends && last.target + last.bytes == target && last.source + last.bytes == source) {
      queue.listable -= fits_list(last) ? 1 : 0;
      last.bytes += bytes;
      queue.listable += fits_list(last) ? 1 : 0;
      queue.pending_bytes += bytes;
      return queue.issued + 1;
    }
  }
  if (queue.pending.size() == kListPieces) {
    launch(queue, way);
    if (!queue.pending.empty()) return 0;
  }
  queue.pending.push_back({target, source, bytes});
  queue.last_ends = ends;
  queue.listable += fits_list(queue.pending.back()) ? 1 : 0;
  queue.pending_bytes += bytes;
  return queue.issued + 1;
}

uint64_t CopyQueue::add_list(Way way, const PageStretch& stretch, const Page* pages) {
  WayQueue& queue = queues_[index(way)];
  const uint64_t bytes = stretch.count * stretch.page_bytes;
  if (failed_ != kSuccess) return queue.issued + 1;
  if (!has_room(queue, bytes)) return 0;
  if (queue.pending.size() + stretch.count > kListPieces) {
    launch(queue, way);
    if (!queue.pending.empty()) return 0;
  }
  for (uint64_t i = 0; i < stretch.count; ++i) {
    const Piece piece{stretch.target + pages[i].target, stretch.source + pages[i].source, stretch.page_bytes};
    queue.listable += fits_list(piece) ? 1 : 0;
    queue.pending.push_back(piece);
  }
  queue.last_ends = {};
  queue.pending_bytes += bytes;
  const uint64_t ticket = queue.issued + 1;
  // An idle GPU begins with what there is; all that comes meanwhile is the next launch: few launches have few tails.
  if (queue.flying.empty()) launch(queue, way);
  return ticket;
}

uint64_t CopyQueue::add_stretch(Way way, const PageStretch& stretch) {
  WayQueue& queue = queues_[index(way)];
  const uint64_t bytes = stretch.count * stretch.page_bytes;
  if (failed_ != kSuccess) return queue.issued + 1;
  if (!has_room(queue, bytes)) return 0;
  PageStretch* const last = queue.stretch_count != 0 ? &queue.stretches.stretch[queue.stretch_count - 1] : nullptr;
  if (last != nullptr && last->pages + last->count * sizeof(Page) == stretch.pages && last->target == stretch.target &&
      last->source == stretch.source && last->page_bytes == stretch.page_bytes) {
    last->count += stretch.count;  // the next part of the same list
  } else {
    if (queue.stretch_count == kStretches) {
      launch(queue, way);
      if (queue.stretch_count != 0) return 0;
    }
    queue.stretches.stretch[queue.stretch_count++] = stretch;
  }
  queue.pending_bytes += bytes;
  return queue.issued + 1;
}

bool CopyQueue::may_launch(const WayQueue& queue) const {
  return waits(queue) &&
         (queue.flying.size() < 2 || queue.pending_bytes >= kEagerBytes || queue.pending.size() == kListPieces);
}

void CopyQueue::launch() {
  for (size_t way = 0; way < kWays; ++way)
    if (may_launch(queues_[way])) launch(queues_[way], static_cast<Way>(way));
}

void CopyQueue::launch(WayQueue& queue, Way way) {
  if (failed_ != kSuccess) return;
  // Host memory needs no multiprocessor to be the slower side, and may not be mapped for one.
  const bool as_list = mode_ != ListMode::kSingle && way == Way::kOut && queue.listable >= kListFrom;
  if (as_list && queue.list_tickets[queue.next_list] > queue.landed) return;  // the GPU still reads that list
  const Scope scope(*device_);
  CUresult result = kSuccess;
  if (queue.stretch_count != 0) result = launch_stretches(queue);
  if (result == kSuccess && (!as_list || queue.listable < queue.pending.size()))
    result = copy_one_by_one(queue, !as_list);
  if (as_list && result == kSuccess) result = mode_ == ListMode::kKernel ? launch_kernel(queue) : launch_batch(queue);
  const uint64_t ticket = ++queue.issued;
  if (result == kSuccess)
    result = device_->driver().cuStreamWriteValue64_v2(
        queue.streams[queue.lane], reinterpret_cast<CUdeviceptr>(queue.flags[queue.lane]), ticket, 0);
  if (result != kSuccess) failed_ = result;
  queue.flying.push_back({ticket, queue.pending_bytes, queue.lane});
  queue.lane = (queue.lane + 1) % lanes_;
  queue.flying_bytes += queue.pending_bytes;
  queue.pending.clear();
  queue.stretch_count = 0;
  queue.pending_bytes = 0;
  queue.listable = 0;
}

// All of them, or those that fit no list.
CUresult CopyQueue::copy_one_by_one(WayQueue& queue, bool all) {
  CUresult result = kSuccess;
  for (const Piece& piece : queue.pending) {
    if (result != kSuccess) break;
    if (!all && fits_list(piece)) continue;
    result = device_->driver().cuMemcpyAsync(piece.target, piece.source, piece.bytes, queue.streams[queue.lane]);
  }
  return result;
}

CUresult CopyQueue::launch_kernel(WayQueue& queue) {
  Piece* list = queue.lists + queue.next_list * kListPieces;
  const Piece* end = std::copy_if(queue.pending.begin(), queue.pending.end(), list, fits_list);
  uint32_t count = static_cast<uint32_t>(end - list);
  void* arguments[] = {&list, &count};
  queue.list_tickets[queue.next_list] = queue.issued + 1;
  queue.next_list = (queue.next_list + 1) % kLists;
  return device_->driver().cuLaunchKernel(copy_pieces_, std::min(count, blocks_), 1, 1, kThreads, 1, 1, 0,
                                          queue.streams[queue.lane], arguments, nullptr);
}

CUresult CopyQueue::launch_stretches(WayQueue& queue) {
  uint64_t count = 0;
  for (uint32_t i = 0; i < queue.stretch_count; ++i) count += queue.stretches.stretch[i].count;
  void* arguments[] = {&queue.stretches, &count};
  const auto blocks = static_cast<unsigned>(std::min<uint64_t>(count, blocks_));
  return device_->driver().cuLaunchKernel(copy_pages_, blocks, 1, 1, kThreads, 1, 1, 0, queue.streams[queue.lane],
                                          arguments, nullptr);
}

CUresult CopyQueue::launch_batch(WayQueue& queue) {
  batch_targets_.clear();
  batch_sources_.clear();
  batch_bytes_.clear();
  for (const Piece& piece : queue.pending) {
    if (!fits_list(piece)) continue;
    batch_targets_.push_back(piece.target);
    batch_sources_.push_back(piece.source);
    batch_bytes_.push_back(piece.bytes);
  }
  CUmemcpyAttributes attributes{};
  attributes.srcAccessOrder = kSourceInStreamOrder;
  size_t first = 0;
  return device_->driver().cuMemcpyBatchAsync_v2(batch_targets_.data(), batch_sources_.data(), batch_bytes_.data(),
                                                 batch_bytes_.size(), &attributes, &first, 1,
                                                 queue.streams[queue.lane]);
}

void CopyQueue::look() {
  for (WayQueue& queue : queues_) {
    size_t done = 0;  // in order: a later one in another lane waits for it
    for (; done < queue.flying.size(); ++done) {
      const Launch& launch = queue.flying[done];
      if (queue.flags[launch.lane]->load(std::memory_order_acquire) < launch.ticket) break;
      queue.landed = launch.ticket;
      queue.flying_bytes -= launch.bytes;
    }
    if (done == 0) continue;
    queue.flying.erase(queue.flying.begin(), queue.flying.begin() + static_cast<ptrdiff_t>(done));
    checked_ns_ = 0;
  }
}

bool CopyQueue::idle() const {
  return std::all_of(queues_.begin(), queues_.end(),
                     [](const WayQueue& queue) { return queue.flying.empty() && !waits(queue); });
}

// A fault of the GPU, ours or of a kernel in the same context, stops all streams: the words are then never written.
Status CopyQueue::trouble() {
  if (failed_ == kSuccess && !idle()) {
    const uint64_t now = now_ns();
    if (checked_ns_ == 0) checked_ns_ = now;
    if (now - checked_ns_ >= kCheckNs) {
      checked_ns_ = now;
      const Scope scope(*device_);
      for (const WayQueue& queue : queues_)
        for (uint32_t lane = 0; lane < lanes_; ++lane) {
          const CUresult result = device_->driver().cuStreamQuery(queue.streams[lane]);
          if (result != kSuccess && result != kNotReady) failed_ = result;
        }
    }
  }
  return failed_ == kSuccess ? Status() : Status(StatusCode::kRailDown, raw_of(failed_));
}

}  // namespace asyncfabric::cuda
