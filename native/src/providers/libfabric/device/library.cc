// library.cc: dlopen of libfabric, once per file name and process. Runs on the thread that opens a rail.
#include "providers/libfabric/device/library.h"

#include <cstdlib>
#include <memory>

#include "base/shared_library.h"
#include "providers/libfabric/device/settings.h"
#include "providers/libfabric/device/signals.h"

namespace asyncfabric::libfabric {
namespace {

constexpr const char* kDefaultName = "libfabric.so.1";

// On kernels before 5.12 a fork takes registered pages away from the device unless libibverbs was asked, before the first registration
// of the process, to keep them. So the libibverbs that the library brought with it is asked here; on newer kernels it does nothing.
// Where it cannot be found the user's word counts, which is the provider's own.
bool prepare_for_fork(void* handle) {
  const auto prepare = reinterpret_cast<int (*)()>(find_symbol(handle, "ibv_fork_init"));
  if (prepare != nullptr) return prepare() == 0;
  const char* const promised = std::getenv("FI_EFA_FORK_SAFE");
  return promised != nullptr && *promised != '\0' && *promised != '0';
}

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
  if (version < kOldestApi) {
    *detail = library->path + " is libfabric " + library->version + ", but 1.17 or newer is needed";
    return nullptr;
  }
  library->newest_api = version < kDmabufApi ? kOldestApi : kDmabufApi;
  library->survives_fork = prepare_for_fork(handle);
  initialise(*library);
  return library;
}

}  // namespace

const Library* open_library(const std::string& name, std::string* detail) {
  static auto& libraries = *new LoadedLibraries<Library>();  // never destroyed, like the libraries
  return libraries.open(name.empty() ? kDefaultName : name, detail, load);
}

}  // namespace asyncfabric::libfabric
