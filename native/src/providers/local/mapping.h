// mapping.h: a mapped memory file without a name: goes with the last process that holds it, also after kill -9.
// Within one process a file is mapped once: two rails of the process share the mapping. That saves address space, and lets
// ThreadSanitizer see both sides of each atomic. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "asyncfabric/status.h"
#include "base/unique_fd.h"

namespace asyncfabric::local {

enum class MapMode { kReadOnly, kReadWrite };

class Mapping {
 public:
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  // A new zeroed file that nobody can shrink or grow. With `write_sealed`, nobody else can map it writable either.
  static Status create(size_t length, bool write_sealed, std::shared_ptr<Mapping>* out, UniqueFd* fd);
  // A file of ours received from a peer: refused unless it has at least `length` bytes and can never shrink, so that no
  // peer can turn our accesses into SIGBUS.
  static Status open(int fd, size_t length, MapMode mode, std::shared_ptr<Mapping>* out);
  // A region's file: made by the peer's engine, which may not have sealed it.
  static Status open_region(int fd, size_t length, std::shared_ptr<Mapping>* out);

  uint8_t* data() const { return data_; }
  template <class T>
  T* as(size_t offset = 0) const {
    return reinterpret_cast<T*>(data_ + offset);
  }
  size_t length() const { return length_; }
  void populate(size_t offset, size_t length) const;  // page tables now, not at the first transfer

 private:
  Mapping(uint8_t* data, size_t length, uint64_t device, uint64_t inode)
      : data_(data), length_(length), device_(device), inode_(inode) {}
  static Status map(int fd, size_t length, MapMode mode, std::shared_ptr<Mapping>* out);

  uint8_t* data_;
  size_t length_;
  uint64_t device_;
  uint64_t inode_;
};

}  // namespace asyncfabric::local
