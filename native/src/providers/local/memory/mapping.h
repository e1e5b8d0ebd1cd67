// mapping.h: a mapped memory file without a name: goes with the last process that holds it, also after kill -9.
// Within one process a file is mapped once: two rails of the process share the mapping. That saves address space, and
// lets ThreadSanitizer see both sides of each atomic. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <tuple>

#include "asyncfabric/status.h"
#include "base/unique_fd.h"

namespace asyncfabric::local {

// What a file is for. Part of its name within the process: a peer cannot pass one of our own files off as another kind.
enum class FileRole { kBoard, kSegment, kRegion, kSealedRegion };

// From here on nobody maps the file writable or writes to it, whichever descriptor he has; mappings that there are stay. False: the kernel
// cannot (before 5.1), or the file takes no seals.
bool seal_file(int fd);

class Mapping {
 public:
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  // A new zeroed file that nobody can shrink or grow. Nobody else can map a board writable either.
  static Status create(FileRole role, size_t length, std::shared_ptr<Mapping>* out, UniqueFd* fd);
  // A file received from a peer: a board and a sealed region are mapped read-only. Refused unless it has at least `length` bytes and can
  // never shrink, so that no peer can turn our accesses into SIGBUS; only the files of regions, made by engines, are
  // not sealed.
  static Status open(FileRole role, int fd, size_t length, std::shared_ptr<Mapping>* out);

  uint8_t* data() const { return data_; }
  template <class T>
  T* as(size_t offset = 0) const {
    return reinterpret_cast<T*>(data_ + offset);
  }
  size_t length() const { return length_; }
  void populate(size_t offset, size_t length) const;  // page tables now, not at the first transfer

 private:
  using Name = std::tuple<uint64_t, uint64_t, FileRole>;  // device, inode, role

  Mapping(uint8_t* data, size_t length, const Name& name) : data_(data), length_(length), name_(name) {}
  static Status map(FileRole role, bool writable, int fd, size_t length, std::shared_ptr<Mapping>* out);

  uint8_t* data_;
  size_t length_;
  Name name_;
};

}  // namespace asyncfabric::local
