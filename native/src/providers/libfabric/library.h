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

// Debian 12 has 1.17.0. Newer libraries serve this version of the interface too.
constexpr uint32_t kApiVersion = FI_VERSION(1, 17);

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
  std::string path;     // the file that was really loaded
  std::string version;  // of the library, not of the interface we ask for
};

// `name` = "" opens libfabric.so.1 by the loader's own search. nullptr: `detail` says what to install.
const Library* open_library(const std::string& name, std::string* detail);

}  // namespace asyncfabric::libfabric
