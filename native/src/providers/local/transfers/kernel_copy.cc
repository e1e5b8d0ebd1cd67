// kernel_copy.cc: see kernel_copy.h.
#include "providers/local/transfers/kernel_copy.h"

#include <algorithm>
#include <cerrno>

namespace asyncfabric::local {

bool KernelCopy::has_room(uint64_t length) const { return count_ + length / kShareBytes + 1 <= kMostPieces; }

void KernelCopy::add(uint8_t* here, uint8_t* there, uint64_t length) {
  // Pieces stay so short that calls can be cut between them.
  const uint64_t longest = pool_.present() ? kShareBytes : UINT64_MAX;
  while (length > 0) {
    if (count_ > 0) {
      iovec &last_here = here_[count_ - 1], &last_there = there_[count_ - 1];
      const uint64_t part = std::min(length, longest - std::min<uint64_t>(longest, last_here.iov_len));
      if (part > 0 && static_cast<uint8_t*>(last_here.iov_base) + last_here.iov_len == here &&
          static_cast<uint8_t*>(last_there.iov_base) + last_there.iov_len == there) {
        last_here.iov_len += part;
        last_there.iov_len += part;
        here += part;
        there += part;
        length -= part;
        continue;
      }
    }
    const uint64_t part = std::min(length, longest);
    here_[count_] = {here, part};
    there_[count_++] = {there, part};
    here += part;
    there += part;
    length -= part;
  }
}

ssize_t KernelCopy::run(pid_t process, bool writes) {
  process_ = process;
  writes_ = writes;
  const size_t calls = pool_.present() ? cut(writes) : 1;
  if (calls == 1) return call(0, count_);
  pool_.run(*this, calls);
  ssize_t moved = 0;
  for (const Call& one : std::span(calls_).first(calls)) {
    if (one.moved < 0 && moved == 0) {
      errno = one.error;
      return -1;
    }
    if (one.moved < 0) return moved;
    moved += one.moved;
    if (static_cast<uint64_t>(one.moved) != one.bytes) return moved;
  }
  return moved;
}

void KernelCopy::carry_out(size_t share) {
  Call& one = calls_[share];
  one.moved = call(one.first, one.pieces);
  one.error = one.moved < 0 ? errno : 0;
}

size_t KernelCopy::cut(bool writes) {
  uint64_t bytes = 0;
  for (size_t i = 0; i < count_; ++i) bytes += here_[i].iov_len;
  if (bytes < kWorthBytes || !apart(writes)) return 1;
  const uint64_t each = std::max(kShareBytes, bytes / (kMostCalls - 1) + 1);
  size_t calls = 0;
  for (size_t i = 0; i < count_; ++i) {
    if (calls == 0 || (calls_[calls - 1].bytes + here_[i].iov_len > each && calls < kMostCalls))
      calls_[calls++] = {.first = i};
    calls_[calls - 1].pieces += 1;
    calls_[calls - 1].bytes += here_[i].iov_len;
  }
  return calls;
}

bool KernelCopy::apart(bool writes) {
  const auto& written = writes ? there_ : here_;
  for (size_t i = 0; i < count_; ++i)
    order_[i] = {reinterpret_cast<uintptr_t>(written[i].iov_base), written[i].iov_len};
  std::sort(order_.begin(), order_.begin() + static_cast<std::ptrdiff_t>(count_));
  for (size_t i = 1; i < count_; ++i)
    if (order_[i - 1].first + order_[i - 1].second > order_[i].first) return false;
  return true;
}

ssize_t KernelCopy::call(size_t first, size_t pieces) const {
  const auto copy = writes_ ? process_vm_writev : process_vm_readv;
  return copy(process_, here_.data() + first, pieces, there_.data() + first, pieces, 0);
}

}  // namespace asyncfabric::local
