// library.cc: dlopen of libfabric, once per file name and process. Runs on the thread that opens a rail.
#include "providers/libfabric/library.h"

#include <memory>

#include "base/shared_library.h"
#include "providers/libfabric/settings.h"
#include "providers/libfabric/signals.h"

namespace asyncfabric::libfabric {
namespace {

constexpr const char* kDefaultName = "libfabric.so.1";

std::unique_ptr<Library> load(const std::string& name, std::string* detail) {
  const KeepSignalHandlers keep;
  std::string why;
  void* handle = open_shared_library(name, &why);
  if (handle == nullptr) {
    *detail = "libfabric could not be opened (" + why + "); on Debian and Ubuntu: apt-get install libfabric1";
    return nullptr;
  }
  auto library = std::make_unique<Library>();
#define X(symbol)                                                                                \
  library->symbol = reinterpret_cast<decltype(library->symbol)>(find_symbol(handle, #symbol));   \
  if (library->symbol == nullptr) {                                                              \
    *detail = name + " has no symbol " #symbol ": it is not libfabric, or it is older than 1.0"; \
    return nullptr;                                                                              \
  }
  ASYNCFABRIC_LIBFABRIC_SYMBOLS(X)
#undef X
  library->path = file_of_symbol(reinterpret_cast<void*>(library->fi_getinfo), name);
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
  static auto& libraries = *new LoadedLibraries<Library>();  // never destroyed, like the libraries
  return libraries.open(name.empty() ? kDefaultName : name, detail, load);
}

}  // namespace asyncfabric::libfabric
