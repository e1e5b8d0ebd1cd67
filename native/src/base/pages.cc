// pages.cc: see pages.h.
#include "base/pages.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cerrno>

#include <new>
#include <utility>

namespace asyncfabric {

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

Status Pages::allocate(uint64_t length, Pages* out) {
  Pages pages;
  pages.fd_ = UniqueFd(memfd_create("asyncfabric", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!pages.fd_) return {StatusCode::kNoMemory, errno};
  // posix_fallocate takes the pages now: a machine without memory says so here and not by SIGBUS in a copy.
  if (const int error = posix_fallocate(pages.fd_.get(), 0, static_cast<off_t>(length)); error != 0)
    return {StatusCode::kNoMemory, error};
  // A peer maps this file: whoever truncated it later would kill the peer with SIGBUS in the middle of a copy.
  if (fcntl(pages.fd_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) return {StatusCode::kNoMemory, errno};
  void* base = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, pages.fd_.get(), 0);
  if (base == MAP_FAILED) return {StatusCode::kNoMemory, errno};
  pages.base_ = base;
  pages.length_ = length;
  *out = std::move(pages);
  return {};
}

}  // namespace asyncfabric
