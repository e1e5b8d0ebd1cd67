// work_pool.cc: see work_pool.h.
#include "base/work_pool.h"

#include <pthread.h>
#include <sched.h>

#include <csignal>
#include <utility>

#include "base/clock.h"
#include "base/start_thread.h"

namespace asyncfabric {
namespace {

constexpr int kManyCores = 16;    // with fewer, a helper takes its core from somebody else
constexpr uint32_t kWorkers = 4;  // memory is the limit soon
constexpr uint64_t kSpinNs =
    100'000;  // a helper watches so long for more before it sleeps: the next call is often near

}  // namespace

WorkPool::~WorkPool() {
  stopping_.store(true, std::memory_order_seq_cst);
  calls_.fetch_add(1, std::memory_order_seq_cst);
  calls_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

uint32_t WorkPool::size_for(int cores) { return cores < kManyCores ? 1 : kWorkers; }

uint32_t WorkPool::usual_size() {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  // More cores than fit into the set: an error, and more than enough.
  const int cores = sched_getaffinity(0, sizeof cpus, &cpus) == 0 ? CPU_COUNT(&cpus) : CPU_SETSIZE;
  return size_for(cores);
}

void WorkPool::start() {
  // Signals belong to the program's own threads.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  for (uint32_t i = 0; i < helpers_; ++i) {
    std::thread helper;
    if (!start_thread([this] { help(); }, &helper, nullptr).ok()) break;  // fewer do, also none
    pthread_setname_np(helper.native_handle(), name_);
    threads_.push_back(std::move(helper));
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void WorkPool::run(SharedWork& work, size_t total) {
  if (!std::exchange(begun_, true)) start();
  of_caller_ = &work;
  done_.store(0, std::memory_order_relaxed);
  const uint64_t call = (work_.load(std::memory_order_relaxed) >> 2 * kShareBits) + 1;
  work_.store(call << 2 * kShareBits | total << kShareBits, std::memory_order_release);
  calls_.fetch_add(1, std::memory_order_seq_cst);
  calls_.notify_all();  // a system call only if somebody sleeps
  const uint64_t mine = take_shares(nullptr);
  while (done_.load(std::memory_order_acquire) + mine < total) cpu_pause();
}

size_t WorkPool::take_shares(std::atomic<uint64_t>* done) {
  size_t mine = 0;
  uint64_t work = work_.load(std::memory_order_acquire);
  while (taken(work) < shares(work)) {
    if (!work_.compare_exchange_weak(work, work + 1, std::memory_order_acquire, std::memory_order_acquire)) continue;
    of_caller_->carry_out(taken(work));
    ++mine;
    if (done != nullptr) done->fetch_add(1, std::memory_order_release);
    work = work_.load(std::memory_order_acquire);
  }
  return mine;
}

void WorkPool::help() {
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

}  // namespace asyncfabric
