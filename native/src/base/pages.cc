// pages.cc: see pages.h.
#include "base/pages.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cerrno>

#include <new>
#include <utility>

#include "base/clock.h"
#include "base/memory_room.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace asyncfabric {

constexpr uint64_t kCollapsedAtOnce = 64ull << 20;
constexpr uint64_t kMostCollapseNs = 2'000'000'000;

Pages::Pages(Pages&& other) noexcept
    : fd_(std::move(other.fd_)), base_(std::exchange(other.base_, nullptr)), length_(std::exchange(other.length_, 0)) {}

Pages& Pages::operator=(Pages&& other) noexcept {
  if (this != &other) {
    this->~Pages();
    new (this) Pages(std::move(other));
  }
  return *this;
}

Pages::~Pages() {
  if (base_ != nullptr) munmap(base_, length_);
}

namespace {

// What map(address) maps there, for an address where huge pages are mapped as such. A page table entry of 2 MiB needs one on that boundary:
// take more room than needed, map inside, give the rest back.
template <class Map>
void* map_at_boundary(uint64_t length, const Map& map) {
  void* room = mmap(nullptr, length + kHugePageBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) return MAP_FAILED;
  auto* const start = static_cast<uint8_t*>(room);
  const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t used = (length + page - 1) / page * page;
  const uint64_t head = (kHugePageBytes - reinterpret_cast<uintptr_t>(start) % kHugePageBytes) % kHugePageBytes;
  void* base = map(start + head);
  if (base == MAP_FAILED) {
    const int error = errno;
    munmap(room, length + kHugePageBytes);
    errno = error;
    return MAP_FAILED;
  }
  if (head > 0) munmap(start, head);
  const uint64_t end = (length + kHugePageBytes + page - 1) / page * page;
  if (head + used < end) munmap(start + head + used, end - head - used);
  return base;
}

}  // namespace

void* map_shared_file(int fd, uint64_t length, int protection) {
  if (length < kHugePageBytes) return mmap(nullptr, length, protection, MAP_SHARED, fd, 0);
  return map_at_boundary(length, [&](void* at) { return mmap(at, length, protection, MAP_SHARED | MAP_FIXED, fd, 0); });
}

// mremap of 0 bytes leaves the old mapping as it is.
void* map_shared_again(void* base, uint64_t length) {
  if (length < kHugePageBytes) return mremap(base, 0, length, MREMAP_MAYMOVE);
  return map_at_boundary(length, [&](void* at) { return mremap(base, 0, length, MREMAP_MAYMOVE | MREMAP_FIXED, at); });
}

// Asks for huge pages by the one call that works whatever shmem_enabled states (Linux 6.1). Random pages are then written at the speed
// of the memory and not of the page tables: a quarter to a third more for lists of 4 to 64 KiB pages; and a peer that maps gigabytes
// has 500 times fewer to map. Refusal is no failure.
void collapse_to_huge_pages(uint8_t* base, uint64_t length) {
  // Where memory is in pieces each takes milliseconds: past a bound nobody wants to wait for it.
  const uint64_t until = now_ns() + kMostCollapseNs;
  for (uint64_t at = 0; at + kHugePageBytes <= length && now_ns() < until; at += kCollapsedAtOnce) {
    const uint64_t left = (length - at) / kHugePageBytes * kHugePageBytes;
    if (madvise(base + at, left < kCollapsedAtOnce ? left : kCollapsedAtOnce, MADV_COLLAPSE) != 0) return;
  }
}

Status Pages::allocate(uint64_t length, Pages* out) {
  // The kernel does not refuse what is beyond the bound of a control group: it kills.
  if (length >= kHugePageBytes && length > memory_room_bytes()) return {StatusCode::kNoMemory, ENOMEM};
  Pages pages;
  pages.fd_ = UniqueFd(memfd_create("asyncfabric", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!pages.fd_) return {StatusCode::kNoMemory, errno};
  if (ftruncate(pages.fd_.get(), static_cast<off_t>(length)) != 0) return {StatusCode::kNoMemory, errno};
  // The first small page of each huge one: what has no page yet is cleared and not copied when it is collapsed, four times quicker.
  for (uint64_t at = 0; at + kHugePageBytes <= length; at += kHugePageBytes) {
    const int error = posix_fallocate(pages.fd_.get(), static_cast<off_t>(at), 1);
    if (error != 0) return {StatusCode::kNoMemory, error};
  }
  // A peer maps this file: whoever truncated it later would kill the peer with SIGBUS in the middle of a copy.
  if (fcntl(pages.fd_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) return {StatusCode::kNoMemory, errno};
  void* base = map_shared_file(pages.fd_.get(), length, PROT_READ | PROT_WRITE);
  if (base == MAP_FAILED) return {StatusCode::kNoMemory, errno};
  pages.base_ = base;
  pages.length_ = length;
  collapse_to_huge_pages(static_cast<uint8_t*>(base), length);
  // Takes the pages that are still missing: a machine without memory fails here and not by SIGBUS in a copy.
  if (const int error = posix_fallocate(pages.fd_.get(), 0, static_cast<off_t>(length)); error != 0)
    return {StatusCode::kNoMemory, error};
  (void)madvise(base, length, MADV_POPULATE_WRITE);  // older kernels fault the pages in at the first touch
  *out = std::move(pages);
  return {};
}

}  // namespace asyncfabric
