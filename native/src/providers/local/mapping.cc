// mapping.cc: see mapping.h.
#include "providers/local/mapping.h"

#include <cerrno>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <map>
#include <mutex>
#include <utility>

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

namespace asyncfabric::local {
namespace {

// Files mapped in this process by (device, inode).
struct Atlas {
  std::mutex mutex;
  std::map<std::pair<uint64_t, uint64_t>, std::weak_ptr<Mapping>> files;
};

Atlas& atlas() {
  static Atlas* const instance = new Atlas;  // never destroyed: rails may close during static destruction
  return *instance;
}

}  // namespace

Mapping::~Mapping() {
  {
    Atlas& known = atlas();
    const std::lock_guard lock(known.mutex);
    const auto found = known.files.find({device_, inode_});
    if (found != known.files.end() && found->second.expired()) known.files.erase(found);
  }
  munmap(data_, length_);
}

Status Mapping::create(size_t length, bool write_sealed, std::shared_ptr<Mapping>* out, UniqueFd* fd) {
  UniqueFd file(memfd_create("asyncfabric-local", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file) return {StatusCode::kNoMemory, errno};
  if (ftruncate(file.get(), static_cast<off_t>(length)) != 0) return {StatusCode::kNoMemory, errno};
  if (const Status status = map(file.get(), length, MapMode::kReadWrite, out); !status.ok()) return status;
  // FUTURE_WRITE keeps the mapping above writable. A kernel before 5.1 refuses it: the board is then protected by manners only.
  if (write_sealed) fcntl(file.get(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE);
  if (fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    return {StatusCode::kUnsupported, errno};
  *fd = std::move(file);
  return {};
}

Status Mapping::open(int fd, size_t length, MapMode mode, std::shared_ptr<Mapping>* out) {
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) return StatusCode::kPeerRejected;
  return map(fd, length, mode, out);
}

Status Mapping::open_region(int fd, size_t length, std::shared_ptr<Mapping>* out) {
  return map(fd, length, MapMode::kReadWrite, out);
}

Status Mapping::map(int fd, size_t length, MapMode mode, std::shared_ptr<Mapping>* out) {
  struct stat facts {};
  if (fstat(fd, &facts) != 0) return {StatusCode::kPeerRejected, errno};
  if (!S_ISREG(facts.st_mode) || length == 0 || static_cast<uint64_t>(facts.st_size) < length)
    return StatusCode::kPeerRejected;
  const std::pair<uint64_t, uint64_t> file{facts.st_dev, facts.st_ino};
  Atlas& known = atlas();
  const std::lock_guard lock(known.mutex);
  if (const auto found = known.files.find(file); found != known.files.end()) {
    if (auto mapping = found->second.lock(); mapping != nullptr && mapping->length_ >= length) {
      *out = std::move(mapping);
      return {};
    }
  }
  const int protection = mode == MapMode::kReadOnly ? PROT_READ : PROT_READ | PROT_WRITE;
  void* data = mmap(nullptr, length, protection, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return {StatusCode::kNoMemory, errno};
  out->reset(new Mapping(static_cast<uint8_t*>(data), length, file.first, file.second));
  known.files[file] = *out;
  return {};
}

void Mapping::populate(size_t offset, size_t length) const {
  // Older kernels answer EINVAL: then the first transfer faults the pages in.
  madvise(data_ + offset, length, MADV_POPULATE_WRITE);
}

}  // namespace asyncfabric::local
