// library.cc: dlopen of libibverbs, once per file name and process. Runs on the thread that opens a rail.
#include "providers/verbs/device/library.h"

#include <cerrno>
#include <cstring>
#include <memory>

#include "base/shared_library.h"

namespace asyncfabric::verbs {
namespace {

constexpr const char* kDefaultName = "libibverbs.so.1";

std::unique_ptr<Library> load(const std::string& name, std::string* detail) {
  std::string why;
  void* handle = open_shared_library(name, &why);
  if (handle == nullptr) {
    *detail = "libibverbs could not be opened (" + why +
              "); on Debian and Ubuntu: apt-get install libibverbs1 ibverbs-providers";
    return nullptr;
  }
  auto library = std::make_unique<Library>();
#define X(symbol)                                                                                 \
  library->symbol = reinterpret_cast<decltype(library->symbol)>(find_symbol(handle, #symbol));    \
  if (library->symbol == nullptr) {                                                               \
    *detail = name + " has no symbol " #symbol ": it is not libibverbs of rdma-core 34 or newer"; \
    return nullptr;                                                                               \
  }
  ASYNCFABRIC_VERBS_SYMBOLS(X)
#undef X
  library->path = file_of_symbol(reinterpret_cast<void*>(library->ibv_get_device_list), name);
  return library;
}

}  // namespace

const Library* open_library(const std::string& name, std::string* detail) {
  static auto& libraries = *new LoadedLibraries<Library>();  // never destroyed, like the libraries
  return libraries.open(name.empty() ? kDefaultName : name, detail, load);
}

int query_port(ibv_context* context, uint8_t port, ibv_port_attr* out) {
  verbs_context* extended = __extension__ verbs_get_ctx_op(context, query_port);  // the macro is GNU C
  if (extended == nullptr) return ENOSYS;
  std::memset(out, 0, sizeof *out);
  return extended->query_port(context, port, out, sizeof *out);
}

}  // namespace asyncfabric::verbs
