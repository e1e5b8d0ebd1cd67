// replaced_library.h: a copy of a library that a test replaces, in a file of its own: a library is opened once for a file and process, and
// keeps what it answered then.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <string>

namespace asyncfabric::testing {

class ReplacedLibrary {
 public:
  explicit ReplacedLibrary(const std::string& original) {
    static std::atomic<int> copies{0};
    path_ = std::filesystem::path(::testing::TempDir()) /
            ("replaced_" + std::to_string(getpid()) + "_" + std::to_string(++copies) + ".so");
    std::filesystem::copy_file(original, path_, std::filesystem::copy_options::overwrite_existing);
    handle_ = dlopen(path_.c_str(), RTLD_NOW | RTLD_LOCAL);
    EXPECT_NE(handle_, nullptr) << dlerror();
  }
  ~ReplacedLibrary() { std::filesystem::remove(path_); }
  ReplacedLibrary(const ReplacedLibrary&) = delete;
  ReplacedLibrary& operator=(const ReplacedLibrary&) = delete;

  std::string path() const { return path_.string(); }
  template <class Decisions>
  Decisions* decisions(const char* name) const {
    return reinterpret_cast<Decisions* (*)()>(dlsym(handle_, name))();
  }

 private:
  std::filesystem::path path_;
  void* handle_ = nullptr;
};

}  // namespace asyncfabric::testing
