// copy_desk.cc: see copy_desk.h.
#include "providers/cuda/copy_desk.h"

#include <algorithm>

#include "base/clock.h"
#include "providers/cuda/kernel_text.h"

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

Status CopyDesk::open(std::shared_ptr<Device> device, ListMode mode, uint32_t lanes, std::unique_ptr<CopyDesk>* out,
                      std::string* detail) {
  const Driver& driver = device->driver();
  const Scope scope(*device);
  std::unique_ptr<CopyDesk> desk(new CopyDesk(device, mode, std::clamp(lanes, 1u, kMaxLanes)));
  const char* call = "cuMemHostAlloc";
  CUresult result =
      driver.cuMemHostAlloc(&desk->words_, kWays * kMaxLanes * kLineBytes, kHostPortable | kHostDeviceMap);
  if (result == kSuccess)
    result = driver.cuMemHostAlloc(&desk->lists_, kWays * kLists * kListPieces * sizeof(Piece),
                                   kHostPortable | kHostDeviceMap);
  for (size_t way = 0; way < kWays && result == kSuccess; ++way) {
    Desk& at = desk->desks_[way];
    at.lists = static_cast<Piece*>(desk->lists_) + way * kLists * kListPieces;
    at.pending.reserve(kListPieces);
    at.flying.reserve(64);
    call = "cuStreamCreateWithPriority";
    for (uint32_t lane = 0; lane < desk->lanes_ && result == kSuccess; ++lane) {
      char* const word = static_cast<char*>(desk->words_) + (way * kMaxLanes + lane) * kLineBytes;
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
    result = driver.cuModuleLoadData(&desk->module_, kKernelText);
    if (result == kSuccess) result = driver.cuModuleGetFunction(&desk->copy_pieces_, desk->module_, "copy_pieces");
    if (result == kSuccess) result = driver.cuModuleGetFunction(&desk->copy_pages_, desk->module_, "copy_pages");
    desk->kernels_ = result == kSuccess;
    if (!desk->kernels_) desk->mode_ = ListMode::kSingle;  // a driver that compiles no PTX: one call per copy
    desk->blocks_ = static_cast<unsigned>(std::max(device->attribute(kAttributeMultiprocessors), 1)) * 2;
  }
  if (mode == ListMode::kBatch && driver.cuMemcpyBatchAsync_v2 == nullptr) {
    *detail = "cuda: pages=batch needs a driver for CUDA 13";
    return StatusCode::kNoProvider;
  }
  *out = std::move(desk);
  return {};
}

CopyDesk::~CopyDesk() {
  drain();
  const Driver& driver = device_->driver();
  const Scope scope(*device_);
  for (Desk& desk : desks_)
    for (uint32_t lane = 0; lane < lanes_; ++lane)
      if (desk.streams[lane] != nullptr) driver.cuStreamDestroy_v2(desk.streams[lane]);
  if (module_ != nullptr) driver.cuModuleUnload(module_);
  if (words_ != nullptr) driver.cuMemFreeHost(words_);
  if (lists_ != nullptr) driver.cuMemFreeHost(lists_);
}

void CopyDesk::drain() {
  const Scope scope(*device_);
  for (const Desk& desk : desks_)
    for (uint32_t lane = 0; lane < lanes_; ++lane)
      if (desk.streams[lane] != nullptr) device_->driver().cuStreamSynchronize(desk.streams[lane]);
}

bool CopyDesk::has_room(const Desk& desk, uint64_t bytes) const {
  const uint64_t held = desk.flying_bytes + desk.pending_bytes;
  return held == 0 || held + bytes <= kMaxFlyingBytes;
}

uint64_t CopyDesk::add(Way way, uint64_t target, uint64_t source, uint64_t bytes) {
  Desk& desk = desks_[index(way)];
  if (failed_ != kSuccess) return desk.issued + 1;  // trouble() tells the owner
  if (!has_room(desk, bytes)) return 0;
  if (!desk.pending.empty()) {
    Piece& last = desk.pending.back();
    if (last.target + last.bytes == target && last.source + last.bytes == source) {
      desk.listable -= fits_list(last) ? 1 : 0;
      last.bytes += bytes;
      desk.listable += fits_list(last) ? 1 : 0;
      desk.pending_bytes += bytes;
      return desk.issued + 1;
    }
  }
  if (desk.pending.size() == kListPieces) {
    launch(desk, way);
    if (!desk.pending.empty()) return 0;
  }
  desk.pending.push_back({target, source, bytes});
  desk.listable += fits_list(desk.pending.back()) ? 1 : 0;
  desk.pending_bytes += bytes;
  return desk.issued + 1;
}

uint64_t CopyDesk::add_list(Way way, const PageStretch& stretch, const Page* pages) {
  Desk& desk = desks_[index(way)];
  const uint64_t bytes = stretch.count * stretch.page_bytes;
  if (failed_ != kSuccess) return desk.issued + 1;
  if (!has_room(desk, bytes)) return 0;
  if (desk.pending.size() + stretch.count > kListPieces) {
    launch(desk, way);
    if (!desk.pending.empty()) return 0;
  }
  for (uint64_t i = 0; i < stretch.count; ++i) {
    const Piece piece{stretch.target + pages[i].target, stretch.source + pages[i].source, stretch.page_bytes};
    desk.listable += fits_list(piece) ? 1 : 0;
    desk.pending.push_back(piece);
  }
  desk.pending_bytes += bytes;
  const uint64_t ticket = desk.issued + 1;
  // An idle GPU begins with what there is; all that comes meanwhile is the next launch: few launches have few tails.
  if (desk.flying.empty()) launch(desk, way);
  return ticket;
}

uint64_t CopyDesk::add_stretch(Way way, const PageStretch& stretch) {
  Desk& desk = desks_[index(way)];
  const uint64_t bytes = stretch.count * stretch.page_bytes;
  if (failed_ != kSuccess) return desk.issued + 1;
  if (!has_room(desk, bytes)) return 0;
  PageStretch* const last = desk.stretch_count != 0 ? &desk.stretches.stretch[desk.stretch_count - 1] : nullptr;
  if (last != nullptr && last->pages + last->count * sizeof(Page) == stretch.pages && last->target == stretch.target &&
      last->source == stretch.source && last->page_bytes == stretch.page_bytes) {
    last->count += stretch.count;  // the next part of the same list
  } else {
    if (desk.stretch_count == kStretches) {
      launch(desk, way);
      if (desk.stretch_count != 0) return 0;
    }
    desk.stretches.stretch[desk.stretch_count++] = stretch;
  }
  desk.pending_bytes += bytes;
  return desk.issued + 1;
}

bool CopyDesk::may_launch(const Desk& desk) const {
  return waits(desk) &&
         (desk.flying.size() < 2 || desk.pending_bytes >= kEagerBytes || desk.pending.size() == kListPieces);
}

void CopyDesk::launch() {
  for (size_t way = 0; way < kWays; ++way)
    if (may_launch(desks_[way])) launch(desks_[way], static_cast<Way>(way));
}

void CopyDesk::launch(Desk& desk, Way way) {
  if (failed_ != kSuccess) return;
  // Host memory needs no multiprocessor to be the slower side, and may not be mapped for one.
  const bool as_list = mode_ != ListMode::kSingle && way == Way::kOut && desk.listable >= kListFrom;
  if (as_list && desk.list_tickets[desk.next_list] > desk.landed) return;  // the GPU still reads that list
  const Scope scope(*device_);
  CUresult result = kSuccess;
  if (desk.stretch_count != 0) result = launch_stretches(desk);
  if (result == kSuccess && (!as_list || desk.listable < desk.pending.size())) result = copy_one_by_one(desk, !as_list);
  if (as_list && result == kSuccess) result = mode_ == ListMode::kKernel ? launch_kernel(desk) : launch_batch(desk);
  const uint64_t ticket = ++desk.issued;
  if (result == kSuccess)
    result = device_->driver().cuStreamWriteValue64_v2(desk.streams[desk.lane],
                                                       reinterpret_cast<CUdeviceptr>(desk.flags[desk.lane]), ticket, 0);
  if (result != kSuccess) failed_ = result;
  desk.flying.push_back({ticket, desk.pending_bytes, desk.lane});
  desk.lane = (desk.lane + 1) % lanes_;
  desk.flying_bytes += desk.pending_bytes;
  desk.pending.clear();
  desk.stretch_count = 0;
  desk.pending_bytes = 0;
  desk.listable = 0;
}

// All of them, or those that fit no list.
CUresult CopyDesk::copy_one_by_one(Desk& desk, bool all) {
  CUresult result = kSuccess;
  for (const Piece& piece : desk.pending) {
    if (result != kSuccess) break;
    if (!all && fits_list(piece)) continue;
    result = device_->driver().cuMemcpyAsync(piece.target, piece.source, piece.bytes, desk.streams[desk.lane]);
  }
  return result;
}

CUresult CopyDesk::launch_kernel(Desk& desk) {
  Piece* list = desk.lists + desk.next_list * kListPieces;
  const Piece* end = std::copy_if(desk.pending.begin(), desk.pending.end(), list, fits_list);
  uint32_t count = static_cast<uint32_t>(end - list);
  void* arguments[] = {&list, &count};
  desk.list_tickets[desk.next_list] = desk.issued + 1;
  desk.next_list = (desk.next_list + 1) % kLists;
  return device_->driver().cuLaunchKernel(copy_pieces_, std::min(count, blocks_), 1, 1, kThreads, 1, 1, 0,
                                          desk.streams[desk.lane], arguments, nullptr);
}

CUresult CopyDesk::launch_stretches(Desk& desk) {
  uint64_t count = 0;
  for (uint32_t i = 0; i < desk.stretch_count; ++i) count += desk.stretches.stretch[i].count;
  void* arguments[] = {&desk.stretches, &count};
  const auto blocks = static_cast<unsigned>(std::min<uint64_t>(count, blocks_));
  return device_->driver().cuLaunchKernel(copy_pages_, blocks, 1, 1, kThreads, 1, 1, 0, desk.streams[desk.lane],
                                          arguments, nullptr);
}

CUresult CopyDesk::launch_batch(Desk& desk) {
  batch_targets_.clear();
  batch_sources_.clear();
  batch_bytes_.clear();
  for (const Piece& piece : desk.pending) {
    if (!fits_list(piece)) continue;
    batch_targets_.push_back(piece.target);
    batch_sources_.push_back(piece.source);
    batch_bytes_.push_back(piece.bytes);
  }
  CUmemcpyAttributes attributes{};
  attributes.srcAccessOrder = kSourceInStreamOrder;
  size_t first = 0;
  return device_->driver().cuMemcpyBatchAsync_v2(batch_targets_.data(), batch_sources_.data(), batch_bytes_.data(),
                                                 batch_bytes_.size(), &attributes, &first, 1, desk.streams[desk.lane]);
}

void CopyDesk::look() {
  for (Desk& desk : desks_) {
    size_t done = 0;  // in order: a later one in another lane waits for it
    for (; done < desk.flying.size(); ++done) {
      const Launch& launch = desk.flying[done];
      if (desk.flags[launch.lane]->load(std::memory_order_acquire) < launch.ticket) break;
      desk.landed = launch.ticket;
      desk.flying_bytes -= launch.bytes;
    }
    if (done == 0) continue;
    desk.flying.erase(desk.flying.begin(), desk.flying.begin() + static_cast<ptrdiff_t>(done));
    checked_ns_ = 0;
  }
}

bool CopyDesk::idle() const {
  return std::all_of(desks_.begin(), desks_.end(),
                     [](const Desk& desk) { return desk.flying.empty() && !waits(desk); });
}

// A fault of the GPU, ours or of a kernel in the same context, stops all streams: the words are then never written.
Status CopyDesk::trouble() {
  if (failed_ == kSuccess && !idle()) {
    const uint64_t now = now_ns();
    if (checked_ns_ == 0) checked_ns_ = now;
    if (now - checked_ns_ >= kCheckNs) {
      checked_ns_ = now;
      const Scope scope(*device_);
      for (const Desk& desk : desks_)
        for (uint32_t lane = 0; lane < lanes_; ++lane) {
          const CUresult result = device_->driver().cuStreamQuery(desk.streams[lane]);
          if (result != kSuccess && result != kNotReady) failed_ = result;
        }
    }
  }
  return failed_ == kSuccess ? Status() : Status(StatusCode::kRailDown, failed_);
}

}  // namespace asyncfabric::cuda
