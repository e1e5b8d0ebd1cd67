// library.h: libfabric opened with dlopen; this table is the only list of its symbols that we use.
// Everything else of libfabric is reached through the ops tables of its objects (inline functions of its headers).
// A library, once opened, stays open until the process ends: it has its own exit handlers and provider threads.
// Any thread may call open_library; it is used by open_libfabric_rail and by the bare loop of the bench.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include <string>

namespace asyncfabric::libfabric {

// Versions of the interface that a library is asked for. Debian 12 has 1.17.0, and newer libraries serve it too. Profiles with memory of
// GPUs ask for 1.20 where the library has it: providers take dma-bufs only from callers that asked for that.
constexpr uint32_t kOldestApi = FI_VERSION(1, 17);
constexpr uint32_t kDmabufApi = FI_VERSION(1, 20);

// A failed completion as libraries write it: callers of 1.20 get fields behind those of the 1.17 headers.
struct CompletionError {
  fi_cq_err_entry known{};
  uint64_t later[8]{};
};

#define ASYNCFABRIC_LIBFABRIC_SYMBOLS(X) \
  X(fi_version)                          \
  X(fi_getinfo)                          \
  X(fi_freeinfo)                         \
  X(fi_dupinfo)                          \
  X(fi_fabric)                           \
  X(fi_strerror)

struct Library {
#define X(symbol) decltype(&::symbol) symbol = nullptr;
  ASYNCFABRIC_LIBFABRIC_SYMBOLS(X)
#undef X
  std::string path;                  // the file that was really loaded
  std::string version;               // of the library, not of the interface we ask for
  uint32_t newest_api = kOldestApi;  // the newest of those above that it has
  bool survives_fork = false;        // a child of the process leaves registered pages alone
};

// `name` = "" opens libfabric.so.1 by the loader's own search. nullptr: `detail` is what to install.
const Library* open_library(const std::string& name, std::string* detail);

}  // namespace asyncfabric::libfabric
