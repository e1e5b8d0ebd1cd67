// kernel_copy.h: a run of pieces that the kernel copies to or from another process, by process_vm_writev or readv. [engine lock]
// One call pins and copies with one core; where the copy pool has helpers, a long run whose pieces do not overlap is cut into several.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "providers/local/transfers/copy_pool.h"

namespace asyncfabric::local {

class KernelCopy final : private SharedWork {
 public:
  static constexpr size_t kMostPieces = 1024;            // the kernel's limit on iovecs
  static constexpr uint64_t kWorthBytes = 512ull << 10;  // a run with less is one call

  explicit KernelCopy(CopyPool& pool) : pool_(pool) {}

  void clear() { count_ = 0; }
  bool has_room(uint64_t length) const;
  // Adds a piece, at `there` in the other process; one that follows the last one on both sides is a part of it.
  void add(uint8_t* here, uint8_t* there, uint64_t length);

  // Copies all pieces; returns how many bytes from the front are copied without a gap, or -1 and errno if not even the first one is.
  ssize_t run(pid_t process, bool writes);

 private:
  static constexpr uint64_t kShareBytes = 128ull << 10;  // of one call of several
  static constexpr size_t kMostCalls = 32;

  struct Call {
    size_t first = 0, pieces = 0;
    uint64_t bytes = 0;
    ssize_t moved = 0;
    int error = 0;
  };

  void carry_out(size_t share) override;
  size_t cut(bool writes);  // returns how many calls; 1: not worth it
  bool apart(bool writes);  // no two pieces are written to the same byte
  ssize_t call(size_t first, size_t pieces) const;

  CopyPool& pool_;
  pid_t process_ = 0;
  bool writes_ = false;
  size_t count_ = 0;
  std::array<iovec, kMostPieces> here_;
  std::array<iovec, kMostPieces> there_;
  std::array<Call, kMostCalls> calls_;
  std::array<std::pair<uintptr_t, size_t>, kMostPieces> order_;
};

}  // namespace asyncfabric::local
