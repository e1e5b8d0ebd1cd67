// segment_lock.cc: see segment_lock.h.
#include "providers/libfabric/segment_lock.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>

#include "providers/libfabric/process.h"
#include "providers/libfabric/segment_layout.h"

namespace asyncfabric::libfabric {
namespace {

constexpr size_t kHeadBytes = 4096;

int word_of(const volatile pthread_spinlock_t* lock) {
  return __atomic_load_n(reinterpret_cast<const volatile int*>(lock), __ATOMIC_RELAXED);
}

}  // namespace

std::unique_ptr<SegmentLock> SegmentLock::open(std::string_view segment) {
  const int file = shm_open(("/" + std::string(segment)).c_str(), O_RDWR | O_CLOEXEC, 0);
  if (file < 0) return nullptr;
  void* mapped = mmap(nullptr, kHeadBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (mapped == MAP_FAILED) return nullptr;
  std::unique_ptr<SegmentLock> lock(new SegmentLock(mapped));
  const auto* head = static_cast<const SegmentHead*>(mapped);
  if (head->version != SegmentHead::kVersion || head->pid != shm_owner(segment)) return nullptr;
  return lock;
}

SegmentLock::SegmentLock(void* head) : head_(head) {
  pthread_spinlock_t own;
  pthread_spin_init(&own, PTHREAD_PROCESS_PRIVATE);
  free_ = word_of(&own);
  pthread_spin_destroy(&own);
}

SegmentLock::~SegmentLock() { munmap(head_, kHeadBytes); }

bool SegmentLock::held() const { return word_of(&static_cast<const SegmentHead*>(head_)->lock) != free_; }

// Not pthread_spin_unlock(), which race detectors take for the unlocking of somebody else's mutex. It is.
void SegmentLock::free() {
  __atomic_store_n(reinterpret_cast<volatile int*>(&static_cast<SegmentHead*>(head_)->lock), free_, __ATOMIC_RELEASE);
}

}  // namespace asyncfabric::libfabric
