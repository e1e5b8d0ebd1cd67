// library.cc: dlopen of libfabric, once per file name and process. Runs on the thread that opens a rail.
#include "providers/libfabric/library.h"

#include <dlfcn.h>

#include <map>
#include <memory>
#include <mutex>

#include "providers/libfabric/settings.h"
#include "providers/libfabric/signals.h"

namespace asyncfabric::libfabric {
namespace {

constexpr const char* kDefaultName = "libfabric.so.1";

std::string real_path(void* symbol, const std::string& asked) {
  Dl_info where{};
  if (dladdr(symbol, &where) == 0 || where.dli_fname == nullptr) return asked;
  std::unique_ptr<char, decltype(&std::free)> resolved(realpath(where.dli_fname, nullptr), std::free);
  return resolved ? resolved.get() : where.dli_fname;
}

std::unique_ptr<Library> load(const std::string& name, std::string* detail) {
  const KeepSignalHandlers keep;
  // RTLD_LOCAL: another libfabric in the process (a wheel that bundles one) must not be mixed with ours.
  void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) {
    const char* why = dlerror();
    *detail = "libfabric could not be opened (" + std::string(why != nullptr ? why : name) +
              "); on Debian and Ubuntu: apt-get install libfabric1";
    return nullptr;
  }
  auto library = std::make_unique<Library>();
#define X(symbol)                                                                                \
  library->symbol = reinterpret_cast<decltype(library->symbol)>(dlsym(handle, #symbol));         \
  if (library->symbol == nullptr) {                                                              \
    *detail = name + " has no symbol " #symbol ": it is not libfabric, or it is older than 1.0"; \
    return nullptr;                                                                              \
  }
  ASYNCFABRIC_LIBFABRIC_SYMBOLS(X)
#undef X
  library->path = real_path(reinterpret_cast<void*>(library->fi_getinfo), name);
  const uint32_t version = library->fi_version();
  library->version = std::to_string(FI_MAJOR(version)) + "." + std::to_string(FI_MINOR(version));
  if (version < kApiVersion) {
    *detail = library->path + " is libfabric " + library->version + ", but 1.17 or newer is needed";
    return nullptr;
  }
  initialise(*library);
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

}  // namespace asyncfabric::libfabric
