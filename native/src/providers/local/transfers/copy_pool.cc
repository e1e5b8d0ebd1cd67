// copy_pool.cc: see copy_pool.h.
#include "providers/local/transfers/copy_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <csignal>
#include <utility>

#include "base/clock.h"
#include "base/start_thread.h"

namespace asyncfabric::local {
namespace {

constexpr int kManyCores = 16;    // with fewer, a helper takes its core from somebody else
constexpr uint32_t kCopiers = 4;  // memory is the limit soon
constexpr uint64_t kAlignedBytes = 4096;
constexpr uint64_t kSpinNs =
    100'000;  // a helper watches so long for more before it sleeps: the next payload is often near

}  // namespace

CopyPool::~CopyPool() {
  stopping_.store(true, std::memory_order_seq_cst);
  calls_.fetch_add(1, std::memory_order_seq_cst);
  calls_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

uint32_t CopyPool::size_for(int cores) { return cores < kManyCores ? 1 : kCopiers; }

uint32_t CopyPool::usual_size() {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  // More cores than fit into the set: an error, and more than enough.
  const int cores = sched_getaffinity(0, sizeof cpus, &cpus) == 0 ? CPU_COUNT(&cpus) : CPU_SETSIZE;
  return size_for(cores);
}

void CopyPool::start() {
  // Signals belong to the program's own threads.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  for (uint32_t i = 0; i < helpers_; ++i) {
    std::thread helper;
    if (!start_thread([this] { help(); }, &helper, nullptr).ok()) break;  // fewer do, also none
    pthread_setname_np(helper.native_handle(), "af-copy");
    threads_.push_back(std::move(helper));
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void CopyPool::copy(std::span<const Piece> pieces) {
  uint64_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.length;
  if (!std::exchange(begun_, true)) start();
  // Long pieces are cut, so that all have something to do; short ones are taken several at a time.
  count_ = 0;
  const uint64_t fitting = bytes / (kMostPieces - pieces.size() + 1) + 1;
  const uint64_t longest = std::max(kShareBytes, (fitting + kAlignedBytes - 1) / kAlignedBytes * kAlignedBytes);
  for (Piece piece : pieces) {
    while (piece.length > longest) {
      pieces_[count_++] = {piece.to, piece.from, longest};
      piece.to += longest;
      piece.from += longest;
      piece.length -= longest;
    }
    pieces_[count_++] = piece;
  }
  each_ = std::max<uint64_t>(1, kShareBytes * count_ / std::max<uint64_t>(bytes, 1));
  share_out((count_ + each_ - 1) / each_);
}

bool CopyPool::gather(Gatherer& from, uint8_t* to, uint64_t before, uint64_t length) {
  static_assert(kShareBytes % Gatherer::kPartBytes == 0);
  const uint64_t total = (length + kShareBytes - 1) / kShareBytes;
  if (length < kWorthBytes || total > kMostShares || !from.begin_parts(before, length)) return false;
  if (!std::exchange(begun_, true)) start();
  gatherer_ = &from;
  gathered_ = {to, nullptr, length};
  share_out(total);
  gatherer_ = nullptr;
  from.end_parts();
  return true;
}

void CopyPool::run(SharedWork& work, size_t total) {
  if (!std::exchange(begun_, true)) start();
  work_of_caller_ = &work;
  share_out(total);
  work_of_caller_ = nullptr;
}

void CopyPool::share_out(size_t total) {
  done_.store(0, std::memory_order_relaxed);
  const uint64_t call = (work_.load(std::memory_order_relaxed) >> 2 * kShareBits) + 1;
  work_.store(call << 2 * kShareBits | total << kShareBits, std::memory_order_release);
  calls_.fetch_add(1, std::memory_order_seq_cst);
  calls_.notify_all();  // a system call only if somebody sleeps
  const uint64_t mine = take_shares(nullptr);
  while (done_.load(std::memory_order_acquire) + mine < total) cpu_pause();
}

void CopyPool::carry_out(size_t share) {
  if (work_of_caller_ != nullptr) return work_of_caller_->carry_out(share);
  if (gatherer_ != nullptr) {
    const uint64_t at = share * kShareBytes;
    return gatherer_->copy_part(gathered_.to + at, at, std::min(kShareBytes, gathered_.length - at));
  }
  const size_t end = std::min<size_t>(count_, (share + 1) * each_);
  for (size_t at = share * each_; at < end; ++at) copier_.copy(pieces_[at].to, pieces_[at].from, pieces_[at].length);
}

size_t CopyPool::take_shares(std::atomic<uint64_t>* done) {
  size_t mine = 0;
  uint64_t work = work_.load(std::memory_order_acquire);
  while (taken(work) < shares(work)) {
    if (!work_.compare_exchange_weak(work, work + 1, std::memory_order_acquire, std::memory_order_acquire)) continue;
    carry_out(taken(work));
    ++mine;
    if (done != nullptr) done->fetch_add(1, std::memory_order_release);
    work = work_.load(std::memory_order_acquire);
  }
  return mine;
}

void CopyPool::help() {
  uint32_t seen = 0;
  uint64_t since = now_ns();
  while (!stopping_.load(std::memory_order_relaxed)) {
    const uint32_t calls = calls_.load(std::memory_order_seq_cst);
    if (take_shares(&done_) != 0) {
      since = now_ns();
      continue;
    }
    if (calls != seen) {
      seen = calls;
      since = now_ns();
    } else if (now_ns() - since >= kSpinNs) {
      calls_.wait(calls, std::memory_order_seq_cst);
      since = now_ns();
    } else {
      cpu_pause();
    }
  }
}

}  // namespace asyncfabric::local
