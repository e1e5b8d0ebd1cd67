// pages.cc: see pages.h.
#include "base/pages.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cerrno>

#include <new>
#include <utility>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace asyncfabric {

constexpr uint64_t kMostCollapsed = 512ull << 20;

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

void* map_shared_file(int fd, uint64_t length, int protection) {
  if (length < kHugePageBytes) return mmap(nullptr, length, protection, MAP_SHARED, fd, 0);
  // A page table entry of 2 MiB needs an address on that boundary: take more room than needed, map inside, give the rest back.
  void* room = mmap(nullptr, length + kHugePageBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) return MAP_FAILED;
  auto* const start = static_cast<uint8_t*>(room);
  const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t used = (length + page - 1) / page * page;
  const uint64_t head = (kHugePageBytes - reinterpret_cast<uintptr_t>(start) % kHugePageBytes) % kHugePageBytes;
  void* base = mmap(start + head, length, protection, MAP_SHARED | MAP_FIXED, fd, 0);
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

// Asks for huge pages by the one call that works whatever shmem_enabled says (Linux 6.1). Random pages are then written at the speed
// of the memory and not of the page tables: a quarter to a third more for lists of 4 to 64 KiB pages. Refusal is no failure.
void collapse_to_huge_pages(void* base, uint64_t length) {
  // Collapsing copies every page (1.7 ms for each MiB): past a bound nobody wants to wait for it.
  if (length <= kMostCollapsed) (void)madvise(base, length / kHugePageBytes * kHugePageBytes, MADV_COLLAPSE);
}

Status Pages::allocate(uint64_t length, Pages* out) {
  Pages pages;
  pages.fd_ = UniqueFd(memfd_create("asyncfabric", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!pages.fd_) return {StatusCode::kNoMemory, errno};
  // posix_fallocate takes the pages now: a machine without memory says so here and not by SIGBUS in a copy.
  if (const int error = posix_fallocate(pages.fd_.get(), 0, static_cast<off_t>(length)); error != 0)
    return {StatusCode::kNoMemory, error};
  // A peer maps this file: whoever truncated it later would kill the peer with SIGBUS in the middle of a copy.
  if (fcntl(pages.fd_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) return {StatusCode::kNoMemory, errno};
  void* base = map_shared_file(pages.fd_.get(), length, PROT_READ | PROT_WRITE);
  if (base == MAP_FAILED) return {StatusCode::kNoMemory, errno};
  collapse_to_huge_pages(base, length);
  (void)madvise(base, length, MADV_POPULATE_WRITE);  // older kernels fault the pages in at the first touch
  pages.base_ = base;
  pages.length_ = length;
  *out = std::move(pages);
  return {};
}

}  // namespace asyncfabric
