// copy_pool.h: several threads that copy for one rail, so that large payloads go faster than one core can move them.
// The caller (under the engine lock) copies too, and helpers that are late are not waited for: only what one of them has begun is. They start with
// the first payload that is worth it, sleep soon after the last one, and end with the pool.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <thread>
#include <vector>

#include "provider/gatherer.h"
#include "providers/local/transfers/copy.h"

namespace asyncfabric::local {

struct Piece {
  uint8_t* to = nullptr;
  const uint8_t* from = nullptr;
  size_t length = 0;
};

// Work that its owner cuts into shares: each is carried out once, by any thread.
class SharedWork {
 public:
  virtual void carry_out(size_t share) = 0;

 protected:
  ~SharedWork() = default;
};

class CopyPool {
 public:
  static constexpr size_t kMostPieces = 1024;            // of one call
  static constexpr uint64_t kWorthBytes = 128ull << 10;  // a call with less is better done by the caller alone

  CopyPool(const Copier& copier, uint32_t helpers) : copier_(copier), helpers_(helpers) {}
  ~CopyPool();
  CopyPool(const CopyPool&) = delete;
  CopyPool& operator=(const CopyPool&) = delete;

  // How many threads, the caller among them, are worth it on so many cores, and on those that this process may use.
  static uint32_t size_for(int cores);
  static uint32_t usual_size();

  bool present() const { return helpers_ != 0; }
  // [engine lock] Copies all of them, in any order; they do not overlap. When it returns, a release store publishes the bytes.
  void copy(std::span<const Piece> pieces);
  // [engine lock] The same for what lies apart: those `length` bytes behind the first `before`. False, and nothing was copied: `copy` of it.
  bool gather(Gatherer& from, uint8_t* to, uint64_t before, uint64_t length);
  // [engine lock] Returns when all shares, at most kMostShares, are carried out.
  void run(SharedWork& work, size_t shares);

 private:
  // What is to do, in one word, so that who takes a share of it takes it of the call that he has seen: a number of the call, how many
  // shares it has, how many of those are taken.
  static constexpr uint64_t kShareBits = 12;
  static constexpr uint64_t kMostShares = (1ull << kShareBits) - 1;
  static constexpr uint64_t kShareBytes = 32ull << 10;

  static uint64_t taken(uint64_t work) { return work & kMostShares; }
  static uint64_t shares(uint64_t work) { return work >> kShareBits & kMostShares; }

  void start();
  void help();
  void share_out(size_t shares);  // returns when all are done
  void carry_out(size_t share);
  size_t take_shares(std::atomic<uint64_t>* done);  // copies shares until none is left, counts each; returns how many

  const Copier& copier_;
  const uint32_t helpers_;
  bool begun_ = false;
  std::vector<std::thread> threads_;

  // Written by the caller while no share is taken; read by whoever took one. Partners: the release store of work_ and its exchange.
  std::array<Piece, kMostPieces> pieces_;
  size_t count_ = 0;
  size_t each_ = 1;               // pieces of a share
  Gatherer* gatherer_ = nullptr;  // then shares are of these bytes instead
  Piece gathered_;
  SharedWork* work_of_caller_ = nullptr;  // then shares are of this

  alignas(64) std::atomic<uint64_t> work_{0};
  alignas(64) std::atomic<uint64_t> done_{0};  // shares of this call; helpers add (release), the caller looks (acquire)
  alignas(64) std::atomic<uint32_t> calls_{0};  // what sleeping helpers wait for; odd numbers are never special
  std::atomic<bool> stopping_{false};
};

}  // namespace asyncfabric::local
