// shared_library.h: opens libraries that are not linked, once per file name and process. Any thread.
// They are never closed: they may have threads, exit handlers and memory that others point to.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace asyncfabric {

// Null: *why is the loader's sentence. With a scope of its own (RTLD_LOCAL): another copy in the process, as of a wheel that bundles
// one, must not be mixed with ours.
void* open_shared_library(const std::string& name, std::string* why);
void* find_symbol(void* library, const char* name);  // null: it has none of that name

// The file that was really loaded; `asked` when the loader does not report it.
std::string file_of_symbol(void* symbol, const std::string& asked);

// What `load` makes of a file, kept for good. A failure is not kept: the library may be installed later.
template <typename Library>
class LoadedLibraries {
 public:
  template <typename Load>  // std::unique_ptr<Library>(const std::string& file, std::string* detail)
  const Library* open(const std::string& file, std::string* detail, Load load) {
    const std::lock_guard lock(mutex_);
    if (const auto found = loaded_.find(file); found != loaded_.end()) return found->second.get();
    std::unique_ptr<Library> library = load(file, detail);
    return library != nullptr ? loaded_.emplace(file, std::move(library)).first->second.get() : nullptr;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::unique_ptr<Library>> loaded_;
};

}  // namespace asyncfabric
