// pages.h: memory that the engine owns: a memfd mapped here, so that a process of the same host can map it too. The file has no
// name and goes with the last process that holds it. Control thread.
#pragma once

#include <cstdint>

#include "asyncfabric/status.h"
#include "base/unique_fd.h"

namespace asyncfabric {

constexpr uint64_t kHugePageBytes = 2ull << 20;

// mmap(MAP_SHARED) of a file from its start; from 2 MiB on at an address where huge pages of the file can be mapped as such.
// MAP_FAILED and errno as mmap.
void* map_shared_file(int fd, uint64_t length, int protection);
// Pages that are mapped shared, whole, once more, at such an address too; munmap ends it. MAP_FAILED and errno as mremap.
void* map_shared_again(void* base, uint64_t length);

class Pages {
 public:
  Pages() = default;
  Pages(Pages&& other) noexcept;
  Pages& operator=(Pages&& other) noexcept;
  ~Pages();

  // Faults everything in, so that the first transfer does not pay for it. kNoMemory when the machine has not enough.
  static Status allocate(uint64_t length, Pages* out);

  void* base() const { return base_; }
  uint64_t length() const { return length_; }
  int memfd() const { return fd_.get(); }

 private:
  UniqueFd fd_;
  void* base_ = nullptr;
  uint64_t length_ = 0;
};

}  // namespace asyncfabric
