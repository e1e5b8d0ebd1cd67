// library.cc: dlopen of libibverbs, once per file name and process. Runs on the thread that opens a rail.
#include "providers/verbs/library.h"

#include <dlfcn.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

namespace asyncfabric::verbs {
namespace {

constexpr const char* kDefaultName = "libibverbs.so.1";

std::string real_path(void* symbol, const std::string& asked) {
  Dl_info where{};
  if (dladdr(symbol, &where) == 0 || where.dli_fname == nullptr) return asked;
  std::unique_ptr<char, decltype(&std::free)> resolved(realpath(where.dli_fname, nullptr), std::free);
  return resolved ? resolved.get() : where.dli_fname;
}

std::unique_ptr<Library> load(const std::string& name, std::string* detail) {
  // RTLD_LOCAL: another libibverbs in the process (a wheel that bundles one) must not be mixed with ours.
  void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) {
    const char* why = dlerror();
    *detail = "libibverbs could not be opened (" + std::string(why != nullptr ? why : name) +
              "); on Debian and Ubuntu: apt-get install libibverbs1 ibverbs-providers";
    return nullptr;
  }
  auto library = std::make_unique<Library>();
#define X(symbol)                                                                                 \
  library->symbol = reinterpret_cast<decltype(library->symbol)>(dlsym(handle, #symbol));          \
  if (library->symbol == nullptr) {                                                               \
    *detail = name + " has no symbol " #symbol ": it is not libibverbs of rdma-core 34 or newer"; \
    return nullptr;                                                                               \
  }
  ASYNCFABRIC_VERBS_SYMBOLS(X)
#undef X
  library->path = real_path(reinterpret_cast<void*>(library->ibv_get_device_list), name);
  return library;
}

}  // namespace

const Library* open_library(const std::string& name, std::string* detail) {
  static std::mutex mutex;
  static auto& opened = *new std::map<std::string, std::unique_ptr<Library>>();  // never destroyed, like the libraries
  const std::string& file = name.empty() ? std::string(kDefaultName) : name;
  const std::lock_guard<std::mutex> guard(mutex);
  auto found = opened.find(file);
  if (found != opened.end()) return found->second.get();
  std::unique_ptr<Library> library = load(file, detail);  // a failure is not kept: it may be installed later
  if (library == nullptr) return nullptr;
  return opened.emplace(file, std::move(library)).first->second.get();
}

int query_port(ibv_context* context, uint8_t port, ibv_port_attr* out) {
  verbs_context* extended = verbs_get_ctx_op(context, query_port);
  if (extended == nullptr) return ENOSYS;
  std::memset(out, 0, sizeof *out);
  return extended->query_port(context, port, out, sizeof *out);
}

}  // namespace asyncfabric::verbs
