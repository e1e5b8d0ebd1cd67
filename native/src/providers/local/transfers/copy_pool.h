// copy_pool.h: the threads that copy for one rail, so that large payloads go faster than one core can move them. [engine lock]
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/work_pool.h"
#include "provider/gatherer.h"
#include "providers/local/transfers/copy.h"

namespace asyncfabric::local {

struct Piece {
  uint8_t* to = nullptr;
  const uint8_t* from = nullptr;
  size_t length = 0;
};

class CopyPool final : private SharedWork {
 public:
  static constexpr size_t kMostPieces = 1024;            // of one call
  static constexpr uint64_t kWorthBytes = 128ull << 10;  // a call with less is better done by the caller alone

  CopyPool(const Copier& copier, uint32_t helpers) : copier_(copier), pool_(helpers, "af-copy") {}

  bool present() const { return pool_.present(); }
  // Copies all of them, in any order; they do not overlap. When it returns, a release store publishes the bytes.
  void copy(std::span<const Piece> pieces);
  // The same for what lies apart: those `length` bytes behind the first `before`. False, and nothing was copied: `copy` of it.
  bool gather(Gatherer& from, uint8_t* to, uint64_t before, uint64_t length);
  // Returns when all shares, at most WorkPool::kMostShares, are carried out.
  void run(SharedWork& work, size_t shares) { pool_.run(work, shares); }

 private:
  static constexpr uint64_t kShareBytes = 32ull << 10;

  void carry_out(size_t share) override;

  const Copier& copier_;

  // Written by the caller before the pool runs.
  std::array<Piece, kMostPieces> pieces_;
  size_t count_ = 0;
  size_t each_ = 1;               // pieces of a share
  Gatherer* gatherer_ = nullptr;  // then shares are of these bytes instead
  Piece gathered_;
  WorkPool pool_;  // last: its helpers end before what they read
};

}  // namespace asyncfabric::local
