// mapping.cc: see mapping.h.
#include "providers/local/memory/mapping.h"
#include "base/pages.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <cerrno>

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

// Files mapped in this process.
struct Atlas {
  std::mutex mutex;
  std::map<std::tuple<uint64_t, uint64_t, FileRole>, std::weak_ptr<Mapping>> files;
};

Atlas& atlas() {
  static Atlas* const instance = new Atlas;  // never destroyed: rails may close during static destruction
  return *instance;
}

}  // namespace

bool seal_file(int fd) { return fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE) == 0; }

Mapping::~Mapping() {
  {
    Atlas& known = atlas();
    const std::lock_guard lock(known.mutex);
    const auto found = known.files.find(name_);
    if (found != known.files.end() && found->second.expired()) known.files.erase(found);
  }
  munmap(data_, length_);
}

Status Mapping::create(FileRole role, size_t length, std::shared_ptr<Mapping>* out, UniqueFd* fd) {
  UniqueFd file(memfd_create("asyncfabric-local", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file) return {StatusCode::kNoMemory, errno};
  if (ftruncate(file.get(), static_cast<off_t>(length)) != 0) return {StatusCode::kNoMemory, errno};
  if (const Status status = map(role, true, file.get(), length, out); !status.ok()) return status;
  // FUTURE_WRITE keeps the mapping above writable. A kernel before 5.1 refuses it: the board is then protected by
  // manners only.
  if (role == FileRole::kBoard) seal_file(file.get());
  if (fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    return {StatusCode::kUnsupported, errno};
  *fd = std::move(file);
  return {};
}

Status Mapping::open(FileRole role, int fd, size_t length, std::shared_ptr<Mapping>* out) {
  const int seals = fcntl(fd, F_GET_SEALS);
  const bool region = role == FileRole::kRegion || role == FileRole::kSealedRegion;
  if (!region && (seals < 0 || (seals & F_SEAL_SHRINK) == 0)) return StatusCode::kPeerRejected;
  return map(role, role != FileRole::kBoard && role != FileRole::kSealedRegion, fd, length, out);
}

Status Mapping::map(FileRole role, bool writable, int fd, size_t length, std::shared_ptr<Mapping>* out) {
  struct stat facts{};
  if (fstat(fd, &facts) != 0) return {StatusCode::kPeerRejected, errno};
  if (!S_ISREG(facts.st_mode) || length == 0 || static_cast<uint64_t>(facts.st_size) < length)
    return StatusCode::kPeerRejected;
  const Name name{facts.st_dev, facts.st_ino, role};
  Atlas& known = atlas();
  const std::lock_guard lock(known.mutex);
  if (const auto found = known.files.find(name); found != known.files.end()) {
    if (auto mapping = found->second.lock(); mapping != nullptr && mapping->length_ >= length) {
      *out = std::move(mapping);
      return {};
    }
  }
  const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  void* data = map_shared_file(fd, length, protection);
  if (data == MAP_FAILED) return {StatusCode::kNoMemory, errno};
  out->reset(new Mapping(static_cast<uint8_t*>(data), length, name));
  known.files[name] = *out;
  return {};
}

void Mapping::populate(size_t offset, size_t length) const {
  // Older kernels answer EINVAL: then the first transfer faults the pages in.
  const bool readable_only = std::get<FileRole>(name_) == FileRole::kSealedRegion;
  madvise(data_ + offset, length, readable_only ? MADV_POPULATE_READ : MADV_POPULATE_WRITE);
}

}  // namespace asyncfabric::local
