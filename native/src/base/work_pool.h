// work_pool.h: several threads that carry out the shares of one call together with its caller. Helpers that are late are not waited for:
// only what one of them has begun is. They start with the first call, sleep soon after the last one, and end with the pool.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

namespace asyncfabric {

// Work that its owner cuts into shares: each is carried out once, by any thread.
class SharedWork {
 public:
  virtual void carry_out(size_t share) = 0;

 protected:
  ~SharedWork() = default;
};

class WorkPool {
 public:
  static constexpr uint64_t kShareBits = 12;
  static constexpr uint64_t kMostShares = (1ull << kShareBits) - 1;

  // `name`: of the helper threads, at most 15 characters.
  WorkPool(uint32_t helpers, const char* name) : helpers_(helpers), name_(name) {}
  ~WorkPool();
  WorkPool(const WorkPool&) = delete;
  WorkPool& operator=(const WorkPool&) = delete;

  // How many threads, the caller among them, are worth it on so many cores, and on those that this process may use.
  static uint32_t size_for(int cores);
  static uint32_t usual_size();

  bool present() const { return helpers_ != 0; }
  // One call at a time. Returns when all shares, at most kMostShares, are carried out; what they stored is seen by the caller.
  void run(SharedWork& work, size_t shares);

 private:
  // What is to do, in one word, so that who takes a share of it takes it of the call that he has seen: a number of the call, how many
  // shares it has, how many of those are taken.
  static uint64_t taken(uint64_t work) { return work & kMostShares; }
  static uint64_t shares(uint64_t work) { return work >> kShareBits & kMostShares; }

  void start();
  void help();
  size_t take_shares(
      std::atomic<uint64_t>* done);  // carries shares out until none is left, counts each; returns how many

  const uint32_t helpers_;
  const char* const name_;
  bool begun_ = false;
  std::vector<std::thread> threads_;

  // Written by the caller while no share is taken; read by whoever took one. Partners: the release store of work_ and its exchange.
  SharedWork* of_caller_ = nullptr;

  alignas(64) std::atomic<uint64_t> work_{0};
  alignas(64) std::atomic<uint64_t> done_{0};  // shares of this call; helpers add (release), the caller looks (acquire)
  alignas(64) std::atomic<uint32_t> calls_{0};  // what sleeping helpers wait for; odd numbers are never special
  std::atomic<bool> stopping_{false};
};

}  // namespace asyncfabric
