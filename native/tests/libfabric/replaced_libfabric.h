// replaced_libfabric.h: what a test decides about, and learns from, the library of replaced_libfabric.cc: a libfabric whose only
// provider is "efa". It carries nothing: rails open over it and register memory with it. Constants are those of libfabric's headers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace asyncfabric::testing {

struct ReplacedLibfabric {
  // decided by the test
  uint32_t version = 0;     // what fi_version() answers
  int fork_init = 0;        // what the ibv_fork_init() of its libibverbs answers
  int cuda_option = 0;      // what FI_OPT_CUDA_API_PERMITTED is answered with
  int emulated_answer = 0;  // what FI_OPT_EFA_EMULATED_WRITE is answered with
  bool emulates_writes = false;
  int dmabuf_answer = 0;
  // learned by the test
  uint32_t requested = 0;  // version of the interface in the newest fi_getinfo()
  uint64_t dmabufs = 0;    // registrations by dma-buf that were taken
  uint64_t plain = 0;      // registrations of memory of a GPU by its address
  uint64_t iova = 0;       // of the newest dma-buf: where the provider lets the memory begin
  uint64_t offset = 0;
  size_t length = 0;
  int fd = -1;
};

}  // namespace asyncfabric::testing
