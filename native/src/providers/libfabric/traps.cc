// traps.cc: see traps.h. Memory of the traps is reserved, not used: pages that stale writes dirtied are given back at the next call.
#include "providers/libfabric/traps.h"

#include <sys/mman.h>

namespace asyncfabric::libfabric {
namespace {

constexpr size_t kMaxTraps =
    65536;  // a write that is older than that many releases is not waiting for its answer any more

}  // namespace

Traps::~Traps() {
  traps_.clear();
  for (const Pit& each : pits_) munmap(each.base, each.length);
}

void* Traps::pit(uint64_t length) {
  for (const Pit& each : pits_) (void)madvise(each.base, each.length, MADV_DONTNEED);
  if (!pits_.empty() && pits_.back().length >= length) return pits_.back().base;
  void* base = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return nullptr;
  pits_.push_back({base, length});
  return base;
}

void Traps::set(uint64_t key, uint64_t length) {
  void* base = pit(length);
  fid_mr* mr = nullptr;
  if (base == nullptr || fi_mr_reg(domain_, base, length, FI_REMOTE_WRITE, 0, key, 0, &mr, nullptr) != 0) return;
  if (traps_.size() == kMaxTraps) {
    tags_.erase(traps_.front().tag);
    traps_.pop_front();
  }
  traps_.push_back({MrPtr(mr), key_tag(key)});
  tags_.insert(key_tag(key));
}

}  // namespace asyncfabric::libfabric
