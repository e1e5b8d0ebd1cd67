// copy.h: moving payload bytes. Streaming (non-temporal) stores do not read the target's cache lines before overwriting
// them, which is worth a third of the memory traffic once a copy is larger than a few KiB. After copy() returns, a
// release store publishes the bytes, whichever stores were used.
#pragma once

#include <cstddef>
#include <cstdint>

namespace asyncfabric::local {

enum class CopyMode { kAuto, kPlain, kStreaming };

class Copier {
 public:
  explicit Copier(CopyMode mode);
  void copy(void* target, const void* source, size_t length) const;
  const char* name() const { return name_; }

 private:
  using Stream = void (*)(uint8_t* target, const uint8_t* source, size_t length);
  Stream stream_ = nullptr;
  size_t threshold_ = 0;  // streaming from this many bytes on
  const char* name_ = "memcpy";
};

}  // namespace asyncfabric::local
