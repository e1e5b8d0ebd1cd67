// copy_pool.cc: see copy_pool.h.
#include "providers/local/transfers/copy_pool.h"

#include <algorithm>

namespace asyncfabric::local {
namespace {

constexpr uint64_t kAlignedBytes = 4096;

}  // namespace

void CopyPool::copy(std::span<const Piece> pieces) {
  uint64_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.length;
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
  pool_.run(*this, (count_ + each_ - 1) / each_);
}

bool CopyPool::gather(Gatherer& from, uint8_t* to, uint64_t before, uint64_t length) {
  static_assert(kShareBytes % Gatherer::kPartBytes == 0);
  const uint64_t total = (length + kShareBytes - 1) / kShareBytes;
  if (length < kWorthBytes || total > WorkPool::kMostShares || !from.begin_parts(before, length)) return false;
  gatherer_ = &from;
  gathered_ = {to, nullptr, length};
  pool_.run(*this, total);
  gatherer_ = nullptr;
  from.end_parts();
  return true;
}

void CopyPool::carry_out(size_t share) {
  if (gatherer_ != nullptr) {
    const uint64_t at = share * kShareBytes;
    return gatherer_->copy_part(gathered_.to + at, at, std::min(kShareBytes, gathered_.length - at));
  }
  const size_t end = std::min<size_t>(count_, (share + 1) * each_);
  for (size_t at = share * each_; at < end; ++at) copier_.copy(pieces_[at].to, pieces_[at].from, pieces_[at].length);
}

}  // namespace asyncfabric::local
