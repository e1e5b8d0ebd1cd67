// shared_library.cc: see shared_library.h.
#include "base/shared_library.h"

#include <dlfcn.h>

#include <cstdlib>

namespace asyncfabric {

void* open_shared_library(const std::string& name, std::string* why) {
  void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (library == nullptr) {
    const char* sentence = dlerror();
    *why = sentence != nullptr ? sentence : name;
  }
  return library;
}

void* find_symbol(void* library, const char* name) { return dlsym(library, name); }

std::string file_of_symbol(void* symbol, const std::string& asked) {
  Dl_info where{};
  if (dladdr(symbol, &where) == 0 || where.dli_fname == nullptr) return asked;
  const std::unique_ptr<char, decltype(&std::free)> resolved(realpath(where.dli_fname, nullptr), std::free);
  return resolved ? resolved.get() : where.dli_fname;
}

}  // namespace asyncfabric
